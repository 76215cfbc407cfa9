"""The version, a constant: the package also runs from its tree, where it is not installed."""

__version__ = "0.3.0"
