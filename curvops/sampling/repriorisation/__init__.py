"""Repriorisation: sampling wide networks in the coordinates of their last layer."""
