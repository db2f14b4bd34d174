"""Graph operators: each has a reference, a CPU and (where it pays) a Triton implementation."""
