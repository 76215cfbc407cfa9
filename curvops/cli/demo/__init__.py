"""The demo: a trained network, its full GGN posterior, and its uncertainty on rotated digits."""
