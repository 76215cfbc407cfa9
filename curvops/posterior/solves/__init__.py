"""Linear systems with a posterior's precision, and modes computed by solving them."""
