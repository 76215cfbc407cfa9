"""Kronecker-factored curvatures: KFAC, EKFAC, and sums of them."""
