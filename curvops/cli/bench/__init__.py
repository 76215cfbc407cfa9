"""Which solver and which estimator for which matrix: products, seconds, true errors and claimed ones."""
