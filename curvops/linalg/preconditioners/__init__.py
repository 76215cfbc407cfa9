"""Approximate inverses; they know no solver."""
