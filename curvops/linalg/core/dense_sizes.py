"""Up to which size a matrix is formed: five questions, which differ in what forming costs beside the other way."""

DENSE_SIZE = 256
"""An operator up to this many rows is formed by linear_operator's entries: no dearer than iterating, all gradients."""

EXACT_SIZE = 256
"""An estimator without a budget gives the exact value by so many products: as many as its probes would take."""

FEW_ROWS = 256
"""`solve` forms an operator up to this many rows: as many products as an iteration may take."""

DENSE_TENSOR = 2048
"""`solve` factorises a tensor, which is formed already, up to this many rows: a second in float64, and then exact."""

DENSE_BLOCK = 2048
"""A block among others without a closed form is formed up to this many rows and serves every later answer; a matrix
that is factorised is so in float64."""
