"""Estimates of the diagonal of a matrix known by its products.

>>> import torch
>>> from curvops.linalg import diagonal
>>> A = torch.diag(torch.arange(1.0, 501.0) ** -2)
>>> estimate = diagonal(A, rtol=0.01, generator=torch.Generator().manual_seed(0))
>>> estimate.reason.name, bool((estimate.value - A.diagonal()).norm() < 0.01 * A.diagonal().norm())
('CONVERGED', True)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import Progress
from curvops.checks import check_options
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import Multiply, algorithm
from curvops.linalg.core.probed import PROBES_AT_ONCE, Estimator, Limits, Probed, estimate, require_finite
from curvops.linalg.core.results import Estimate, Reason, caution
from curvops.linalg.core.vectors import ROUNDINGS, Given, Matrix
from curvops.linalg.estimators.exchangeable import LeaveOneOut, NystromSketch, RangeSketch

METHODS = ("xdiag", "xnysdiag", "bekas", "exact")
# By the coverage of single entries in docs/estimators.md.
INFLATION = 1.5


@algorithm
def diagonal(
    A: Matrix | Given,
    *,
    method: str | None = None,
    rtol: float | None = None,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Estimate:
    """Estimate diag A from products with random signs; of an operator that knows it, return it without a product.

    `A.diagonal()`, as of every LinearOperator, is a tensor and always exact: without a product if it is known,
    otherwise by n products.

    Args:
        A: (n, n). "xdiag" also multiplies by Aᵀ.
        method: None returns the diagonal of an operator if it is known, otherwise uses "xdiag". A name requests an
            estimate: "xdiag" (any A, two products per probe), "xnysdiag" (positive semidefinite A, one product per
            probe), "bekas" (mean of z ∘ Az, streamed), "exact" (n products).
        rtol: add probes until ‖stderr‖, inflated, is at most rtol ‖value‖; earlier products are kept.
        max_matvecs: as in `trace`. The intervals are for single entries.
        generator: the source of the probes.
        memory_budget: as in `trace`.
        progress: as in `cg`.

    Returns:
        An Estimate whose value, stderr and interval have shape (n,).

    Raises:
        ValueError: as `trace`.
        NotPositiveSemidefiniteError: xnysdiag found an eigenvalue clearly below zero (it is also a ValueError).

    Source: Bekas, Kokiopoulou & Saad 2007; Epperly, Tropp & Webber 2024.

    Examples:
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> co.linalg.diagonal(A).value
        tensor([2., 3.])
    """
    A = vec.as_matrix(A)
    vec.describe_square(A)
    check_options(rtol=rtol, max_matvecs=max_matvecs, generator=generator)
    if method is None and (exact := vec.known_diagonal(A)) is not None:
        return Estimate.rounded(*exact, rtol)
    families: dict[str, Callable[[Probed], Estimator]] = {
        "xdiag": lambda probed: XDiag(probed, require_finite(vec.product(A.mT))),
        "xnysdiag": XNysDiag,
        "bekas": Bekas,
    }
    method = "xdiag" if method is None else method
    return estimate(A, method, families, exact_diagonal, Limits(rtol, max_matvecs), generator)[0]


def exact_diagonal(probed: Probed) -> Estimate:
    """Compute the diagonal by a product for each column."""
    total, sizes = None, list[Tensor]()
    for E in vec.unit_blocks(probed.facts, probed.block):
        Y = probed.multiply(E)
        sums, sizes = vec.by_rows(E, Y, function=lambda E, Y: _row_sums(E * Y)), [*sizes, vec.norm(Y)]
        total = sums if total is None else total + sums
    assert total is not None
    rounding = ROUNDINGS * torch.finfo(total.dtype).eps * torch.cat(sizes)
    return Estimate.rounded(total[:, 0], rounding, probed.limits.rtol, probed.facts.rows)


def _row_sums(X: Tensor, weight: float = 1.0) -> Tensor:
    return vec.combine(X, torch.full((X.shape[1], 1), weight, dtype=torch.float64, device=X.device))


def _moments(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and summed squared deviations of the columns, (n, 1) each; the caller scales against overflow."""
    mean = _row_sums(samples, 1 / samples.shape[1])
    return mean, _row_sums((samples - mean).square())


def _mean_error(samples: Tensor) -> Tensor:
    """Return the root of Σ (x − x̄)²/(K (K − 1)) in each row."""
    size = float(vec.largest(samples).amax())
    size, K = size if size > 0 else 1.0, samples.shape[1]
    _, squares = _moments(samples / size)
    return size * (squares[:, 0].clamp_min(0) / (K * (K - 1))).sqrt()


class Bekas:
    """Bekas' estimator, the mean of z ∘ Az over random signs, streamed."""

    least, first, held = 2, PROBES_AT_ONCE, 0.0

    def __init__(self, probed: Probed) -> None:
        self.probed, facts = probed, probed.facts
        self.count, self.size = 0, 1.0
        self.mean = torch.zeros(facts.rows, 1, dtype=facts.dtype, device=facts.device)
        self.squares = torch.zeros_like(self.mean)

    def spend(self, matvecs: int) -> None:
        """Spend one product per probe."""
        for Z in self.probed.stream(matvecs - self.count):
            Y = self.probed.multiply(Z)
            if not self.count and (size := float(vec.largest(Y).amax())) > 0:
                self.size = size
            moments = vec.by_rows(Z, Y, function=lambda Z, Y: torch.cat(_moments(Z * Y / self.size), 1))
            mean, squares = moments.split(1, 1)
            new, total = Y.shape[1], self.count + Y.shape[1]
            step = mean - self.mean
            self.mean = self.mean + step * (new / total)
            self.squares = self.squares + squares + step.square() * (self.count * new / total)
            self.count = total

    def estimate(self) -> Estimate:
        """Return mean and standard error of each entry."""
        stderr = self.size * (self.squares / (self.count * (self.count - 1))).sqrt()
        return Estimate(self.size * self.mean[:, 0], stderr[:, 0], self.count, self.count, 0.0, Reason.BUDGET_SPENT)


class XDiag(LeaveOneOut):
    """XDiag, the mean over i of diag(Qᵢ Qᵢᵀ A) + ωᵢ ∘ (I − QᵢQᵢᵀ) A ωᵢ, random signs ω; exact for rank ≤ K − 1."""

    least, first, held = 4, 16, 3.0

    def __init__(self, probed: Probed, adjoint: Multiply) -> None:
        self.sketch: RangeSketch = RangeSketch(probed, "signs", adjoint)

    def estimate(self) -> Estimate:
        """Return mean and standard error of each entry, and the jackknife's interval; the bias bound is rounding.

        The samples share all but one probe and may all be wrong in the same way, as in `leave_one_out`.
        """
        sketch, out = self.sketch, self.sketch.leave_out()
        eps, K = torch.finfo(sketch.facts.dtype).eps, sketch.columns
        # A ωᵢ = Q R eᵢ lies in the range, so its residual without probe i is (sᵢᵀR eᵢ) Q sᵢ.
        left = (out.S * sketch.R).sum(0)
        entries = partial(self._entries, S=out.S, left=left, eps=eps)
        value, stderr, jackknife = vec.by_rows(sketch.Omega, sketch.Q, sketch.Z, function=entries).mT
        stderr = torch.maximum(stderr, 1e-3 * jackknife)  # samples may agree by chance
        widening = torch.where(stderr > 0, caution(K) * jackknife / (INFLATION * stderr), 1.0)
        bias = torch.full_like(stderr, eps * float(vec.norm(sketch.Z).amax()))
        return Estimate(value, stderr, K, sketch.matvecs, bias, Reason.BUDGET_SPENT, INFLATION, widening=widening)

    @staticmethod
    def _entries(Omega: Tensor, Q: Tensor, Z: Tensor, S: Tensor, left: Tensor, eps: float) -> Float[Tensor, "n 3"]:
        """Return value, standard error by the samples and by the jackknife, for the entries of these rows."""
        QS, ZS = vec.combine(Q, S), vec.combine(Z, S)
        in_range, residual = QS * ZS, Omega * left.to(QS)
        samples = residual * QS - in_range
        value = _row_sums(Q * Z) + _row_sums(samples, 1 / len(S))
        # Without i and j the range lacks e = (sᵢ − c sⱼ)/√(1 − c²) beside sⱼ, c = sᵢᵀsⱼ: eᵀR eⱼ = −c sⱼᵀR eⱼ/√(1 − c²).
        c = S.mT @ S
        a = 1 / (1 - c.square()).clamp_min(100 * eps)
        a.fill_diagonal_(0)
        ac = a * c
        without = QS * vec.combine(ZS, ac) + ZS * vec.combine(QS, ac) - in_range * (a.sum(0) - 1).to(in_range)
        without = without - vec.combine(in_range, ac * c) + vec.combine(residual * QS, a)
        without = without - QS * vec.combine(residual, ac)
        return torch.stack([value[:, 0], _mean_error(samples), _mean_error(without)], 1)


class XNysDiag(LeaveOneOut):
    """XNysDiag, the mean over i of diag Âᵢ + ωᵢ ∘ (A − Âᵢ)ωᵢ, Âᵢ the Nyström approximation without probe i."""

    least, first, held = 2, 16, 6.0

    def __init__(self, probed: Probed) -> None:
        self.sketch: NystromSketch = NystromSketch(probed, "signs")

    def estimate(self) -> Estimate:
        """Return mean and standard error of each entry; the bias bound is the stabilising shift."""
        sketch = self.sketch
        Y, inverse, _, nu = sketch.shift()
        pivots = inverse.square().sum(1).sqrt()
        share = torch.where(pivots > 0, 1 / pivots, 0.0)

        def entries(Y: Tensor, Omega: Tensor) -> Float[Tensor, "n 2"]:
            F = vec.combine(Y, inverse)
            in_range = vec.combine(F, inverse.mT * share)
            samples = in_range * (Omega * share.to(in_range) - in_range)
            value = _row_sums(F.square()) - nu + _row_sums(samples, 1 / samples.shape[1])
            return torch.stack([value[:, 0], _mean_error(samples)], 1)

        value, stderr = vec.by_rows(Y, sketch.Omega, function=entries).mT
        K, bias = sketch.matvecs, torch.full_like(stderr, nu)
        return Estimate(value, stderr, K, K, bias, Reason.BUDGET_SPENT, INFLATION)
