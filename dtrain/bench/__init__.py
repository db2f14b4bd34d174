"""Benchmarks: one module each, run by ``dtrain bench``."""
