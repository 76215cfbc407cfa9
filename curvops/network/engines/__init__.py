"""Products with J on one batch, and the choice of the engine that computes them."""
