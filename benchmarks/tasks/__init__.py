"""Whole tasks as users run them, each beside the best package that can do it, to the same quality."""
