"""Runs of samplers, their chains, and predictions from draws."""
