"""Up to which size a matrix is formed. The questions differ in what forming costs beside the other way."""

DENSE_SIZE = 256
"""An operator of so many rows is formed by linear_operator's entries, and to be solved with, whoever's it is: no dearer
than iterating, with every gradient."""

EXACT_SIZE = 256
"""An estimator without a budget forms a matrix of so many rows, and its value is exact."""

DENSE_BLOCK = 2048
"""A block of so many rows, among others that have closed forms, is formed once for all later answers; a matrix of so
many rows that is at hand is factorised, by its own operator in float64, whatever its dtype."""
