"""Systems with a posterior's precision, and the modes found by them."""
