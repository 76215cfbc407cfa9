"""Draws of a posterior by solving linear systems, and their noise."""
