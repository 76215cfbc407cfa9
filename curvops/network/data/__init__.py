"""Batches, inputs, and fingerprints of data."""
