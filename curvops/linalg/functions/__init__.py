"""Functions of a matrix times vectors."""
