"""Linear systems: CG, MINRES, LSMR, dual descent, and the choice between them."""
