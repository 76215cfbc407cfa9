"""Randomised Nyström approximation of a positive semidefinite matrix, and the preconditioner it gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import Progress, current_run
from curvops.checkpoint import NOTHING, Checkpoint, Place, begin
from curvops.checks import check_options, checked_number
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import Multiply, algorithm
from curvops.linalg.core.matrix_identity import problem_of
from curvops.linalg.core.probed import Limits, Probed, probing
from curvops.linalg.core.results import Reason, indefinite
from curvops.linalg.core.solve_routes import SKETCH_RANK
from curvops.linalg.core.structure import require_symmetric, rounding_of
from curvops.linalg.core.vectors import Given, Matrix, Vectors
from curvops.linalg.preconditioners.factored import LowRankPreconditioner, blockwise
from curvops.summary import Summarised

SKETCH_ARRAYS = 3
"""The number of n × rank arrays in memory at once."""


@dataclass(frozen=True, eq=False, repr=False)
class Nystrom(Summarised):
    """A Nyström approximation G ≈ U diag(eigenvalues) Uᵀ, U orthonormal, eigenvalues positive and descending.

    ``tail`` is the size of the largest eigenvalue left out: the smallest one kept, or 0 if the sketch exhausted the
    range. ``reason`` is CONVERGED for the given or chosen rank, RANK_CAPPED if a budget ended the growth. ``history``
    has a row for each rank that was tried: the products, and the smallest eigenvalue found (0 for none).

    Examples:
        >>> A = torch.diag(torch.tensor([100.0, 50.0, 1e-3]).double())
        >>> sketch = co.linalg.nystrom(A, 2, generator=torch.Generator().manual_seed(0))
        >>> sketch.eigenvalues.round(), sketch.matvecs
        (tensor([100.,  50.], dtype=torch.float64), 2)
    """

    U: Float[Vectors, "n r"]
    eigenvalues: Float[Tensor, " r"]
    shift: float
    tail: float
    matvecs: int
    reason: Reason
    history: Float[Tensor, "ranks 2"]

    def preconditioner(self, shift: float | None = None) -> LowRankPreconditioner:
        """Make P = (Ĝ + μI)/μ for G + μI from this Ĝ; the shift μ defaults to the one for which the rank was chosen.

        With E = G − Ĝ the preconditioned condition number is at most 1 + ‖E‖/μ. (Frangella, Tropp & Udell scale by τ
        + μ instead of μ, τ the ``tail``, for 1 + (τ + ‖E‖)/μ; this is used if μ = 0.) Rank 0 gives the identity.

        Args:
            shift: μ ≥ 0; None means the shift for which the rank was chosen.

        Returns:
            The preconditioner.

        Raises:
            ValueError: the shift is negative, or zero although the approximation is exhausted (P would be singular).
        """
        shift = self.shift if shift is None else shift
        checked_number("shift", shift, "[0, inf)")
        if self.tail + shift <= 0 and len(self.eigenvalues):
            raise ValueError("a preconditioner from an operator of low rank needs a positive shift; got 0.")
        ratios = (self.eigenvalues + shift) / (shift if shift else self.tail)
        return LowRankPreconditioner(self.U, self.eigenvalues, ratios, 1.0, self.matvecs)

    @blockwise
    def __matmul__(self, V: Float[Vectors, "n *k"]) -> Float[Vectors, "n *k"]:
        """Multiply the approximation by a vector or a block."""
        return vec.shaped_as(vec.combine(self.U, self.eigenvalues[:, None] * vec.gram(self.U, vec.as_columns(V))), V)


@algorithm
def nystrom(
    A: Matrix | Given,
    rank: int | None = None,
    *,
    shift: float | int = 0.0,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    rhs: int = 1,
    max_rank: int | None = None,
    progress: Progress = None,
    checkpoint: Place | None = None,
) -> Nystrom:
    """Approximate positive semidefinite A from ``rank`` products with random vectors.

    With ``rank=None`` the rank doubles until the smallest eigenvalue found is of the order of ``shift``, or until a
    larger rank costs more than the products that it would save a CG solve of A + shift I with ``rhs`` right-hand sides;
    earlier products are kept.

    Args:
        A: (n, n), symmetric positive semidefinite.
        rank: the rank, and the number of products; None chooses it as above.
        shift: μ of the system A + μI that the preconditioner is for; without a `rank` it decides how far the rank
            grows.
        generator: source of the random vectors.
        memory_budget: bytes for three n × rank arrays, which limit the rank; None is the rest of the budget of the
            linearisation behind A.
        rhs: the number of right-hand sides for which the rank should pay off.
        max_rank: the largest rank, if `rank` is None.
        progress: as in `cg`.
        checkpoint: a folder that keeps the state, from which a killed run continues, and the result.

    Returns:
        A Nystrom approximation U diag(λ) Uᵀ; its `preconditioner(shift)` serves the solvers.

    Raises:
        ValueError: A is not square or not symmetric, rank, shift, rhs, max_rank or memory_budget is negative, or the
            checkpoint belongs to another problem.
        OSError: the checkpoint cannot be written.
        NotPositiveSemidefiniteError: A has an eigenvalue clearly below zero.

    Source: Frangella, Tropp & Udell 2023, algorithm 2.1; the shift for stability from Li et al. 2017.

    Examples:
        >>> A = torch.diag(torch.tensor([100.0, 50.0, 1e-3]).double())
        >>> P = co.linalg.nystrom(A, 2, shift=1e-3, generator=torch.Generator().manual_seed(0)).preconditioner()
        >>> co.linalg.cg(A + 1e-3 * torch.eye(3), torch.ones(3).double(), preconditioner=P).iterations <= 2
        True
    """
    A = vec.as_matrix(A)
    facts = vec.describe_square(A)
    n = facts.rows
    check_options(rank=rank, max_rank=max_rank)
    checked_number("shift", shift, "[0, inf)")
    checked_number("rhs", rhs, "[0, inf]")
    limit = min(n, SKETCH_RANK if rank is None else rank, n if max_rank is None else max_rank)
    saved = begin("nystrom", checkpoint, lambda: problem_of(A), facts.device)
    source = saved.source("generator", vec.spawn_generator(generator), facts.device)
    if saved.done:
        return saved.result(Nystrom)
    current_run().expect(None if rank is None else limit)
    with probing(A, source, Limits()) as probed:
        return saved.finish(grow(probed, rank, limit, float(shift), rhs, known_psd=vec.is_psd(A), saved=saved))


def grow(
    probed: Probed,
    rank: int | None,
    limit: int,
    shift: float = 0.0,
    rhs: float | int = 1,
    *,
    satisfied: Callable[[Vectors, Tensor], bool] | None = None,
    known_psd: bool = False,
    saved: Checkpoint = NOTHING,
) -> Nystrom:
    """Sketch up to ``rank``, or until more does not pay off, within ``limit`` products and the memory.

    Earlier products are kept. ``satisfied(U, eigenvalues)`` replaces the test of whether doubling pays off. For
    ``known_psd`` see `negligible_size`.
    """
    facts, n, memory = probed.facts, probed.facts.rows, probed.limits.memory
    if memory is not None:
        limit = min(limit, memory // max(1, SKETCH_ARRAYS * facts.vector_bytes))
    Omega = Y = vec.empty_block(facts, 0)
    target = min(limit, 8) if rank is None else limit
    history: list[list[float]] = []
    if saved.state is not None:
        names = ("Omega", "Y", "target", "limit", "history")
        Omega, Y, target, limit, history = (saved.state[name] for name in names)
    while True:
        if Omega.shape[1] < target:
            fresh = vec.random_block(facts, target - Omega.shape[1], "gaussian", probed.generator)
            fresh, _ = vec.tall_qr(fresh, overwrite=True)
            for _ in range(2 if Omega.shape[1] else 0):
                fresh, _ = vec.tall_qr(vec.axpy(fresh, Omega, -vec.gram(Omega, fresh)), overwrite=True)
            Omega = vec.join(Omega, fresh)
            del fresh
        while Y.shape[1] < target:
            stop = min(target, Y.shape[1] + 32) if saved else target  # products between two saves
            Y = vec.join(Y, probed.multiply(vec.part(Omega, Y.shape[1], stop)))
            saved.save(lambda: {"Omega": Omega, "Y": Y, "target": target, "limit": limit, "history": history})  # noqa: B023
        U, values, exhausted = _factor(Omega, Y, known_psd, probed.multiply)
        history.append([float(Y.shape[1]), float(values[-1]) if len(values) else 0.0])
        if rank is not None or exhausted or target >= limit:
            break
        if not _doubling_pays(values, shift, rhs) if satisfied is None else satisfied(U, values):
            break
        del U
        target = min(limit, 2 * target)
    wanted = min(n, SKETCH_RANK) if rank is None else min(rank, n)
    cut = (
        limit < wanted
        and target >= limit
        and not exhausted
        and not (rank is None and len(values) and _reaches_shift(values, shift))
    )
    tail = 0.0 if exhausted or not len(values) else float(values[-1])
    reason = Reason.RANK_CAPPED if cut else Reason.CONVERGED
    return Nystrom(U, values, shift, tail, Y.shape[1], reason, torch.tensor(history, dtype=torch.float64))


def negligible_size(eps: float, known_psd: bool) -> float:
    """Return the size of a negative eigenvalue, relative to the matrix, that rounding explains.

    Products of an operator that is positive semidefinite by construction may round by far more than their own size
    (near p = 1 a softmax multiplies large derivatives by the small 1 − p); for such an operator the result is the root
    of the precision.
    """
    return math.sqrt(eps) if known_psd else 100 * eps


def _factor(Omega: Vectors, Y: Vectors, known_psd: bool, multiply: Multiply) -> tuple[Vectors, Tensor, bool]:
    """Return U, the eigenvalues above rounding, and whether some fell below it, so that the range of A is exhausted."""
    n, r = Omega.shape
    total = vec.norm(Y).square().sum().sqrt()
    vec.check_finite(total)
    size = float(total)
    if size == 0:
        return vec.part(Omega, 0, 0), torch.zeros(0, dtype=torch.float64, device=Y.device), r > 0
    nu = math.sqrt(n) * torch.finfo(Y.dtype).eps * size
    core = vec.gram(Omega, Y)
    require_symmetric(core, torch.finfo(Y.dtype).eps, size, lambda: rounding_of(multiply, vec.part(Omega, 0, 1)))
    core = (core + core.mT) / 2
    eye = torch.eye(r, dtype=torch.float64, device=Y.device)
    L, info = torch.linalg.cholesky_ex(core + nu * eye)
    if bool(info != 0):
        lowest = float(torch.linalg.eigvalsh(core)[0])
        if -lowest <= negligible_size(torch.finfo(Y.dtype).eps, known_psd) * size:
            nu = nu + 2 * abs(lowest)  # rounding inside the products, covered by a larger shift
            L, info = torch.linalg.cholesky_ex(core + nu * eye)
    if bool(info != 0):
        raise indefinite(f"A is not positive semidefinite: an eigenvalue is at most {lowest:.3e}.")
    # B = (Y + νΩ) L⁻ᵀ; only the small factor of its QR needs a singular value decomposition.
    shifted = vec.axpy(vec.as_block(Y), Omega, torch.full((r,), nu, dtype=torch.float64, device=Y.device))
    vec.rotate(shifted, torch.linalg.solve_triangular(L, eye, upper=False).mT)
    Q, R = vec.tall_qr(shifted, overwrite=True)
    V, S, _ = torch.linalg.svd(R)
    values = S.square() - nu
    rank = int((values > nu).sum())
    vec.rotate(Q, V[:, :rank])
    return vec.part(Q, 0, rank), values[:rank], rank < min(r, n) or r == n


def expected_products(condition: float, rhs: float | int) -> float:
    """Return the expected products of block CG to rtol 1e-6: the bound ½ √κ log(2/rtol), over √K.

    The factor 1/√K of a block of K columns is measured on networks of digits, not a theorem.
    """
    return math.sqrt(rhs * condition) * math.log(2e6) / 2


def _reaches_shift(values: Tensor, shift: float) -> bool:
    floor = shift if shift > 0 else torch.finfo(values.dtype).eps ** 0.5 * float(values[0])
    return float(values[-1]) <= floor


def _doubling_pays(values: Tensor, shift: float, rhs: float | int) -> bool:
    if _reaches_shift(values, shift):
        return False
    if shift == 0:
        return True
    r, last, middle = len(values), float(values[-1]), float(values[len(values) // 2 - 1])
    # The decay of the second half of the spectrum, continued as a power law.
    predicted = last * (last / middle)
    saved = expected_products(1 + last / shift, rhs) - expected_products(1 + predicted / shift, rhs)
    return saved > r
