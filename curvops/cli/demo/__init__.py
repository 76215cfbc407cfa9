"""The main job: a trained network, its full GGN posterior, and what it knows of rotated digits."""
