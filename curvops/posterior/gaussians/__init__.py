"""Gaussian posteriors: how they are built, updated, saved and loaded."""
