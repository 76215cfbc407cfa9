"""Gaussian posteriors: how they are made, updated, saved and loaded."""
