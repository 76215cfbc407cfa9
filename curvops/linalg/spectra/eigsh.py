"""A few eigenpairs of a symmetric matrix by thick-restart block Lanczos.

>>> import torch
>>> from curvops.linalg import eigsh
>>> A = torch.diag(torch.tensor([5.0, 5.0, 5.0, 2.0, 1.0]).double())
>>> pairs = eigsh(A, 4, generator=torch.Generator().manual_seed(0))
>>> pairs.values.round(decimals=6).tolist(), pairs.reasons[0].name
([5.0, 5.0, 5.0, 2.0], 'CONVERGED')
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import Progress, current_run
from curvops.checkpoint import Place, begin
from curvops.checks import check_choice, check_options, checked_number, checked_whole
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import Multiply, algorithm, working
from curvops.linalg.core.matrix_identity import problem_of
from curvops.linalg.core.results import ACCEPTED, Eigenpairs, Reason, Solution
from curvops.linalg.core.structure import beyond_rounding, formed, may_be_formed, rounding_of
from curvops.linalg.core.vectors import CHUNK, NEAR_ZERO, ROUNDINGS, Description, Given, Matrix, Vectors
from curvops.linalg.solvers.minres import minres
from curvops.linalg.solvers.systems import Callback, iterations_allowed, shifted
from curvops.linalg.spectra.lanczos import start_block
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

Solver: TypeAlias = Callable[..., Solution]


@algorithm
def eigsh(
    A: Matrix | Given,
    k: int,
    which: str = "LM",
    *,
    sigma: float | int | None = None,
    rtol: float | int | None = None,
    block_size: int = 2,
    maxiter: int | None = None,
    max_matvecs: int | None = None,
    start: Float[Vectors, "n b"] | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    solver: Solver | None = None,
    callback: Callback | None = None,
    progress: Progress = None,
    checkpoint: Place | None = None,
) -> Eigenpairs:
    """Find k eigenpairs of symmetric A at one end, both ends or in the interior of its spectrum, with multiplicity.

    A pair is CONVERGED when its true residual ‖Av − λv‖ is at most rtol |λ| (in the interior, rtol |λ − σ| if that is
    more) and no better pair was missed. If as many equal values were found as the block has columns, Lanczos runs on a
    fresh random block in the complement of the pairs found, until it would have found a missed pair with probability
    0.999 (if the budget ends before that, the reason is UNVERIFIED).

    Args:
        A: (n, n), symmetric; a tensor or any LinearOperator.
        k: the number of pairs, 1..n.
        which: as in SciPy: "LM" (largest |λ|; with ``sigma``, nearest to it), "LA" and "SA" (largest and smallest
            λ), or "BE" (half from each end, one more of the large ones). The best pair comes first; "BE" is in
            descending order.
        sigma: a shift in the interior of the spectrum, or 0 for the smallest |λ|. Up to 2048 rows A is formed, if
            memory and ``max_matvecs`` allow, and all its pairs are found: A − σ may be singular. Else, and with a
            ``solver`` or ``start``, Lanczos on (A − σ)⁻¹, which misses pairs if σ is an eigenvalue.
        rtol: by default 1e-6; in float32, pairs whose values are much smaller than ‖A‖ converge when they are as
            accurate as rounding allows, up to √eps |λ|. 0 means the best accuracy that the dtype allows, and the reason
            is then PRECISION_LIMIT.
        block_size: the number of vectors multiplied at once. A larger block needs somewhat more products.
        maxiter: the maximum number of block products; by default 10 n, at least 100, at most 10 000. At least k
            products are always made.
        max_matvecs: the maximum number of products with a vector, including those of the final check.
        start: (n, b), initial vectors instead of random ones; the complement is then always checked.
        generator: the source of the random vectors.
        memory_budget: bytes for the basis; None is the rest of the budget of the linearisation behind A. The basis has
            2 k + 10 b columns, or up to 512 if they fit in 64 MiB; a smaller basis needs more products, and the
            reason is RANK_CAPPED if they did not suffice.
        solver: with ``sigma``, called as ``solver(A − σ, B, rtol=..., maxiter=...) -> Solution``; `minres` by
            default.
        callback: called as ``callback(iteration, residuals of the wanted pairs so far)``.
        progress: as in `cg`.
        checkpoint: a folder for the state, as in `low_rank`: the basis, at most every half minute.

    The largest pairs of a curvature with at most a quarter as many outputs as weights are sought among vectors of
    outputs, whose number is then the n of ``maxiter`` and the most that a block has; k/2 further products map the pairs
    to vectors of weights.

    Returns:
        Eigenpairs with float64 values, vectors in A's dtype, residuals by k further products, and a reason for each. A
        product with NaN or Inf ends the run: every value is then NaN, and the reason is NON_FINITE.

    Raises:
        ValueError: A is not square, k is not in 1..n, ``which`` is unknown, or not "LM" beside sigma, the budget is
            too small for k pairs, or the checkpoint belongs to another problem.
        OSError: the checkpoint cannot be written.

    Source: Wu & Simon 2000, with blocks and full reorthogonalisation; a single vector misses members of a cluster.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]).double())
        >>> pairs = co.linalg.eigsh(A, 2)
        >>> pairs.values.round(decimals=6), pairs.vectors.shape
        (tensor([4., 3.], dtype=torch.float64), torch.Size([4, 2]))
    """
    A = vec.as_matrix(A)
    facts = vec.describe_square(A)
    n = facts.rows
    aimed = RTOL if rtol is None else checked_number("rtol", rtol, "[0, inf)")
    check_options(maxiter=maxiter, max_matvecs=max_matvecs, block_size=block_size)
    checked_whole("k", k, 1, n)
    if which == "SM":
        raise ValueError("eigsh finds the eigenvalues nearest to 0 in magnitude by a shift: pass sigma=0.")
    check_choice("which", which, get_args(Which))
    if sigma is not None and which != "LM":
        raise ValueError(f'sigma finds the pairs nearest to it, which="LM"; got which={which!r} and sigma={sigma}.')
    saved = begin("eigsh", checkpoint, lambda: problem_of(A), facts.device)
    generator = saved.source("generator", generator, facts.device)
    if saved.done:
        return saved.result(Eigenpairs)
    S = getattr(A, "narrow_root", None) if start is None and which in ("LA", "LM") and sigma is None else None
    S = None if S is None or S.shape[1] < k else S
    searched = A if S is None else S.mT @ S
    facts_of_A, facts, last = facts, vec.describe(searched), k if S is None else k + (k + 1) // 2
    n = facts.rows
    wide = min(n, block_size) if start is None else start.shape[-1]
    narrow = wide if start is not None else 1
    current_run().expect(max_matvecs)
    with torch.no_grad():
        with working(searched, k + (2 + BLOCK_VECTORS) * narrow) as (multiply, room):
            sizes = saved.attach("basis", lambda: sizes) or list(
                basis_columns(n, facts.vector_bytes, k, wide, narrow, room)
            )
            capacity, b, capped = sizes
            block = start_block(facts, start, b, generator)
            most = math.inf if max_matvecs is None else max_matvecs - last
            if most < k + b:
                raise ValueError(f"max_matvecs={max_matvecs} is too small: {k} pairs need at least {last + k + b}.")
            if sigma is not None and solver is None and start is None and may_be_formed(A, most, room):
                return saved.finish(_of_formed(multiply, facts, k, float(sigma), rtol))
            inverse = None if sigma is None else ShiftInverse(A, float(sigma), aimed, most, solver)
            process = BlockLanczos(inverse or CountedProduct(multiply), block, capacity, generator)
            search = Search(
                process,
                cast(Which, which),
                k,
                aimed,
                capacity,
                capped,
                iterations_allowed(n, maxiter),
                most,
                callback,
                saved,
            )
            reason = search.run(start is None)
            if reason is Reason.NON_FINITE:
                return _non_finite_pairs(facts_of_A, k, process.matvecs, search.history)
            vectors, size = process.settled, process.size * process.scale
            if inverse is not None:
                vectors, images, size = inverse.polish(vectors)
                values, residuals = rayleigh(vectors, lambda _: images, k)
                reason = inverse.failure or reason
            elif S is None:
                values, residuals = rayleigh(vectors, multiply, b)
        if S is not None:
            with working(A) as (multiply, _):
                vectors = lift(S, vectors, generator)
                values, residuals = rayleigh(vectors, multiply, b)
        reason = Reason.NOT_SYMMETRIC if reason in (Reason.CONVERGED, Reason.UNVERIFIED) and process.skewed else reason
        spent = process.matvecs + (last if inverse is None else 0)
        verdict = which, sigma, rtol, size, reason
        return saved.finish(_certify(vectors, values, residuals, *verdict, spent, search.history, owned=S is not None))


def rayleigh(vectors: Vectors, multiply: Multiply, width: int) -> tuple[Tensor, Tensor]:
    """Return vᵀAv/vᵀv and ‖Av − λv‖ of each column, some columns at a time if they are long."""
    values, residuals = [], []
    width = max(width, CHUNK // vectors.shape[0])
    for start in range(0, vectors.shape[1], width):
        V = vec.part(vectors, start, start + width)
        W = multiply(V)
        values.append(vec.inner(V, W) / vec.inner(V, V))
        residuals.append(vec.norm(W - V * values[-1].to(V.dtype)))
    return torch.cat(values), torch.cat(residuals)


def _of_formed(multiply: Multiply, facts: Description, k: int, sigma: float, rtol: float | None) -> Eigenpairs:
    """Return the k pairs nearest to σ among all pairs of A, formed by n products."""
    n, dense, history = facts.rows, formed(multiply, facts), torch.zeros(0, k, dtype=torch.float64)
    if not bool(dense.isfinite().all()):
        return _non_finite_pairs(facts, k, n, history)
    values, vectors = torch.linalg.eigh((dense + dense.mT) / 2)
    vectors = vec.columns(vectors, (values - sigma).abs().argsort()[:k]).to(facts.dtype)
    size, (values, residuals) = float(values.abs().amax()), rayleigh(vectors, multiply, k)
    return _certify(vectors, values, residuals, "LM", sigma, rtol, size, Reason.CONVERGED, n + k, history)


def lift(S: Matrix, U: Float[Vectors, "m k"], generator: torch.Generator | None = None) -> Float[Vectors, "n k"]:
    """Return orthonormal eigenvectors of S Sᵀ, given those of SᵀS; half a product of S Sᵀ each.

    S maps those of the eigenvalue zero to rounding, and random vectors orthogonal to all others take their place.
    """
    multiply, k, norms = vec.product(S), U.shape[1], list[Tensor]()
    X = vec.empty_block(vec.describe(S.mT), k)
    width = max(1, CHUNK // X.shape[0])
    for start in range(0, k, width):
        image = multiply(vec.part(U, start, start + width))
        norms.append(vec.norm(image))
        vec.put(X, start, image / norms[-1].where(norms[-1] > 0, 1.0).to(X.dtype))
    sizes = torch.cat(norms)
    reached = (sizes > NEAR_ZERO * torch.finfo(X.dtype).eps * sizes.amax()).nonzero().squeeze(1)
    if len(reached) == k:
        return vec.tall_qr(X, overwrite=True)[0]
    basis = Basis(X, k, generator)
    basis.append(vec.tall_qr(vec.columns(X, reached))[0])
    basis.append(basis.fresh(k - len(reached), vec.part(X, 0, 0)))
    return basis.columns


def _certify(
    vectors: Vectors,
    values: Tensor,
    residuals: Tensor,
    which: str,
    sigma: float | None,
    rtol: float | None,
    size: float,
    reason: Reason,
    matvecs: int,
    history: Tensor,
    owned: bool = False,
) -> Eigenpairs:
    """Order the pairs and give each its reason; vectors with memory of their `own` are not copied if in order."""
    keys = {"SA": values, "LM": -values.abs()}
    order = (keys.get(which, -values) if sigma is None else (values - sigma).abs()).argsort()
    residuals = residuals[order]
    values = torch.where(torch.isfinite(residuals), values[order], math.nan)
    residuals = residuals.nan_to_num(math.inf, math.inf)
    eps, norm_A = torch.finfo(vectors.dtype).eps, max(size, float(values.abs().amax()))
    sizes = values.abs() if sigma is None else torch.maximum(values.abs(), (values - sigma).abs())
    reasons = verdicts(residuals, sizes, rtol, norm_A, eps, reason)
    vectors = vectors if owned and bool((order.diff() == 1).all()) else vec.columns(vectors, order)
    return Eigenpairs(values, vectors, residuals, reasons, matvecs, history)


def _non_finite_pairs(facts: Description, k: int, matvecs: int, history: Tensor) -> Eigenpairs:
    nothing = torch.full((k,), math.nan, dtype=torch.float64, device=facts.device)
    vectors = vec.zero_block(facts, k) * math.nan
    return Eigenpairs(nothing, vectors, nothing.nan_to_num(math.inf), (Reason.NON_FINITE,) * k, matvecs, history)


class BlockLanczos(Projection):
    """The projection T = QᵀAQ of symmetric A, with A Q = Q T + P C; ``skew`` measures A's asymmetry so far."""

    STATE = (*Projection.STATE, "skew", "looked")
    skew, looked = 0.0, 0

    @property
    def skewed(self) -> bool:
        """Whether all columns multiplied so far show that A is not symmetric, beyond what rounding explains."""
        size, start = self.size * math.sqrt(self.looked), vec.part(self.basis.columns, 0, 1)
        noise = partial(rounding_of, lambda V: self._in_units(self.multiply(V)), start)
        return beyond_rounding(self.skew, size, self.eps, noise, self.looked)

    def step(self) -> None:
        """Multiply the pending block and project, at one product per column of it."""
        V = self.pending
        W = self._in_units(self.multiply(V))
        if self.failed:
            return
        self.basis.append(V)
        H, self.pending, R = self.basis.expand(W, ROUNDINGS * self.noise)
        H = H[self.locked :]
        old, new = self.width, V.shape[1]
        gaps = torch.cat([H[:old] - self.C.mT, H[old:] - H[old:].mT])
        self.skew = math.hypot(self.skew, float(gaps.norm()))
        self.looked += new
        T = within_zeros(self.T, len(self.T) + new, self.T.shape[1] + new)
        T[:old, old:], T[old:, :old] = H[:old], H[:old].mT
        T[old:, old:] = (H[old:] + H[old:].mT) / 2
        self.T = T
        self._advance(R)

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return the Ritz values, ascending, and the residual norm of each, in units of ``scale``."""
        values, self.Y = torch.linalg.eigh(self.T)
        return values, (self.C @ self.Y).norm(dim=0)

    def restart(self, positions: Tensor) -> None:
        """Continue from these Ritz vectors, numbered as in the last ``ritz``, and the pending block."""
        Y = self.Y[:, positions]
        self._rotate(torch.arange(self.locked), positions)
        self.T, self.C = torch.diag((Y * (self.T @ Y)).sum(0)), self.C @ Y

    def _rotate(self, old: Tensor, wanted: Tensor) -> None:
        self.basis.rotate(old, self.Y[:, wanted])


class ShiftInverse(CountedProduct):
    """The map V → (A − σ)⁻¹ V by solves to a tenth of ``rtol``, within ``most`` products with A in total.

    It counts products with A; ``failure`` is the last reason of a failed solve.
    """

    def __init__(self, A: Matrix, sigma: float, rtol: float, most: float | int, solver: Solver | None) -> None:
        super().__init__(vec.product(A))
        self.shifted, self.solver, self.most = shifted(A.detach(), -sigma), minres if solver is None else solver, most
        self.rtol = max(0.1 * rtol, 4 * torch.finfo(A.dtype).eps)  # solves are more accurate than the pairs

    def __call__(self, V: Tensor) -> Tensor:
        """Solve for a block."""
        left = None if math.isinf(self.most) else max(1, int(self.most - self.matvecs) // V.shape[1] - 1)
        solution = self.solver(self.shifted, V, rtol=self.rtol, maxiter=left)
        self.matvecs += solution.matvecs
        failed = [reason for reason in solution.reasons if reason not in ACCEPTED]
        self.failure = failed[0] if failed else self.failure
        return solution.x

    def polish(self, V: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return Ritz vectors X of A in the span of (A − σ)⁻¹ V, A X, and an estimate of the size of A.

        A Ritz pair of the inverse has a residual in A that is larger by ‖A − σ‖ |λ − σ|⁻¹; one more solve removes
        that factor (Ericsson & Ruhe 1980).
        """
        Q, _ = vec.tall_qr(self(V))
        W = super().__call__(Q)
        T = vec.gram(Q, W)
        values, Y = torch.linalg.eigh((T + T.mT) / 2)
        return vec.combine(Q, Y), vec.combine(W, Y), float(values.abs().amax())
