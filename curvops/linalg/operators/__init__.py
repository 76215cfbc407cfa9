"""Structured matrices and their algebra."""
