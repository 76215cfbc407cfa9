"""Lanczos tridiagonalisation with full reorthogonalisation, for one start vector or a batch in lock-step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import Progress, current_run
from curvops.checks import check_like, check_options, check_shape, checked_whole
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import Multiply, algorithm, working
from curvops.linalg.core.results import Reason
from curvops.linalg.core.structure import beyond_rounding, rounding_of
from curvops.linalg.core.vectors import Description, Given, Matrix, Vectors
from curvops.summary import Summarised


@dataclass(frozen=True, eq=False, repr=False)
class LanczosResult(Summarised):
    """A Lanczos factorisation A Q = Q T + β_m q_{m+1} e_mᵀ with orthonormal Q.

    ``betas`` has m entries: the m − 1 off-diagonal entries of T, and the last, which is ``residual_norm``.
    ``reason`` is CONVERGED for the requested depth, BREAKDOWN for an invariant subspace, RANK_CAPPED for a memory
    budget that ended the run, NON_FINITE for a product with NaN or Inf (Q holds the columns before it), and
    NOT_SYMMETRIC for an A that is not symmetric, for which the identity does not hold.
    """

    Q: Float[Vectors, "n m"]
    alphas: Float[Tensor, " m"]
    betas: Float[Tensor, " m"]
    residual_norm: Float[Tensor, ""]
    reason: Reason
    matvecs: int

    @property
    def T(self) -> Float[Tensor, "m m"]:
        """The tridiagonal matrix QᵀAQ."""
        return tridiagonal(self.alphas, self.betas[:-1])


TWO_STEPS_VECTORS = 6
"""The number of vectors that a run of two steps takes."""
LEAST_CAPACITY = 3
"""The least capacity of a run that goes beyond it."""


def tridiagonal(diagonal: Float[Tensor, " m"], off: Float[Tensor, " m_less_one"]) -> Float[Tensor, "m m"]:
    """Return the symmetric tridiagonal matrix with these entries."""
    return diagonal.diag() + off.diag(1) + off.diag(-1)


def depth_within(steps: int, n: int, vector: int, probes: int, memory_budget: int | None) -> int:
    """Return the largest depth ≤ ``steps`` for which ``probes`` bases fit in ``memory_budget`` bytes, at least 1.

    A vector takes ``vector`` bytes.
    """
    steps = min(steps, n)
    if memory_budget is None:
        return steps
    return max(1, min(steps, memory_budget // (vector * probes) - 2))


@algorithm
def lanczos(
    A: Matrix | Given,
    steps: int,
    *,
    start: Float[Vectors, " n"] | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> LanczosResult:
    """Tridiagonalise symmetric A over the Krylov space of a start vector (a random one by default).

    Costs at most ``steps`` products and keeps steps × n numbers.

    Args:
        A: (n, n), symmetric.
        steps: the largest depth.
        start: the start vector (n,); None draws one.
        generator: source of the start vector.
        memory_budget: bytes for the basis, which limit the depth; None is the rest of the budget of the linearisation
            behind A.
        progress: as in `cg`.

    Returns:
        A LanczosResult with the basis Q, the tridiagonal T and the reason why it ended; Qᵀ A Q = T.

    Raises:
        ValueError: A is not square, ``steps`` is not positive, or ``start`` does not fit, is zero or not finite.

    Source: Lanczos 1950; two passes of Gram–Schmidt as in Giraud et al. 2005.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]).double())
        >>> run = co.linalg.lanczos(A, 4, start=torch.ones(4).double())
        >>> T = run.alphas.diag() + run.betas[:3].diag(1) + run.betas[:3].diag(-1)
        >>> torch.linalg.eigvalsh(T).round(decimals=6)
        tensor([1., 2., 3., 4.], dtype=torch.float64)
    """
    A = vec.as_matrix(A)
    facts = vec.describe_square(A)
    n = facts.rows
    check_options(steps=steps)
    if start is not None:
        check_shape("start", start, (n,))
    block = start_block(facts, None if start is None else start.unsqueeze(1), 1, generator)
    current_run().expect(min(steps, n))
    with working(A, TWO_STEPS_VECTORS) as (multiply, room):
        depth = depth_within(steps, n, vec.column_bytes(block), 1, room)
        run = LockStep(multiply, block, depth)
        run.extend(depth)
    m = int(run.depths[0])
    if not run.finite:
        reason, m = Reason.NON_FINITE, max(m - 1, 0)
    elif run.skewed:
        reason = Reason.NOT_SYMMETRIC
    elif bool(run.done[0]):
        reason = Reason.BREAKDOWN
    else:
        reason = Reason.RANK_CAPPED if m < min(steps, run.n) else Reason.CONVERGED
    alphas, betas = run.alphas[0, :m], run.betas[0, :m]
    last = betas[-1] if m else torch.zeros((), dtype=torch.float64)
    return LanczosResult(run.vectors(0, m), alphas, betas, last, reason, run.matvecs)


def start_block(
    facts: Description, start: Vectors | None, block_size: int, generator: torch.Generator | None
) -> Float[Vectors, "n b"]:
    """Check the given start and scale its columns to size about 1, or draw a random one."""
    if start is None:
        return vec.random_block(facts, checked_whole("block_size", block_size, 1, facts.rows), "gaussian", generator)
    if start.ndim != 2 or len(start) != facts.rows:
        raise ValueError(f"start must have shape ({facts.rows}, b), got {tuple(start.shape)}.")
    check_like("start", start, facts, "A")
    sizes = vec.largest(start)
    if not bool(torch.isfinite(sizes).all() & (sizes > 0).any()):
        raise ValueError("start must be finite and not zero.")
    return vec.as_block(start / torch.where(sizes > 0, sizes, 1.0).to(start.dtype))


class LockStep:
    """Lanczos for K start vectors at once: one block product per step, each vector with its own basis.

    The bases lie one after another in ``store``, a block of K (capacity + 1) columns. ``alphas`` and ``betas`` are
    (K, m) float64 on the CPU; ``depths`` (K,) counts the steps of each vector, ``done`` (K,) marks invariant Krylov
    spaces, and ``dropped`` (K,) is their last beta, which counts as 0. ``extend`` may be called again for more depth;
    ``most`` is the depth that memory allows.

    Beyond ``capacity`` steps, which must then be at least ``LEAST_CAPACITY``, the last three places of a basis are used
    in turn: a new vector is orthogonal to the vectors stored before them and to the last three. ``combinations`` makes
    the vectors that were overwritten a second time.
    """

    def __init__(
        self,
        multiply: Multiply,
        starts: Float[Vectors, "n K"],
        capacity: int,
        most: int | None = None,
    ) -> None:
        self.n, self.K = starts.shape
        self.multiply = multiply
        self.eps = torch.finfo(starts.dtype).eps
        self.sizes = vec.norm(starts)
        self.capacity, self.most = capacity, capacity if most is None else most
        self.store = vec.empty_block(starts, self.K * (capacity + 1))
        vec.put_columns(self.store, torch.arange(self.K) * (capacity + 1), starts / self.sizes.to(starts.dtype))
        self.alphas = torch.zeros(self.K, 0, dtype=torch.float64)
        self.betas = torch.zeros(self.K, 0, dtype=torch.float64)
        self.depths = torch.zeros(self.K, dtype=torch.long)
        self.done = torch.zeros(self.K, dtype=torch.bool)
        self.dropped = torch.zeros(self.K, dtype=torch.float64)
        self.scale = 0.0
        self.gaps, self.images = torch.zeros(2, self.K, dtype=torch.float64)
        self.matvecs = 0

    @classmethod
    def within(
        cls, multiply: Multiply, starts: Float[Vectors, "n K"], first: int, steps: int, memory_budget: int | None
    ) -> LockStep:
        """Prepare for ``first`` and later at most ``steps`` steps, as many as fit in ``memory_budget`` bytes."""
        n, K, vector = starts.shape[0], max(1, starts.shape[1]), vec.column_bytes(starts)
        most = depth_within(steps, n, vector, K, memory_budget)
        # If memory cannot hold a growing basis together with the previous one, all of it is reserved at once. On a CPU
        # memory that was reserved takes none until it is written to; more than 1 GiB may be refused all the same.
        whole = (most + 2) * vector * K
        tight = memory_budget is not None and 3 * whole > 2 * memory_budget
        at_once = tight or (starts.device.type == "cpu" and whole <= 2**30)
        return cls(multiply, starts, most if at_once else min(first, most), most)

    @property
    def depth(self) -> int:
        """The number of steps made, of the vectors that are not done."""
        return self.alphas.shape[1]

    @property
    def finite(self) -> bool:
        """Whether no product contained NaN or Inf."""
        return bool(torch.isfinite(self.alphas).all() & torch.isfinite(self.betas).all())

    @property
    def skewed(self) -> bool:
        """Whether QᵀAQ of a basis differs from its transpose by more than rounding explains, relative to ‖AQ‖."""
        return beyond_rounding(self.gaps.sqrt(), self.images.sqrt(), self.eps, lambda: self.rounding, self.depth)

    @cached_property
    def rounding(self) -> float:
        """The measured rounding of a product with a unit vector; computed if there is doubt about the symmetry."""
        self.matvecs += 3
        return rounding_of(self.multiply, self.vectors(0, 1))

    def check(self, scale: float = 0.0) -> None:
        """Raise ValueError if the products were not finite, or not those of a symmetric matrix.

        ``scale`` is the size of the terms of the products; if it is larger than the products, rounding grows with it.
        """
        vec.check_finite(torch.cat([self.alphas, self.betas]))
        if float(self.gaps.amax().sqrt()) > 1e3 * self.eps * scale and self.skewed:
            raise ValueError(Reason.NOT_SYMMETRIC.value)

    def tridiagonal(self, k: int) -> Float[Tensor, "m m"]:
        """Return T of start vector k."""
        m = int(self.depths[k])
        return tridiagonal(self.alphas[k, :m], self.betas[k, : m - 1])

    @property
    def stored(self) -> int:
        """The number of vectors of each basis that are in the store: all, or those before the last three places."""
        depth = self.alphas.shape[1]
        return depth if depth <= self.capacity else self.capacity - 2

    def place(self, m: int) -> int:
        """Return the place of vector m in the store of its basis."""
        first = self.capacity - 2
        return m if m < first else first + (m - first) % 3

    def vectors(self, k: int, m: int) -> Float[Vectors, "n m"]:
        """Return the first m vectors of start vector k's basis, sharing memory."""
        first = k * (self.capacity + 1)
        return vec.part(self.store, first, first + m)

    def combinations(
        self, weights: Sequence[Float[Tensor, "_ _"]]
    ) -> tuple[list[Float[Vectors, "n _"]], list[Float[Tensor, "_ _"]]]:
        """Return Q C for each basis Q and its weights C, whose rows belong to its first vectors, and QᵀAQ of each.

        Vectors that are not stored are made again, with the same products, so that QᵀAQ differs from ``tridiagonal``
        only if products of equal blocks differ.
        """
        stored = self.stored
        blocks = [vec.combine(self.vectors(k, min(len(C), stored)), C[:stored]) for k, C in enumerate(weights)]
        alphas, betas = self.alphas.clone(), self.betas.clone()
        for m in range(stored - 1, max(map(len, weights), default=0) - 1):
            live = (self.depths > m).nonzero().squeeze(1)
            alphas[live, m], betas[live, m] = self._make_vectors(m, live)[:2]
            for k, C in enumerate(weights):
                if m + 1 < len(C):
                    first = k * (self.capacity + 1) + self.place(m + 1)
                    vec.axpy(blocks[k], vec.part(self.store, first, first + 1), C[m + 1 : m + 2])
        depths = enumerate(self.depths.tolist())
        return blocks, [tridiagonal(alphas[k, :m], betas[k, : m - 1]) for k, m in depths]

    def reserve(self, capacity: int) -> None:
        """Reserve memory for ``capacity`` steps, keeping those done.

        Once half of ``most`` is needed, memory for all of it is reserved: both the old basis, which must be the smaller
        one, and the new one are held meanwhile.
        """
        if capacity <= self.capacity:
            return
        if 2 * capacity > self.most:
            capacity = max(capacity, self.most)
        store, done = vec.empty_block(self.store, self.K * (capacity + 1)), self.alphas.shape[1] + 1
        for k in range(self.K):
            vec.put(store, k * (capacity + 1), self.vectors(k, done))
        self.store, self.capacity = store, capacity

    def extend(self, depth: int, beyond_capacity: bool = False) -> None:
        """Continue to ``depth`` steps, leaving out the vectors that are done, at one small transfer per step."""
        depth = depth if beyond_capacity else min(depth, self.capacity)
        while (m := self.alphas.shape[1]) < depth:
            live = (~self.done).nonzero().squeeze(1)
            if not len(live):
                return
            self.step(m, live)

    def deepen(self, longer: Callable[[int], int], settled: Callable[[], bool]) -> bool:
        """Add ``longer(depth)`` steps at a time, up to ``most``; return whether it settled or all are done."""
        while not settled() and not bool(self.done.all()):
            depth = self.alphas.shape[1]
            if depth >= self.most:
                return False
            target = min(self.most, depth + longer(depth))
            self.reserve(target)
            self.extend(target)
        return True

    def step(self, m: int, live: Tensor) -> None:
        """Make one product and one projection for the start vectors ``live``, each with m vectors done."""
        alpha, beta, image, mirrored, stray = self._make_vectors(m, live)
        if m:
            gaps = 2 * ((mirrored - self.betas[live, m - 1]).square() + stray)
            self.gaps[live] += gaps.nan_to_num(0.0, 0.0)
        self.images[live] += image.square().nan_to_num(0.0, 0.0)
        self.scale = max(self.scale, float(image.nan_to_num(0.0, 0.0).amax()))
        # The rest after two passes is rounding once it falls to eps times the largest image so far.
        ended = ~(beta > 10 * self.eps * self.scale) | ~torch.isfinite(alpha)
        self.dropped[live] = torch.where(ended, beta, 0.0)
        if m + 1 == self.n and m <= self.capacity:
            ended[:] = True  # no direction is left
        beta = torch.where(ended & torch.isfinite(beta), 0.0, beta)
        alphas, betas = torch.zeros(2, self.K, 1, dtype=torch.float64)
        alphas[live, 0], betas[live, 0] = alpha, beta
        self.alphas, self.betas = torch.cat([self.alphas, alphas], 1), torch.cat([self.betas, betas], 1)
        self.depths[live] += 1
        self.done[live] = ended

    def _make_vectors(self, m: int, live: Tensor) -> Float[Tensor, "5 _"]:
        """Put vector m + 1 of the bases ``live`` in its place.

        Returns qᵀAq, the norm of the rest of A q, ‖A q‖, pᵀAq for the vector p before q, and the sum of squares of the
        other entries of Qᵀ A q, which are zero for symmetric A.
        """
        bases = (live * (self.capacity + 1)).to(self.store.device, non_blocking=True)
        V = vec.columns(self.store, bases + self.place(m))
        W = self.multiply(V)
        self.matvecs += len(live)
        image = vec.norm(W)
        alpha = vec.inner(V, W)
        mirrored = vec.inner(vec.columns(self.store, bases + self.place(m - 1)), W) if m else image
        W, along = vec.project_out(W, self.store, self.capacity + 1, min(m, self.capacity) + 1, live)
        beta = vec.norm(W)
        vec.put_columns(self.store, bases + self.place(m + 1), W / torch.where(beta > 0, beta, 1.0).to(W.dtype))
        # Beyond the capacity, a q need not be orthogonal to the image of the last vector stored.
        others = m - 1 if m <= self.capacity else self.capacity - 3
        stray = along[:, : max(others, 0)].double().square().sum(1)
        return torch.stack([alpha, beta, image, mirrored, stray]).cpu()
