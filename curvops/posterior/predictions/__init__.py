"""Predictions of any posterior: outputs, covariances, probabilities, uncertainty and scores."""
