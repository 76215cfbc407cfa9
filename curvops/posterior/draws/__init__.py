"""Draws from a posterior by solving linear systems, and their noise."""
