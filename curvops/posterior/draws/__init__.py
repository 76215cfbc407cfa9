"""Draws of a posterior by solving, and their noise."""
