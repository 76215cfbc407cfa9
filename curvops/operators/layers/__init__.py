"""Rows of a curvature by layer: as matrices, their sums and squares."""
