"""Learned normal distributions of the weights: variational families and Kalman filters."""
