"""Samplers: pure functions from a key and destination nodes to the blocks of a microbatch."""
