"""dtrain trains graph neural networks across many GPUs that fail."""

__version__ = "0.1.0"
