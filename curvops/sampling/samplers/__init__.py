"""Samplers of weights, one file each."""
