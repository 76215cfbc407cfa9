"""Matrix-free linear algebra with a trained network, linearised at its weights."""
