"""Batches, inputs, and what tells data apart."""
