"""Low-rank approximations of a positive semi-definite matrix known by its products, with a measured error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from curvops.checkpoint import Checkpoint, Place, begin, derive_generator
from curvops.checks import check_choice, checked_number, checked_whole, require_no_graph
from curvops.errors import RankWarning, warn
from curvops.linalg.core.matrix_identity import problem_of
from curvops.linalg.core.memory import vector_bytes, working
from curvops.linalg.core.probed import Probed
from curvops.linalg.core.results import Estimate, Reason, indefinite
from curvops.linalg.core.rounding import rounding_level
from curvops.linalg.core.sharded import algorithm, stored
from curvops.linalg.core.sources import sources_of
from curvops.linalg.core.spaces import spaces_of
from curvops.linalg.core.symmetry import is_psd
from curvops.linalg.core.vectors import (
    CHUNK,
    Given,
    Matrix,
    as_matrix,
    check_finite,
    combine,
    describe_square,
    gram,
    norm,
    part,
    random_block,
    spawn_generator,
    unit_blocks,
)
from curvops.linalg.operators.low_rank import LowRank
from curvops.linalg.preconditioners.nystrom import FIRST_RANK, MOST_RANK, grow, negligible_size
from curvops.linalg.spectra.lanczos import LockStep
from curvops.progress import Progress

# The number of products that measure the error; for an error in one eigenvalue, its standard error is √½/√16 = 18 %.
PROBES = 16
FEWEST_PROBES = 4
# The number of vectors that one rank and the fewest probes take.
LEAST_VECTORS = 12
# The number of n × rank arrays in memory at once.
KEPT = 3

Satisfied = Callable[[Tensor, Tensor], bool]


@algorithm
def low_rank(
    op: Matrix | Given,
    rank: int | None = None,
    rtol: float | None = None,
    method: str = "nystrom",
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
    checkpoint: Place | None = None,
) -> LowRank:
    """Approximate positive semi-definite A (n, n) by Â = U diag(s) Uᵀ, U (n, r) orthonormal, s (r,) descending.

    `Â.error` estimates ‖A − Â‖_F / ‖A‖_F from 16 random vectors independent of the approximation (exactly, from all n
    unit vectors, if n ≤ 16). Its standard error is that of the ratio; its matvecs are all products spent.

    Args:
        op: a tensor or an operator, symmetric, and positive semi-definite for "nystrom".
        rank: r; the result has fewer if A has no more eigenvalues above rounding. With rtol, the largest r.
        rtol: double the rank until error + 2 standard errors ≤ rtol (0.01 if neither is given). The same random vectors
            measure the error after each doubling.
        method: "nystrom" (Frangella, Tropp & Udell 2023; blocks of products) or "lanczos" (one product after the other;
            more accurate for the same rank, but it finds a repeated eigenvalue only once, which shows in the error).
        generator: the source of the random vectors.
        memory_budget: bytes for the stored vectors, which limit the rank. None is the rest of the budget of the
            linearisation behind A; then fewer vectors, at least four, may measure the error. The rank is at most 1024
            if neither rank nor memory_budget is given.
        progress: as in `cg`.
        checkpoint: a folder for intermediate results, written at most every half minute: a killed run continues from
            there and gives bitwise the same result. It also keeps the result, which a later run returns at once. Only
            for "nystrom".

    Warns with `RankWarning` if the budget, the limit or an invariant Krylov space ended the growth first.

    Returns:
        A LowRank operator with its `error`.

    Raises:
        ValueError: rank is not in 1..n, rtol is not in (0, 1), the method is unknown, the budget is below one vector, a
            tensor in A requires a gradient (Â has none), or the checkpoint belongs to another problem.
        OSError: the checkpoint cannot be written.
        NotPositiveSemidefiniteError: Nyström found an eigenvalue clearly below zero.

    Examples:
        >>> A = torch.diag(torch.tensor([100.0, 50.0, 0.0, 0.0]).double())
        >>> approximation = co.linalg.low_rank(A, rank=2, generator=torch.Generator().manual_seed(0))
        >>> approximation.values.round(), approximation.vectors.shape
        (tensor([100.,  50.], dtype=torch.float64), torch.Size([4, 2]))
    """
    op = as_matrix(op)
    facts = describe_square(op)
    require_no_graph((op,) if isinstance(op, Tensor) else op.representation(), "low_rank")
    check_choice("method", method, ("nystrom", "lanczos"))
    if rank is not None:
        checked_whole("rank", rank, 1, facts.rows)
    if rtol is not None:
        checked_number("rtol", rtol, "(0, 1)")
    aim = (0.01 if rank is None else None) if rtol is None else rtol
    wanted = rank or (facts.rows if memory_budget is not None else min(facts.rows, MOST_RANK))
    if memory_budget is not None and memory_budget < (least := KEPT * vector_bytes(facts)):
        raise ValueError(f"memory_budget={memory_budget} bytes, but a rank of one needs {least}.")
    kept = begin("low_rank", checkpoint, lambda: problem_of(op), facts.device)
    generator = spawn_generator(generator)
    beside = kept.source("generator of the error's probes", derive_generator(generator), facts.device)
    generator = kept.source("generator", generator, facts.device)

    def satisfied(U: Tensor, values: Tensor) -> bool:
        return aim is not None and check.passes(U, values, aim)

    approximate = _by_nystrom if method == "nystrom" else _by_lanczos
    if kept.done:
        ended = kept.result(_Outcome)
    else:
        with working(op, memory_budget, LEAST_VECTORS) as (multiply, room):
            probes = PROBES
            if memory_budget is None and room is not None:  # a given budget covers the stored vectors only
                probes = max(FEWEST_PROBES, min(PROBES, room // (8 * vector_bytes(facts))))
                room -= 2 * probes * vector_bytes(facts)
            limit = wanted if room is None else max(1, min(wanted, room // (KEPT * vector_bytes(facts))))
            probed = Probed(multiply, facts, generator)
            check = _Check(replace(probed, generator=beside), probes)
            check.recall(kept.attach("error", check.state))
            found = approximate(probed, is_psd(op), limit, aim is None, satisfied, kept)
            ended = kept.finish(_Outcome(found, check(found.vectors, found.values, found.matvecs), limit))
    found, error = ended.found, ended.error
    _warn(found, error, aim, rank, ended.limit)
    return LowRank(stored(found.vectors), found.values, error=error, space=spaces_of(op)[0], sources=sources_of(op))


@dataclass(frozen=True, eq=False)
class _Approximation:
    """An approximation, the products it took, and whether the method has exhausted the matrix."""

    vectors: Tensor
    values: Tensor
    matvecs: int
    ended: bool


@dataclass(frozen=True, eq=False)
class _Outcome:
    """An approximation with its error, and the largest rank that it could have had."""

    found: _Approximation
    error: Estimate
    limit: int


def _by_nystrom(
    probed: Probed, psd: bool, limit: int, fixed: bool, satisfied: Satisfied, kept: Checkpoint
) -> _Approximation:
    sketch = grow(probed, limit if fixed else None, limit, satisfied=satisfied, known_psd=psd, kept=kept)
    return _Approximation(sketch.U, sketch.eigenvalues.to(sketch.U), sketch.matvecs, sketch.tail == 0)


def _by_lanczos(
    probed: Probed, psd: bool, limit: int, fixed: bool, satisfied: Satisfied, _: Checkpoint
) -> _Approximation:
    depth = limit if fixed else min(limit, FIRST_RANK)
    start = random_block(probed.facts, 1, "gaussian", probed.generator)
    run = LockStep(probed.multiply, start, depth)
    while True:
        run.reserve(depth)
        run.extend(depth)
        if run.skewed:
            raise ValueError(Reason.NOT_SYMMETRIC.value)
        vectors, values = _ritz(run, psd)
        ended = bool(run.done.all())
        if fixed or ended or depth >= limit or satisfied(vectors, values):
            return _Approximation(vectors, values, run.matvecs, ended)
        depth = min(limit, 2 * depth)


def _ritz(run: LockStep, known_psd: bool) -> tuple[Tensor, Tensor]:
    """Return Ritz vectors as columns and positive Ritz values, descending."""
    T = run.tridiagonal(0)
    check_finite(T)
    values, rotation = torch.linalg.eigh(T)
    noise = 10 * len(values) * run.eps * float(values.abs().max())
    if -float(values[0]) > max(noise, negligible_size(run.eps, known_psd) * float(values.abs().max())):
        raise indefinite(f"A is not positive semidefinite: an eigenvalue is at most {float(values[0]):.3e}.")
    kept = (values > noise).nonzero().squeeze(1).flip(0)
    basis = run.vectors(0, len(values))
    return combine(basis, rotation[:, kept]), values[kept].to(basis)


class _Check:
    """The relative error ‖A − Â‖_F / ‖A‖_F from the same random vectors at every rank; A multiplies them once."""

    def __init__(self, probed: Probed, count: int) -> None:
        self.probed, self.count = probed, count

    def state(self) -> dict[str, Tensor]:
        """Return the probes and images made so far."""
        return {name: vars(self)[name] for name in ("probes", "images") if name in vars(self)}

    def recall(self, state: dict[str, Tensor] | None) -> None:
        """Restore the probes and images of a state."""
        vars(self).update(state or {})

    @cached_property
    def probes(self) -> Tensor:
        if self.exact:
            return next(unit_blocks(self.probed.facts, self.count))
        return self.probed.probes(self.count)

    @property
    def exact(self) -> bool:
        return self.probed.facts.rows <= self.count

    @cached_property
    def images(self) -> Tensor:
        return self.probed.multiply(self.probes)

    def passes(self, U: Tensor, values: Tensor, rtol: float) -> bool:
        return _bound(self(U, values, 0)) <= rtol

    def __call__(self, U: Tensor, values: Tensor, matvecs: int) -> Estimate:
        count = self.probes.shape[1]
        width = max(1, CHUNK // self.probed.facts.rows)
        columns = range(0, count, width)
        errors, seen = (torch.cat(sizes) for sizes in zip(*(self._sizes(U, values, j, j + width) for j in columns)))
        # The products with A, and with Â, which is no larger, have errors of this size relative to their own.
        rounding = 2 * rounding_level(self.probed.facts.dtype, self.probed.facts.rows)
        if self.exact:
            size = norm(self.images).square().sum()
            value = (errors.sum() / size).sqrt() if bool(size > 0) else errors.new_zeros(())
            return Estimate.rounded(value, rounding, matvecs=matvecs + count, size=1.0)
        # ‖Â‖_F is known, so the probes estimate only ‖A‖² − ‖Â‖²; this is not negative for a projection of A.
        known = values.double().square().sum()
        sizes = known + norm(self.images).square() - seen
        size = torch.maximum(sizes.mean(), known)
        if not bool(size > 0):
            return Estimate(size, torch.zeros_like(size), count, matvecs + count)
        ratio = errors.mean() / size
        spread = (errors - ratio * sizes).std() / (size * math.sqrt(count))
        value = ratio.sqrt()
        stderr = spread / (2 * value) if bool(value > 0) else spread * 0
        return Estimate(value, stderr, count, matvecs + count, rounding)

    def _sizes(self, U: Tensor, values: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return ‖(A − Â)z‖² and ‖Âz‖² of some of the probes."""
        seen = combine(U, values[:, None] * gram(U, part(self.probes, start, stop)))
        size = norm(seen).square()
        seen -= part(self.images, start, stop)
        return norm(seen).square(), size


def _bound(error: Estimate) -> float:
    return float(error.value + 2 * error.stderr)


def _warn(found: _Approximation, error: Estimate, aim: float | None, rank: int | None, limit: int) -> None:
    r = len(found.values)
    if aim is not None:
        short = _bound(error) > aim
    else:
        short = limit < (rank or 0) or (
            r < limit and float(error.value) > math.sqrt(torch.finfo(found.values.dtype).eps)
        )
    if not short:
        return
    cause = (
        'the vectors found span an invariant subspace; use method="nystrom"'
        if found.ended and r < limit
        else f"the rank was limited to {limit}; raise rank or memory_budget, or accept the error"
    )
    warn(
        f"low_rank ended at rank {r} with a relative error of {float(error.value):.2g} ± {float(error.stderr):.1g}"
        f"{'' if aim is None else f' (rtol={aim:g})'}: {cause}.",
        RankWarning,
    )
