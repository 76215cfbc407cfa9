"""Arguments, priors and the cache of a posterior: all that its answers start from."""
