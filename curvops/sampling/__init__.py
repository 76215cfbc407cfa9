"""Samplers, variational families and Kalman filters: one protocol, any curvature operator as preconditioner."""
