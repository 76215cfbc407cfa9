"""Benchmarks of speed and memory, mostly in units of one loss gradient. Nothing here asserts a time."""
