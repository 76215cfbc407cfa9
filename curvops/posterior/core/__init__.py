"""The terms of a posterior: its arguments, its precision with a cache of values, systems with it, and its mode."""
