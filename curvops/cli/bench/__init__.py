"""Which solver and which estimator for which matrix: products, seconds, true and claimed errors."""
