"""Products f(A) B for a symmetric matrix A known by its products, by Lanczos: any f, the root, its inverse.

>>> import torch
>>> from curvops.linalg import apply_function, inverse_sqrt, sqrt
>>> A, b = torch.diag(torch.tensor([1.0, 4.0, 9.0])), torch.ones(3)
>>> result = apply_function(A, torch.sqrt, b)
>>> result.value.round(decimals=4), result.reasons[0].name
(tensor([1., 2., 3.]), 'CONVERGED')
>>> sqrt(A, b).value.round(decimals=4), inverse_sqrt(A, b).value.round(decimals=4)
(tensor([1., 2., 3.]), tensor([1.0000, 0.5000, 0.3333]))
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Shaped
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.autograd import Function

from curvops.ambient import Progress, as_step, current_run, remark, running
from curvops.checks import check_options, checked_number
from curvops.errors import PrecisionWarning, warn
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import Multiply, algorithm, working
from curvops.linalg.core.cache import require_first_derivative
from curvops.linalg.core.results import FunctionProduct, Reason, indefinite
from curvops.linalg.core.vectors import Given, Matrix, ScalarFunction, Vectors
from curvops.linalg.solvers.systems import Callback, UsableColumns, check
from curvops.linalg.spectra.lanczos import LEAST_CAPACITY, TWO_STEPS_VECTORS, LockStep
from curvops.linalg.spectra.ritz import LEAST_DEPTH, ROUNDING, Approximants, SpectralFunction, approximants

# The number of steps from a random start that show the range of the spectrum.
SEEN_DEPTH = 10


@algorithm
def apply_function(
    A: Matrix | Given,
    f: ScalarFunction,
    B: Shaped[Vectors, "n *K"],
    *,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    max_matvecs: int | None = None,
    lower_bound: float | int | None = None,
    memory_budget: int | None = None,
    callback: Callback | None = None,
    progress: Progress = None,
) -> FunctionProduct:
    """Compute f(A) b for every column b of B; each column goes as deep as its own error estimate requires.

    Args:
        A: (n, n), symmetric.
        f: a function of eigenvalues, from float64 tensor to float64 tensor on the CPU.
        B: (n,) or (n, K).
        rtol: a column has converged when its estimated error is at most rtol ‖f(A) b‖.
        maxiter: the largest depth of the basis, 1000 by default; n steps suffice if the basis is stored.
        max_matvecs: the budget in products, for all columns together.
        lower_bound: a known lower bound of A's spectrum, such as its prior precision, for sharper estimates and so
            fewer products if f is singular at 0. It is not verified.
        memory_budget: bytes for the bases, which hold depth × n numbers per column. Where that is too little, Lanczos
            goes on without storing its vectors, orthogonal to the stored and the last three only, and makes them a
            second time for the result: up to twice the products, and more steps if eigenvalues lie far apart.
        callback: called as ``callback(depth, error_estimates (K,))`` whenever the error is estimated.
        progress: as in `cg`.

    Returns:
        A FunctionProduct; ``value`` has the shape of B. RANK_CAPPED (products) or ITERATION_LIMIT: the value reached
        within the limits. UNVERIFIED: the estimate is within rtol, but rests on fewer than three steps.
        PRECISION_LIMIT: rounding in A's dtype exceeds the rest of the error, as it does whenever f(A) b is tiny
        compared with max |f| ‖b‖; with an estimate of inf the value may be rounding alone. SINGULAR: f has no value at
        an eigenvalue that is zero to working precision; the value is the last approximation that was defined, or zero.

    Raises:
        TypeError, ValueError: A, B or the options do not fit, or f is not finite at a positive number in A's range.
        NotPositiveSemidefiniteError: f is not finite at a number in A's range that is clearly negative. A number within
            100 eps ‖A‖ of 0 counts as 0.

    Before a column counts as converged, the error estimate evaluates f at about a thousand points near the Ritz values,
    so that up to n products resolve a step or a peak between them. If a column ends after few steps, and f may be so
    large elsewhere that rounding in b would matter, ten products from a random start explore the rest of the spectrum,
    once; without the budget for them the column is UNVERIFIED. The estimate cannot detect a narrower peak, nor an
    eigenvalue far beyond the Ritz values along which b has almost no component.

    Source: Lanczos with full reorthogonalisation, or twice with a partial one; the estimate of the error from Ilić,
    Turner & Simpson 2010.

    Examples:
        >>> A = torch.diag(torch.tensor([1.0, 2.0]).double())
        >>> co.linalg.apply_function(A, torch.exp, torch.ones(2).double()).value.round(decimals=4)
        tensor([2.7183, 7.3891], dtype=torch.float64)
    """
    if lower_bound is not None:
        checked_number("lower_bound", lower_bound, "(-inf, inf)")
    return _apply(A, f, B, lower_bound, rtol, maxiter, max_matvecs, callback)


@algorithm
def inverse_sqrt(
    A: Matrix | Given,
    B: Shaped[Vectors, "n *K"],
    *,
    lower_bound: float | int | None = None,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    max_matvecs: int | None = None,
    memory_budget: int | None = None,
    callback: Callback | None = None,
    progress: Progress = None,
) -> FunctionProduct:
    """Compute A^-½ b, with the symmetric root, for every column b of B (n,) or (n, K) and positive definite A.

    Args:
        A: (n, n), symmetric positive definite.
        B: a vector (n,) or a block (n, K).
        lower_bound: a known positive lower bound of the spectrum, such as the prior precision. It is not verified.
            Without one, eigenvalues are assumed to exceed eps ‖A‖, and more products are spent on checking that.
        rtol: the relative error to reach.
        maxiter: the largest depth, as in `apply_function`.
        max_matvecs: a limit on products; None is none.
        memory_budget: bytes for the bases; where that is too little, Lanczos runs twice, as in `apply_function`.
        callback: called after each iteration, as in `apply_function`.
        progress: as in `cg`.

    Returns:
        A FunctionProduct as from `apply_function`, with a reason for each column. SINGULAR means that an eigenvalue is
        zero to working precision, and that b has a component along its eigenvector.

    Raises:
        NotPositiveSemidefiniteError: a clearly negative direction was found (it is also a ValueError).

    Source: Ilić, Turner & Simpson 2010.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 25.0]).double())
        >>> co.linalg.inverse_sqrt(A, torch.ones(2).double()).value.round(decimals=6)
        tensor([0.5000, 0.2000], dtype=torch.float64)
    """
    # A bound of 0 tells nothing of the inverse root, which is not finite there.
    return _apply(A, torch.rsqrt, B, _bound(lower_bound) or None, rtol, maxiter, max_matvecs, callback)


@algorithm
def sqrt(
    A: Matrix | Given,
    B: Shaped[Vectors, "n *K"],
    *,
    lower_bound: float | int | None = None,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    max_matvecs: int | None = None,
    memory_budget: int | None = None,
    callback: Callback | None = None,
    progress: Progress = None,
) -> FunctionProduct:
    """Compute A^½ b, with the symmetric root, for every column b of B (n,) or (n, K) and positive semidefinite A.

    Args:
        A: (n, n), symmetric positive semidefinite; it may be singular.
        B: a vector (n,) or a block (n, K).
        lower_bound: as in `inverse_sqrt`.
        rtol: the relative error to reach.
        maxiter: as in `inverse_sqrt`.
        max_matvecs: a limit on products; None is none.
        memory_budget: as in `inverse_sqrt`.
        callback: as in `apply_function`.
        progress: as in `cg`.

    Returns:
        A FunctionProduct as from `apply_function`, with a reason for each column.

    Raises:
        NotPositiveSemidefiniteError: a clearly negative direction was found (it is also a ValueError).

    Source: as `inverse_sqrt`.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 25.0]).double())
        >>> co.linalg.sqrt(A, torch.ones(2).double()).value.round(decimals=6)
        tensor([2., 5.], dtype=torch.float64)
    """
    return _apply(A, torch.sqrt, B, _bound(lower_bound), rtol, maxiter, max_matvecs, callback)


def _bound(lower_bound: float | int | None) -> float | int:
    return 0.0 if lower_bound is None else checked_number("lower_bound", lower_bound, "[0, inf)")


def _apply(
    A: Matrix | Given,
    f: ScalarFunction,
    B: Vectors,
    lower_bound: float | int | None,
    rtol: float | int,
    maxiter: int | None,
    max_matvecs: int | None,
    callback: Callback | None,
) -> FunctionProduct:
    A = vec.as_matrix(A, B)
    check(vec.describe_square(A), B, rtol, maxiter, callback=callback)
    check_options(max_matvecs=max_matvecs)
    current_run().expect(max_matvecs)
    bound = None if lower_bound is None else float(lower_bound)
    with torch.no_grad(), working(A, TWO_STEPS_VECTORS) as (multiply, room):
        job = FunctionRun(multiply, f, vec.as_columns(B), bound, room, maxiter)
        job.solve(float(rtol), max_matvecs, callback)
        value = vec.shaped_as(job.value(float(rtol)), B)
        return FunctionProduct(value, job.errors, tuple(job.reasons), job.run.depth, job.matvecs)


class FunctionRun:
    """Lanczos in lock-step on the active columns; each ends by itself."""

    def __init__(
        self,
        multiply: Multiply,
        f: ScalarFunction,
        B: Vectors,
        bound: float | None,
        memory_budget: int | None,
        maxiter: int | None,
    ) -> None:
        self.B = B
        self.usable = UsableColumns.of(B)
        self.live = self.usable.live
        self.reasons = [self.usable.reasons.get(j, Reason.ITERATION_LIMIT) for j in range(B.shape[1])]
        zero = torch.tensor([reason is Reason.ZERO_RIGHT_HAND_SIDE for reason in self.reasons], dtype=torch.bool)
        self.errors = torch.where(zero, 0.0, math.inf).double()
        self.f = SpectralFunction(f, bound, torch.finfo(B.dtype).eps)
        self.seen, self.search_matvecs = torch.zeros(0, dtype=torch.float64), 0
        least = (LEAST_CAPACITY + 2) * len(self.live) * vec.column_bytes(B)
        room = None if memory_budget is None else max(memory_budget, least)
        limit = 1000 if maxiter is None else maxiter
        self.run = LockStep.within(multiply, self.usable.scale(B), 32, limit, room)
        # A basis that is not stored is not orthogonal, and may need more than n steps.
        self.wanted = limit if self.run.most < min(B.shape[0], limit) else min(B.shape[0], limit)
        self.best: list[Tensor | None] = [None] * len(self.live)
        self.stopped = [False] * len(self.live)
        self.active = list(range(len(self.live)))
        self.unverified: set[int] = set()

    @property
    def matvecs(self) -> int:
        return self.run.matvecs + self.search_matvecs

    def solve(self, rtol: float, budget: int | None, callback: Callback | None) -> None:
        while self.active:
            depth = self.run.depth
            target = min(self.wanted, depth + max(1, depth // 8))
            while budget is not None and target > depth and self._cost(target) > budget:
                target -= 1
            if target == depth:
                ended = Reason.ITERATION_LIMIT if depth == self.wanted else Reason.RANK_CAPPED
                for k in self.active:
                    self.reasons[int(self.live[k])] = Reason.UNVERIFIED if k in self.unverified else ended
                return
            if target > self.run.capacity:
                self.run.reserve(min(self.run.most, 2 * target))
            self.run.extend(target, beyond_capacity=True)
            self._assess(rtol, budget)
            self.active = [k for k in self.active if not self.stopped[k]]
            remark(lambda: f"error {float(self.errors.amax()):.1e}")
            if callback is not None:
                as_step(0, callback, self.run.depth, self.errors.clone())

    def _cost(self, target: int) -> int:
        """Return the products in total if the active columns go to depth ``target``, with those for the result."""
        depths = torch.where(self.run.done, self.run.depths, target)
        steps = int((depths - self.run.depths).sum())
        if target > self.run.most:
            steps += int((depths - self.run.most + LEAST_CAPACITY).clamp_min(0).sum())
        return self.matvecs + steps

    def _assess(self, rtol: float, budget: int | None) -> None:
        """Estimate the errors of the active columns, and stop those that are done, with reasons."""
        if self.run.skewed:
            for k in self.active:
                self.errors[int(self.live[k])] = math.inf
                self._stop(k, Reason.NOT_SYMMETRIC)
            return
        by_depth: dict[int, list[int]] = {}
        for k in self.active:
            m = int(self.run.depths[k])
            finite = torch.isfinite(self.run.alphas[k, :m]).all() & torch.isfinite(self.run.betas[k, :m]).all()
            if bool(finite):
                by_depth.setdefault(m, []).append(k)
            else:
                self._stop(k, Reason.NON_FINITE)
        for m, together in by_depth.items():
            T = torch.stack([self.run.tridiagonal(k) for k in together])
            beta = self.run.betas[together, m - 1]
            question = T, beta, self.run.dropped[together], self.f, self.run.scale, rtol
            approximation = approximants(*question, self.seen)
            doubtful = self._leaves_doubt(approximation, beta, rtol)
            if bool(doubtful.any()) and not len(self.seen) and self._search_spectrum(budget):
                approximation = approximants(*question, self.seen)
            if len(self.seen):
                doubtful[:] = False
            errors = approximation.relative()
            for i, k in enumerate(together):
                complete = float(beta[i]) == 0
                if not bool(approximation.defined[i]):
                    if complete:
                        self._stop(k, Reason.SINGULAR)
                    continue
                self.best[k] = approximation.coefficients[i]
                self.errors[int(self.live[k])] = errors[i]
                met, verified = float(errors[i]) <= rtol, bool(approximation.verified[i])
                self.unverified.discard(k)
                if met and not verified:
                    self.unverified.add(k)
                elif verified and (met or bool(approximation.settled[i])):
                    bounded = math.isfinite(float(approximation.rounding[i]))
                    limit = Reason.PRECISION_LIMIT if bounded else Reason.SINGULAR
                    self._stop(k, Reason.UNVERIFIED if bool(doubtful[i]) else Reason.CONVERGED if met else limit)

    def _leaves_doubt(self, approximation: Approximants, beta: Tensor, rtol: float) -> Tensor:
        """Return the columns that are about to end with too few Ritz values to bound f over the spectrum."""
        m = approximation.coefficients.shape[1]
        if m == self.run.n:
            return torch.zeros_like(approximation.settled)
        few = approximation.settled & approximation.defined & ((beta == 0) | (m < SEEN_DEPTH))
        if not bool(few.any()):
            return few
        threat = ROUNDING * self.f.eps * self.f.largest_within(self.run.scale)
        tolerated = 0.1 * rtol * approximation.coefficients.norm(dim=1)
        return few & (threat > torch.maximum(approximation.rounding, tolerated))

    def _search_spectrum(self, budget: int | None) -> bool:
        """Find Ritz values by a short run from a random start within the budget; return whether there are any."""
        depth = min(SEEN_DEPTH, self.run.n, SEEN_DEPTH if budget is None else budget - self.matvecs)
        if depth < LEAST_DEPTH:
            return False
        generator = torch.Generator(device=self.B.device).manual_seed(0)  # the user's generator does not advance
        run = LockStep(self.run.multiply, vec.random_block(self.B, 1, "gaussian", generator), LEAST_CAPACITY)
        run.extend(depth, beyond_capacity=True)
        self.search_matvecs += run.matvecs
        T = run.tridiagonal(0)
        if not bool(torch.isfinite(T).all()):
            return False
        self.seen = torch.linalg.eigvalsh(T)
        return True

    def _stop(self, k: int, reason: Reason) -> None:
        self.reasons[int(self.live[k])] = reason
        self.stopped[k] = True
        self.run.done[k] = True  # no more products for this column

    def size(self, k: int) -> float:
        """Return the norm of usable column k."""
        return float(self.run.sizes[k]) * float(self.usable.heights[self.live[k]])

    def value(self, rtol: float) -> Vectors:
        """Return the approximants in B's scale; overflowed and non-finite columns become NON_FINITE."""
        empty = torch.zeros(0, dtype=torch.float64)
        coefficients = [empty if best is None else best for best in self.best]
        blocks, remade = self.run.combinations([y[:, None] for y in coefficients])
        X = vec.zero_block(self.B, len(self.live))
        for k, block in enumerate(blocks):
            vec.put(X, k, block * self.size(k))
            self._note_noise(k, remade[k], rtol)
        X, lost = self.usable.place(X)
        for j in lost:
            self.reasons[j], self.errors[j] = Reason.NON_FINITE, math.inf
        # Entries below the smallest normal number may have any value.
        least = torch.finfo(X.dtype).tiny * math.sqrt(X.shape[0])
        for y, j, length in zip(coefficients, self.live.tolist(), vec.norm(X)[self.live.to(X.device)].tolist()):
            if y.any() and math.isfinite(float(self.errors[j])):
                self.errors[j] += least / length if length else math.inf
                if least > 0.1 * length:
                    self.reasons[j] = Reason.NON_FINITE
        return X

    def _note_noise(self, k: int, remade: Tensor, rtol: float) -> None:
        """Add the error in column k of vectors that came out differently the second time."""
        y, j = self.best[k], int(self.live[k])
        if y is None or torch.equal(remade, self.run.tridiagonal(k)):
            return
        nodes, V = torch.linalg.eigh(remade[: len(y), : len(y)])
        change = V @ (self.f.unchecked(nodes) * V[0]) - y
        self.errors[j] += (change.norm() / y.norm()).nan_to_num(math.inf, math.inf)
        if self.reasons[j] is Reason.CONVERGED and float(self.errors[j]) > rtol:
            self.reasons[j] = Reason.PRECISION_LIMIT


# Inverse square roots with gradients in the block and in the tensors inside A


def inverse_root(dense: Tensor) -> Tensor:
    """Return A^-½ of a positive definite tensor (..., n, n), with a finite gradient even if eigenvalues coincide."""
    return _InverseRoot.apply(dense)  # type: ignore[no-untyped-call]


def inverse_root_product(operator: LinearOperator, rhs: Tensor, lower_bound: float | None) -> Tensor:
    """Return A^-½ B for B (n, K) by Lanczos, with gradients in B and in the tensors inside A."""
    return _InverseRootProduct.apply(  # type: ignore[no-untyped-call]
        operator.representation_tree(), lower_bound, rhs, *operator.representation()
    )


class _InverseRootProduct(Function):
    @staticmethod
    def forward(ctx: Any, tree: Any, lower_bound: float | None, rhs: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tree, ctx.lower_bound = tree, lower_bound
        ctx.save_for_backward(rhs, *tensors)
        return _root_of_columns(tree(*tensors), rhs, lower_bound)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        rhs, *tensors = ctx.saved_tensors
        operator = ctx.tree(*tensors)
        inside: tuple[Tensor | None, ...] = (None,) * len(tensors)
        if not any(ctx.needs_input_grad[3:]):
            return (None, None, _root_of_columns(operator, gradient, ctx.lower_bound)[0], *inside)
        value, pairs = _root_of_columns(operator, vec.join(gradient, rhs), ctx.lower_bound, with_pairs=True)
        if pairs is not None:
            left, right = pairs
            # Both orders, since an operator may take the symmetry of its derivative for granted.
            inside = operator._bilinear_derivative(vec.join(left, right) / 2, vec.join(right, left))
        return (None, None, value[:, : rhs.shape[1]], *inside)


def _root_of_columns(
    operator: LinearOperator, block: Tensor, lower_bound: float | None, with_pairs: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return A^-½ times each column, and with the gradients in the first half of the columns L and R of `_pairs`."""
    rtol = min(1e-6, torch.finfo(block.dtype).eps ** 0.7)
    with running("inverse_sqrt", operator), working(operator, TWO_STEPS_VECTORS) as (multiply, room):
        run = FunctionRun(multiply, torch.rsqrt, block, lower_bound, room, None)
        # A gradient needs the vectors of each Krylov space to more digits than their product.
        run.solve(1e-3 * rtol if with_pairs else rtol, None, None)
        value = run.value(rtol)
        reasons = [
            Reason.CONVERGED if error <= rtol else reason for error, reason in zip(run.errors.tolist(), run.reasons)
        ]
        product = FunctionProduct(value, run.errors, tuple(reasons), run.run.depth, run.matvecs)
        if Reason.PRECISION_LIMIT in product.reasons:
            warn(Reason.PRECISION_LIMIT.value, PrecisionWarning)
        product.raise_if_failed(rtol)
        return value, _pairs(run) if with_pairs else None


def _pairs(run: FunctionRun) -> tuple[Tensor, Tensor] | None:
    """Return L and R with d(Σ gᵀ A^-½ b) = Σ lᵀ dA r over their columns, for the columns g and then b of the run.

    By the Ritz pairs (θᵢ, yᵢ) for g and (θⱼ, yⱼ) for b, gᵀ dA^-½ b ≈ Σ (gᵀyᵢ) F(θᵢ, θⱼ) (yⱼᵀb) yᵢᵀ dA yⱼ with the
    divided differences F of x^-½ (Kandolf et al. 2021), whose singular values decrease fast.
    """
    K = run.B.shape[1] // 2
    position = {j: k for k, j in enumerate(run.usable.live.tolist())}
    both = [(position[j], position[j + K]) for j in range(K) if j in position and j + K in position]
    weights = [torch.zeros(0, 0, dtype=torch.float64)] * len(position)
    for first, second in both:
        (root, V), (other, W) = (_ritz(run, k) for k in (first, second))
        differences = inverse_root_differences(root, other)
        U, S, X = torch.linalg.svd(V[0][:, None] * differences * W[0])
        rank = int((torch.finfo(run.B.dtype).eps * S[0] < S).sum())
        size = run.size(first) * run.size(second)
        weights[first], weights[second] = V @ U[:, :rank] * (size * S[:rank]), W @ X[:rank].mT
    blocks, _ = run.run.combinations(weights)
    if not both:
        return None
    left, right = zip(*((blocks[first], blocks[second]) for first, second in both))
    return vec.join(*left), vec.join(*right)


def _ritz(run: FunctionRun, k: int) -> tuple[Tensor, Tensor]:
    """Return the roots of the Ritz values of one column, and the eigenvectors of T."""
    values, V = torch.linalg.eigh(run.run.tridiagonal(k))
    return run.f.on_ritz_values(values[None], run.run.scale)[0].reciprocal(), V


def inverse_root_differences(
    left: Float[Tensor, "*batch i"], right: Float[Tensor, "*batch j"]
) -> Float[Tensor, "*batch i j"]:
    """Return (1/a − 1/b)/(a² − b²) for the roots a and b of eigenvalues, without their differences."""
    a, b = left.unsqueeze(-1), right.unsqueeze(-2)
    return -1 / (a * b * (a + b))


class _InverseRoot(Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(dense)
        if not bool((values > 0).all()):
            raise indefinite(f"A^-½ needs a positive definite A: an eigenvalue is {float(values.min()):.3g}.")
        ctx.save_for_backward(values, vectors)
        return vectors @ (values.rsqrt().unsqueeze(-1) * vectors.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        require_first_derivative()
        # In the eigenbasis, d(A^-½)_ij = −dA_ij / (√λ_i √λ_j (√λ_i + √λ_j)), without differences of eigenvalues.
        values, vectors = ctx.saved_tensors
        root = values.sqrt()
        inner = vectors.mT @ gradient @ vectors
        result: Tensor = vectors @ (inner * inverse_root_differences(root, root)) @ vectors.mT
        return result
