"""The effective dimension tr (G + A)⁻¹G: the number of directions that the data determine.

>>> import torch
>>> from curvops.linalg import effective_dimension
>>> G = torch.diag(torch.arange(1.0, 501.0) ** -2)
>>> estimate = effective_dimension(G, 1e-3, generator=torch.Generator().manual_seed(0))
>>> low, high = estimate.interval()
>>> bool(low <= (G.diagonal() / (G.diagonal() + 1e-3)).sum() <= high)
True
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import current_run
from curvops.linalg.core.memory import Multiply
from curvops.linalg.core.probed import Limits, probing
from curvops.linalg.core.results import Estimate
from curvops.linalg.core.sharded import algorithm
from curvops.linalg.core.vectors import Given, Matrix, as_matrix, describe_square, product
from curvops.linalg.estimators.brackets import share
from curvops.linalg.estimators.dense_spectrum import known_spectrum
from curvops.linalg.estimators.quadrature import LEAST, LEAST_VECTORS, run
from curvops.progress import Progress


@algorithm
def effective_dimension(
    G: Matrix | Given,
    prior: float | int | Float[Tensor, ""] | Float[Tensor, " n"],
    *,
    rtol: float = 0.01,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Estimate:
    """Estimate tr (G + A)⁻¹G for positive semidefinite G and a prior precision A = prior · I or diag(prior).

    A vector prior is whitened: tr (G' + I)⁻¹G' with G' = A^-½GA^-½.

    Args:
        G: (n, n), positive semidefinite.
        prior: the prior precision, a positive number or a vector (n,).
        rtol: the goal for standard error and bias bound, each relative to the value.
        max_matvecs: a limit on products; by default as many as are needed to meet rtol. With n or more, and for n ≤ 256
            without a limit, the value is exact by a dense eigendecomposition.
        generator: source of the probes.
        memory_budget: bytes for the Lanczos bases; None is the rest of the budget of the linearisation behind G.
        progress: as in `cg`.

    Returns:
        An Estimate; ``bias_bound`` is half the width of the Gauss and Gauss–Radau bracket, plus rounding. For a whole
        grid of scalar priors from one run, use ``spectral_quadrature(G, shift=smallest).effective_dimension(grid)``.

    Raises:
        NotPositiveSemidefiniteError: an eigenvalue below zero was found (it is also a ValueError).
        ValueError: G is not square, a product is not finite, or an option is out of range.

    Source: stochastic Lanczos quadrature as in ``spectral_quadrature``.

    Examples:
        >>> G = torch.diag(torch.tensor([9.0, 1.0, 0.0]))
        >>> round(float(co.linalg.effective_dimension(G, 1.0)), 4)
        1.4
    """
    G = as_matrix(G)
    facts = describe_square(G)
    limits = Limits(rtol, max_matvecs, memory_budget)
    limits.check(min(LEAST, facts.rows))
    precision = torch.as_tensor(prior, dtype=facts.dtype, device=facts.device).detach()
    if precision.ndim > 1 or (precision.ndim == 1 and len(precision) != facts.rows):
        raise ValueError(f"prior must be a number or a vector ({facts.rows},), got shape {tuple(precision.shape)}.")
    if not bool(((precision > 0) & torch.isfinite(precision)).all()):
        raise ValueError(f"prior must be positive and finite, got {float(precision.amin())}.")
    mu = 1.0 if precision.ndim else float(prior)
    exact = limits.allow_dense(facts.rows)
    plain = product(G) if precision.ndim == 0 else _whiten(product(G), precision.rsqrt()[:, None])
    current_run().expect(facts.rows if exact else max_matvecs)
    with torch.no_grad(), probing(G, generator, limits, LEAST_VECTORS, plain) as probed:
        found = known_spectrum(probed.multiply, facts, rtol) if exact else run(probed, [mu], of_shift=share)
        return found.effective_dimension(mu)


def _whiten(multiply: Multiply, scale: Tensor) -> Multiply:
    return lambda V: scale * multiply(scale * V)
