"""Faults on purpose: what they are, how they reach a trainer, what they do there."""
