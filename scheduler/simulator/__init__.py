"""The scheduler's own code on a virtual clock: clusters, faults and what they cost.

Nothing here reads a clock or a random number of the machine: time is virtual, and everything
random follows from a seed.
"""
