"""Arguments, priors and the cache of a posterior, from which all its results start."""
