"""Arguments, priors and the cache of a posterior, on which all its results are based."""
