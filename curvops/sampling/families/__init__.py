"""Normal distributions of weights that are learned: variational families, Kalman filters."""
