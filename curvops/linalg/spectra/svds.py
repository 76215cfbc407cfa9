"""A few singular triplets of a rectangular matrix by thick-restart block Golub–Kahan bidiagonalisation.

>>> import torch
>>> from curvops.linalg import svds
>>> A = torch.zeros(4, 3).double()
>>> A[0, 0], A[1, 1] = 3.0, 2.0
>>> triplets = svds(A, 2, generator=torch.Generator().manual_seed(0))
>>> triplets.values.round(decimals=6).tolist(), triplets.reasons[0].name
([3.0, 2.0], 'CONVERGED')
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import Progress, current_run
from curvops.checks import check_choice, check_options, checked_number, checked_whole
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import algorithm, working
from curvops.linalg.core.results import Reason, SingularTriplets
from curvops.linalg.core.vectors import CHUNK, ROUNDINGS, Description, Given, Matrix, Vectors
from curvops.linalg.solvers.systems import Callback, iterations_allowed
from curvops.linalg.spectra.thick_restart import (
    BLOCK_VECTORS,
    RTOL,
    Basis,
    CountedProduct,
    Projection,
    Search,
    Which,
    basis_columns,
    verdicts,
    within_zeros,
)


@algorithm
def svds(
    A: Matrix | Given,
    k: int,
    which: str = "LM",
    *,
    rtol: float | int | None = None,
    block_size: int = 2,
    maxiter: int | None = None,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    callback: Callback | None = None,
    progress: Progress = None,
) -> SingularTriplets:
    """Find the k largest (or smallest) singular triplets of A (m, n), with multiplicity.

    AᵀA is not formed, so that small singular values have the same absolute accuracy as large ones, the rounding of ‖A‖.
    A triplet is CONVERGED when its true residual is at most rtol σ and no better one was missed, as in `eigsh`. One
    iteration is a block product of A and one of Aᵀ.

    Args:
        A: (m, n), with transposed products.
        k: the number of triplets.
        which: "LM" for the largest, "SM" for the smallest, as in SciPy.
        rtol: the residual to reach, relative to σ; the default is as in `eigsh`.
        block_size: the number of start vectors, as in `eigsh`.
        maxiter: a limit on iterations; by default as in `eigsh`.
        max_matvecs: a limit on products of A and of Aᵀ together.
        generator: source of the start vectors.
        memory_budget: bytes for the bases, with vectors of both lengths; None is the rest of the budget of the
            linearisation behind A.
        callback: as in `eigsh`.
        progress: as in `cg`.

    Returns:
        SingularTriplets with values (k,), left vectors (m, k), right vectors (n, k), a residual and a reason for each.

    Raises:
        ValueError: k is not in 1..min(m, n), ``which`` is unknown, or the budget is too small for k triplets.

    Source: Baglama & Reichel 2005, with blocks and full reorthogonalisation.

    Examples:
        >>> A = torch.tensor([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]]).double()
        >>> co.linalg.svds(A, 2).values.round(decimals=6)
        tensor([3., 2.], dtype=torch.float64)
    """
    A = vec.as_matrix(A)
    facts = vec.describe(A)
    n = min(facts.rows, facts.columns)
    checked_whole("k", k, 1, n)
    check_choice("which", which, ("LM", "SM"))
    aimed = RTOL if rtol is None else checked_number("rtol", rtol, "[0, inf)")
    check_options(maxiter=maxiter, max_matvecs=max_matvecs, block_size=block_size)
    least = math.ceil((k + 2 + BLOCK_VECTORS) * facts.pair_bytes / facts.vector_bytes)
    tall, wide = (A, A.mT) if facts.rows >= facts.columns else (A.mT, A)
    current_run().expect(max_matvecs)
    with torch.no_grad(), working(A, least, vec.product(tall)) as (forward, room):
        capacity, b, capped = basis_columns(n, facts.pair_bytes, k, min(n, block_size), 1, room)
        most = math.inf if max_matvecs is None else max_matvecs - 2 * k
        if most < 2 * (k + b):
            raise ValueError(f"max_matvecs={max_matvecs} is too small: {k} triplets need at least {4 * k + 2 * b}.")
        multiply, adjoint = CountedProduct(forward), CountedProduct(vec.product(wide))
        start = vec.random_block(vec.describe(tall), b, "gaussian", generator)
        process = GolubKahan(multiply, adjoint, vec.describe(wide), start, capacity, generator)
        most_steps = iterations_allowed(n, maxiter)
        end: Which = "LA" if which == "LM" else "SA"  # singular values are not negative
        search = Search(process, end, k, aimed, capacity, capped, most_steps, most, callback)
        reason = search.run(random_start=True)
        triplets = _certify(process, k, which, rtol, reason, search.history)
    return replace(triplets, U=triplets.V, V=triplets.U) if facts.rows < facts.columns else triplets


def _sizes(process: GolubKahan, U: Vectors, V: Vectors) -> tuple[Tensor, Tensor]:
    """Return singular values and true residuals of pairs of vectors, a block at a time if they are long."""
    values, residuals = [], []
    width = max(process.block_size, CHUNK // max(U.shape[0], V.shape[0]))
    for start in range(0, V.shape[1], width):
        u, v = vec.part(U, start, start + width), vec.part(V, start, start + width)
        image = process.multiply(v)
        values.append(vec.inner(u, image).abs())
        scale = values[-1].to(u.dtype)
        right = vec.norm(image - u * scale)
        del image
        left = vec.norm(process.adjoint(u) - v * scale)
        residuals.append((right.square() + left.square()).sqrt())
    return torch.cat(values), torch.cat(residuals)


def _certify(
    process: GolubKahan, k: int, which: str, rtol: float | None, reason: Reason, history: Tensor
) -> SingularTriplets:
    """Order singular values, true residuals and reasons; all are NaN if a product was not finite."""
    U, V = vec.part(process.left.store, 0, process.locked), process.settled
    if reason is Reason.NON_FINITE:
        U, V = (vec.zero_block(X, k) + math.nan for X in (U, V))
        nothing = vec.norm(V)
        return SingularTriplets(U, nothing, V, nothing.nan_to_num(math.inf), (reason,) * k, process.matvecs, history)
    values, residuals = _sizes(process, U, V)
    order = values.argsort(descending=which == "LM")
    residuals, values = residuals[order], values[order]
    eps, norm_A = torch.finfo(V.dtype).eps, max(process.size * process.scale, float(values.amax()))
    reasons = verdicts(residuals, values, rtol, norm_A, eps, reason)
    left, right = vec.columns(U, order), vec.columns(V, order)
    return SingularTriplets(left, values, right, residuals, reasons, process.matvecs, history)


class GolubKahan(Projection):
    """The projection T = UᵀAV with A V = U T and Aᵀ U = V Tᵀ + P C, for A (m, n), m ≥ n; nothing is squared.

    Random left directions replace those that A does not reach, so that a triplet with σ = 0 has a left vector, too.
    """

    maps = 2

    def __init__(
        self,
        multiply: CountedProduct,
        adjoint: CountedProduct,
        left: Description,
        start: Float[Vectors, "n b"],
        capacity: int,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(multiply, start, capacity, generator)
        self.adjoint = adjoint
        self.left = Basis(vec.empty_block(left, 0), min(capacity, self.n), generator)
        self.X = self.Y

    def step(self) -> None:
        """Multiply the pending block by A, and the new directions in the result by Aᵀ. Two products per column."""
        V = self.pending
        W = self._in_units(self.multiply(V))
        if self.failed:
            return
        H, U, R = self.left.expand(W, ROUNDINGS * self.noise)
        U = self.left.fresh(V.shape[1], vec.as_block(U))
        Z = self._in_units(self.adjoint(U))
        if self.failed:
            return
        self.left.append(U)
        self.basis.append(V)
        old, new = self.width, V.shape[1]
        T = within_zeros(self.T, len(self.T) + new, self.T.shape[1] + new)
        T[:old, old:] = H[self.locked :]
        T[old : old + len(R), old:] = R
        _, self.pending, S = self.basis.expand(Z, ROUNDINGS * self.noise)
        self.T = T
        self._advance(S)

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return T's singular values, ascending, and ‖Aᵀu − σv‖ for each (Av = σu holds), in units of ``scale``."""
        X, values, Yt = torch.linalg.svd(self.T)
        self.X, self.Y = X.flip(1), Yt.mT.flip(1)
        return values.flip(0), (self.C @ self.X).norm(dim=0)

    def restart(self, positions: Tensor) -> None:
        """Continue from these triplets, numbered as in the last ``ritz``, and the pending block."""
        values = (self.X[:, positions] * (self.T @ self.Y[:, positions])).sum(0)
        self._rotate(torch.arange(self.locked), positions)
        self.T, self.C = torch.diag(values), self.C @ self.X[:, positions]

    def _rotate(self, old: Tensor, wanted: Tensor) -> None:
        self.basis.rotate(old, self.Y[:, wanted])
        self.left.rotate(old, self.X[:, wanted])

    @property
    def matvecs(self) -> int:
        """Products spent, of A and of Aᵀ."""
        return self.multiply.matvecs + self.adjoint.matvecs

    def krylov_value(self, value: float) -> float:
        """Return σ|σ|, since powers of AᵀA make the Krylov space."""
        return value * abs(value)
