"""Products with J on one batch, and the choice of who makes them."""
