"""Stochastic estimates with error bars."""
