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
from typing import cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checkpoint import Place, begin, resumable
from curvops.checks import check_choice, check_limits
from curvops.linalg.core.matrix_identity import problem_of
from curvops.linalg.core.memory import Multiply, working
from curvops.linalg.core.results import Eigenpairs, Reason
from curvops.linalg.core.vectors import (
    CHUNK,
    Description,
    Matrix,
    Vectors,
    columns,
    describe_square,
    inner,
    norm,
    part,
    zero_block,
)
from curvops.linalg.solvers.systems import Callback, iterations_allowed
from curvops.linalg.spectra.block_lanczos import BLOCK_VECTORS, BlockLanczos, columns_within, start_block
from curvops.linalg.spectra.projection import CountedProduct
from curvops.linalg.spectra.shift_invert import Solver, invert_shifted
from curvops.linalg.spectra.thick_restart import Search, Which
from curvops.progress import Progress, at_work

# Without a budget a basis takes up to this many bytes and columns: more room means fewer products.
FREE_BYTES = 1 << 26
MOST_COLUMNS = 512
# A true residual of this many units of rounding is the best that the dtype allows.
ROUNDING = 20


@resumable
def eigsh(
    A: Matrix,
    k: int,
    which: str = "largest",
    *,
    sigma: float | int | None = None,
    rtol: float | int = 1e-6,
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
    more) and no better pair was missed: where as many equal values were found as the block has columns, Lanczos
    runs on a fresh random block in the complement of the pairs found until it would have found a missed one with
    probability 0.999 (where the budget ends before that, the reason is UNVERIFIED).

    Args:
        A: (n, n), symmetric; a tensor or any LinearOperator.
        k: the number of pairs, 1..n.
        which: "largest" or "smallest" (algebraic), "both" (half from each end, one more of the large ones), "magnitude"
            (largest |λ|), or "interior" (nearest to ``sigma``). Best first; "both" descending.
        sigma: the shift, for "interior": Lanczos on (A − σ)⁻¹.
        rtol: 0 asks for the best that the dtype allows, and the reason is then PRECISION_LIMIT.
        block_size: vectors multiplied together. A larger one needs somewhat more products.
        maxiter: most block products; by default 10 n, at least 100, at most 10 000. k products are always made.
        max_matvecs: most products with a vector, the k of the final check included.
        start: (n, b), to begin with instead of random vectors; the complement is then always checked.
        generator: source of the random vectors.
        memory_budget: bytes for the basis; None takes the rest of the budget of the linearisation behind A. The basis
            has 2 k + 10 b columns, or up to 512 if they fit in 64 MiB; a smaller one needs more products, and the
            reason is RANK_CAPPED where they did not suffice.
        solver: for "interior", called as ``solver(A − σ, B, rtol=..., maxiter=...) -> Solution``; `minres` by
            default.
        callback: called as ``callback(iteration, residuals of the wanted pairs so far)``.
        progress: as in `cg`.
        checkpoint: a folder for the state, as in `low_rank`: the basis, every half minute at most.

    Returns:
        Eigenpairs with float64 values, vectors in A's dtype, residuals by k further products, and a reason for each.
        A product with NaN or Inf ends the run: every value is then NaN, the reason NON_FINITE.

    Raises:
        ValueError: A is not square, k not in 1..n, an unknown ``which``, sigma without "interior" or the reverse, or a
            budget too small for k pairs, or a checkpoint of another problem.
        OSError: the checkpoint cannot be written.

    Source: Wu & Simon 2000, with blocks and full reorthogonalisation; a single vector misses members of a cluster.
    """
    facts = describe_square(A)
    n = facts.rows
    check_limits(rtol, maxiter, max_matvecs, memory_budget)
    _check(n, k, which, sigma)
    kept = begin("eigsh", checkpoint, lambda: problem_of(A), facts.device)
    generator = kept.source("generator", generator, facts.device)
    if kept.done:
        return kept.result(Eigenpairs)
    wide = min(n, block_size) if start is None else start.shape[-1]
    narrow = wide if start is not None else 1
    with (
        torch.no_grad(),
        at_work("eigsh", max_matvecs, progress, A),
        working(A, memory_budget, k + (2 + BLOCK_VECTORS) * narrow) as (multiply, room),
    ):
        sizes = kept.attach("basis", lambda: sizes) or list(basis_columns(facts, n, n, k, wide, narrow, room))
        capacity, b, capped = sizes
        block = start_block(facts, start, b, generator)
        most = math.inf if max_matvecs is None else max_matvecs - k
        if most < k + b:
            raise ValueError(f"max_matvecs={max_matvecs} is too small: {k} pairs need at least {2 * k + b}.")
        inverse = None if sigma is None else invert_shifted(A, float(sigma), float(rtol), most, solver)
        process = BlockLanczos(inverse or CountedProduct(multiply), block, capacity, generator)
        search = Search(
            process,
            "magnitude" if which == "interior" else cast(Which, which),
            k,
            rtol=float(rtol),
            capacity=capacity,
            maxiter=iterations_allowed(n, maxiter),
            most_matvecs=most,
            callback=callback,
            kept=kept,
        )
        reason = search.run(start is None)
        if reason is Reason.NON_FINITE:
            return _non_finite_pairs(facts, k, process.matvecs, search.history)
        reason = Reason.RANK_CAPPED if capped and reason is Reason.ITERATION_LIMIT else reason
        if inverse is None:
            vectors, size = process.settled, process.size * process.scale
            values, residuals = rayleigh(vectors, multiply, b)
        else:
            vectors, images, size = inverse.polish(process.settled)
            values, residuals = rayleigh(vectors, lambda _: images, k)
            reason = inverse.failure or reason
        reason = Reason.NOT_SYMMETRIC if process.skewed and reason in (Reason.CONVERGED, Reason.UNVERIFIED) else reason
        spent = process.matvecs + (k if inverse is None else 0)
        verdict = which, sigma, float(rtol), size, reason
        return kept.finish(_certify(vectors, values, residuals, *verdict, spent, search.history))


def _check(n: int, k: int, which: str, sigma: float | None) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must lie in 1..{n}, the size of the matrix, got {k}.")
    check_choice("which", which, (*get_args(Which), "interior"))
    if (sigma is None) == (which == "interior"):
        raise ValueError(f'sigma and which="interior" go together, got which={which!r} and sigma={sigma}.')


def basis_columns(
    facts: Description, n: int, numbers: int, k: int, block_size: int, least_block: int, memory_budget: int | None
) -> tuple[int, int, bool]:
    """Return the columns of a basis, a block size that fits them, and whether the budget made them fewer.

    There are at most n columns of ``numbers`` numbers each; the block may shrink to ``least_block``.

    Raises:
        ValueError: the budget holds too few columns.
    """
    size = numbers * torch.finfo(facts.dtype).bits // 8
    usual = min(n, max(2 * k + 10 * block_size, min(MOST_COLUMNS, FREE_BYTES // size)))
    for b in (block_size, least_block):
        within = columns_within(memory_budget, n, size, b)
        if within >= min(n, k + 2 * b):
            return min(usual, within), b, within < usual
    needed = size * (min(n, k + 2 * least_block) + BLOCK_VECTORS * least_block)
    raise ValueError(f"memory_budget={memory_budget} bytes are too few: k={k} needs at least {needed}.")


def rayleigh(vectors: Vectors, multiply: Multiply, width: int) -> tuple[Tensor, Tensor]:
    """Return vᵀAv/vᵀv and ‖Av − λv‖ of each column, some columns at a time where they are long."""
    values, residuals = [], []
    width = max(width, CHUNK // vectors.shape[0])
    for start in range(0, vectors.shape[1], width):
        V = part(vectors, start, start + width)
        W = multiply(V)
        values.append(inner(V, W) / inner(V, V))
        residuals.append(norm(W - V * values[-1].to(V.dtype)))
    return torch.cat(values), torch.cat(residuals)


def _certify(
    vectors: Vectors,
    values: Tensor,
    residuals: Tensor,
    which: str,
    sigma: float | None,
    rtol: float,
    size: float,
    reason: Reason,
    matvecs: int,
    history: Tensor,
) -> Eigenpairs:
    """Order the pairs and give each its reason."""
    keys = {"smallest": values, "magnitude": -values.abs(), "interior": (values - (sigma or 0.0)).abs()}
    order = keys.get(which, -values).argsort()
    residuals = residuals[order]
    values = torch.where(torch.isfinite(residuals), values[order], math.nan)
    residuals = residuals.nan_to_num(math.inf, math.inf)
    noise = ROUNDING * torch.finfo(vectors.dtype).eps * max(size, float(values.abs().amax()))
    sizes = values.abs() if sigma is None else torch.maximum(values.abs(), (values - sigma).abs())
    reasons = verdicts(residuals, rtol * sizes, noise, reason)
    return Eigenpairs(values, columns(vectors, order), residuals, reasons, matvecs, history)


def verdicts(residuals: Tensor, aims: Tensor, noise: float, reason: Reason) -> tuple[Reason, ...]:
    """Return a reason for each true residual, given how the search ended."""
    unmet = Reason.STAGNATION if reason in (Reason.CONVERGED, Reason.UNVERIFIED) else reason
    found = []
    for residual, aim in zip(residuals.tolist(), aims.tolist()):
        if not math.isfinite(residual):
            found.append(Reason.NON_FINITE)
        elif residual > max(aim, noise):
            found.append(unmet)
        elif reason is not Reason.CONVERGED:
            found.append(Reason.UNVERIFIED)
        else:
            found.append(Reason.CONVERGED if residual <= aim else Reason.PRECISION_LIMIT)
    return tuple(found)


def _non_finite_pairs(facts: Description, k: int, matvecs: int, history: Tensor) -> Eigenpairs:
    nothing = torch.full((k,), math.nan, dtype=torch.float64, device=facts.device)
    vectors = zero_block(facts, k) * math.nan
    return Eigenpairs(nothing, vectors, nothing.nan_to_num(math.inf), (Reason.NON_FINITE,) * k, matvecs, history)
