"""Graph neural networks as ordered lists of layers, so that any contiguous cut makes stages."""
