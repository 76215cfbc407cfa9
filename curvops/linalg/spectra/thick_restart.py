"""What block Lanczos and block Golub–Kahan share: a basis that grows by blocks, thick restarts, the search for pairs.

Two-pass Gram–Schmidt drops dependent directions of a block, and fresh ones are drawn. When the basis is full, the best
Ritz vectors are kept; at the end it is checked that no pair was missed.

One Krylov space contains at most as many eigenvectors of an eigenvalue (or of a cluster within the tolerance) as its
start block has columns. If that many were found, and further ones would be among those wanted, the pairs are locked and
Lanczos runs on a fresh random block in their complement. Its result is accepted once the Krylov space is deep enough to
have found a missed pair: the component of a random vector along any direction is at least δ/√n except with probability
about δ, and a polynomial of degree j amplifies it by T_j(γ), where γ is the position of the missed eigenvalue beyond
those of the complement (Kuczyński & Woźniakowski 1992). δ^b is 1/1000.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import as_step, remark
from curvops.checkpoint import NOTHING, Checkpoint
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import ROUNDINGS, Vectors
from curvops.linalg.solvers.systems import Callback
from curvops.storage import restore, state_of

Which: TypeAlias = Literal["LM", "LA", "SA", "BE"]

STATE = ("iteration", "seen", "values", "residuals", "found", "further", "history")
# The number of blocks of vectors held in a step, in addition to the basis.
BLOCK_VECTORS = 4
RTOL = 1e-6
"""The default tolerance, relative to the eigenvalue; it is wider where rounding of ‖A‖ is, up to √eps."""
COUNTED = ("matvecs", "failure")


def best_positions(values: Tensor, which: Which, k: int) -> Tensor:
    """Return the positions of the k (or fewer) wanted values among ascending ones, best first."""
    order = values.argsort(descending=which != "SA", stable=True)
    if which == "LM":
        order = values.abs().argsort(descending=True, stable=True)
    k = min(k, len(values))
    low = k // 2 if which == "BE" else 0
    return torch.cat([order[: k - low], order[len(order) - low :]])


def rejected_interval(values: Tensor, which: Which) -> tuple[float, float]:
    """Return the interval outside which a further value would be better than one of these, all of them wanted."""
    if which == "LA":
        return -math.inf, float(values.min())
    if which == "SA":
        return float(values.max()), math.inf
    if which == "LM":
        least = float(values.abs().min())
        return -least, least
    order = values.sort(descending=True).values
    high = len(order) - len(order) // 2
    return (float(order[high]) if high < len(order) else -math.inf), float(order[high - 1])


@dataclass(eq=False)
class Search:
    """A search for the k wanted pairs of a process, which leaves them locked in it."""

    process: Projection
    which: Which
    k: int
    rtol: float
    capacity: int
    capped: bool
    """Whether a memory budget made the basis smaller."""
    maxiter: int
    most_matvecs: float | int
    callback: Callback | None
    saved: Checkpoint = NOTHING
    iteration: int = 0
    seen: int = -1
    further: bool = False
    """Whether pairs were found and their complement is searched for others."""

    def __post_init__(self) -> None:
        self.values = self.residuals = self.found = torch.zeros(0, dtype=torch.float64)
        self.history = torch.zeros(0, self.k, dtype=torch.float64)
        """Residuals of the wanted pairs, in the process's scale, a row for each check until they were found."""
        if self.saved.state is not None:
            restore(self, STATE, self.saved.state)
            self.process.recall(self.saved.state["process"])

    def state(self) -> dict[str, Any]:
        """Return the state from which a run continues."""
        return state_of(self, STATE) | {"process": self.process.state()}

    def run(self, random_start: bool) -> Reason:
        """Run to a reason; after NON_FINITE, fewer than k pairs may be locked."""
        process, nothing = self.process, torch.zeros(0, dtype=torch.long)
        reason, certain, resumed = Reason.CONVERGED, False, self.further
        if not resumed:
            reason = self._pursue(self._is_converged, lambda: self.k)
            if reason is Reason.NON_FINITE:
                return reason
            chosen = best_positions(self.values, self.which, self.k)
            self.found = self.values[chosen]
            certain = process.complete or (random_start and not self._may_hide_more(self.residuals[chosen]))
            process.lock(nothing, chosen)
        while reason is Reason.CONVERGED and not certain:
            if not resumed:
                process.refill(process.block_size)
                self.seen = -1
            self.further, resumed = True, False
            reason = self._pursue(self._is_complement_done, lambda: max(1, len(self._better())))
            if reason is not Reason.CONVERGED:
                return reason if reason is Reason.NON_FINITE else Reason.UNVERIFIED
            better = self._better()
            certain = not len(better) or process.complete
            everything = torch.cat([self.found, self.values[better]])
            best = best_positions(everything, self.which, self.k)
            process.lock(best[best < self.k], better[best[best >= self.k] - self.k])
            self.found = torch.cat([everything[best[best < self.k]], everything[best[best >= self.k]]])
        return reason

    def tolerance(self, values: Tensor) -> Tensor:
        """Return the residual at which the recursion may stop, in the process's units."""
        # The true residual is slightly larger than the recursion's.
        return (0.5 * self.rtol * values.abs()).clamp_min(3 * self.process.noise)

    def _pursue(self, done: Callable[[], bool], needed: Callable[[], int]) -> Reason:
        process = self.process
        while True:
            self.saved.save(self.state)
            spent = (
                self.iteration >= self.maxiter
                or process.matvecs + process.maps * process.pending_columns > self.most_matvecs
            )
            if spent and process.locked + process.width >= self.k:
                self._look()
                return Reason.RANK_CAPPED if self.capped else Reason.ITERATION_LIMIT
            if process.locked + process.width + process.pending_columns > self.capacity:
                self._look()
                room = self.capacity - process.locked
                count = needed() + (room - needed()) // 3  # a third did best on eleven spectra
                count = max(1, min(count, room - process.pending_columns))
                process.restart(best_positions(self.values, self.which, count))
                self.seen = -1
            process.step()
            self.iteration += 1
            if process.failed:
                return Reason.NON_FINITE
            if not process.complete and process.width < self.seen + self.seen // 16:
                continue
            self._look()
            if not self.further:
                row = self._wanted_residuals()
                row = torch.cat([row, row.new_full((self.k - len(row),), math.inf)])
                self.history = torch.cat([self.history, row.unsqueeze(0)])
            remark(lambda: f"residual {float(self._wanted_residuals().amax()):.1e}")
            if self.callback is not None:
                as_step(0, self.callback, self.iteration, self._wanted_residuals())
            if process.complete or done():
                return Reason.CONVERGED

    def _wanted_residuals(self) -> Tensor:
        """Return the recursion's residuals of the wanted pairs."""
        return self.residuals[best_positions(self.values, self.which, self.k)] * self.process.scale

    def _look(self) -> None:
        if self.seen != self.process.width:
            self.values, self.residuals = self.process.ritz()
            self.seen = self.process.width

    def _is_converged(self) -> bool:
        chosen = best_positions(self.values, self.which, self.k)
        return len(chosen) == self.k and bool((self.residuals[chosen] <= self.tolerance(self.values[chosen])).all())

    def _may_hide_more(self, residuals: Tensor) -> bool:
        """Return whether the block's width may hide a member of a cluster that is better than the worst pair."""
        # A cluster found b times or more may have further members.
        low, high = rejected_interval(self.found, self.which)
        values, order = self.found.sort()
        window = 10 * torch.maximum(self.tolerance(values), residuals[order])  # these may belong to one eigenvalue
        cluster = torch.cat([torch.zeros(1), (values.diff() > window[1:]).double().cumsum(0)])
        for label in cluster.unique():
            member = cluster == label
            beyond = (values[member] > high + window[member]) | (values[member] < low - window[member])
            if int(member.sum()) >= self.process.block_size and bool(beyond.any()):
                return True
        return False

    def _better(self) -> Tensor:
        """Return the positions of the complement's Ritz values that are better than one of the pairs found."""
        low, high = rejected_interval(self.found, self.which)
        slack = self.tolerance(self.values)
        return ((self.values > high + slack) | (self.values < low - slack)).nonzero().squeeze(1)

    def _is_complement_done(self) -> bool:
        better = self._better()
        if len(better):
            return bool((self.residuals[better] <= self.tolerance(self.values[better])).all())
        low, high = rejected_interval(self.found, self.which)
        values, residuals, slack = self.values, self.residuals, self.tolerance(self.values)
        bottom, top = float(values[0] - residuals[0]), float(values[-1] + residuals[-1])
        return (bool(residuals[-1] <= slack[-1]) or self._deep(top, bottom, high)) and (
            bool(residuals[0] <= slack[0]) or self._deep(-bottom, -top, -low)
        )

    def _deep(self, top: float, bottom: float, high: float) -> bool:
        """Return whether the fresh space would show an eigenvalue at ``high`` next to a spectrum below ``top``."""
        if high == math.inf:
            return True
        if top >= high or top <= bottom:
            return False
        process = self.process
        share = 1e-3 ** (1 / process.block_size) / math.sqrt(process.n)
        top, bottom, high = (process.krylov_value(value) for value in (top, bottom, high))
        gamma = 1 + 2 * (high - top) / (top - bottom)
        return (process.degree - 1) * math.acosh(gamma) >= math.acosh(1 / share)


def basis_columns(
    n: int, size: int, k: int, block_size: int, least_block: int, memory_budget: int | None
) -> tuple[int, int, bool]:
    """Return the columns of a basis, a block size that fits them, and whether the budget reduced them.

    There are at most n columns of ``size`` bytes each; the block may shrink to ``least_block``.

    Raises:
        ValueError: the budget is too small for the least number of columns.
    """
    # Up to 512 columns or 64 MiB are taken freely: more room means fewer products.
    usual = min(n, max(2 * k + 10 * block_size, min(512, 2**26 // size)))
    for b in (block_size, least_block):
        within = n if memory_budget is None else max(0, min(n, memory_budget // size - BLOCK_VECTORS * b))
        if within >= min(n, k + 2 * b):
            return min(usual, within), b, within < usual
    needed = size * (min(n, k + 2 * least_block) + BLOCK_VECTORS * least_block)
    raise ValueError(f"memory_budget={memory_budget} bytes are too few: k={k} needs at least {needed}.")


def verdicts(
    residuals: Tensor, sizes: Tensor, rtol: float | None, norm_A: float, eps: float, reason: Reason
) -> tuple[Reason, ...]:
    """Return a reason for each true residual, given the sizes that it is relative to and how the search ended."""
    noise = 20 * eps * norm_A  # the best that the dtype allows
    usual = torch.maximum(RTOL * sizes, (math.sqrt(eps) * sizes).clamp_max(noise))
    aims = usual if rtol is None else rtol * sizes
    unmet = Reason.STAGNATION if reason in (Reason.CONVERGED, Reason.UNVERIFIED) else reason
    reasons = []
    for residual, aim in zip(residuals.tolist(), aims.tolist()):
        if not math.isfinite(residual):
            reasons.append(Reason.NON_FINITE)
        elif residual > max(aim, noise):
            reasons.append(unmet)
        elif reason is not Reason.CONVERGED:
            reasons.append(Reason.UNVERIFIED)
        else:
            reasons.append(Reason.CONVERGED if residual <= aim else Reason.PRECISION_LIMIT)
    return tuple(reasons)


def within_zeros(block: Tensor, rows: int, columns: int, first: int = 0) -> Tensor:
    """Return zeros with the block in their first rows, from a column on (torch 2.7 cannot pad an empty matrix)."""
    whole = block.new_zeros(rows, columns)
    whole[: block.shape[0], first : first + block.shape[1]] = block
    return whole


class CountedProduct:
    """A product with blocks that counts the vectors it multiplies."""

    failure: Reason | None = None

    def __init__(self, multiply: Callable[[Vectors], Vectors]) -> None:
        self.multiply, self.matvecs = multiply, 0

    def __call__(self, V: Vectors) -> Vectors:
        """Multiply a block."""
        self.matvecs += V.shape[1]
        return self.multiply(V)


class Projection(ABC):
    """A projection T of A on a space that grows by blocks, with the pending block P to be multiplied next.

    The residual of a Ritz pair is P C y. All are in units of ``scale``; the small matrices T and C are on the CPU. The
    first ``locked`` columns of the basis are settled: everything is orthogonal to them, and T and C do not contain
    them. Random directions replace dropped ones, so that the search continues past an invariant subspace and finds
    each copy of a multiple eigenvalue.
    """

    maps: ClassVar[int] = 1
    """The number of products with each column, in a step."""
    STATE: ClassVar[tuple[str, ...]] = ("pending", "T", "C", "Y", "locked", "degree", "scale", "size", "failed")

    def __init__(
        self, multiply: CountedProduct, start: Float[Vectors, "n b"], capacity: int, generator: torch.Generator | None
    ) -> None:
        self.multiply = multiply
        self.n, self.block_size = start.shape
        self.eps = torch.finfo(start.dtype).eps
        self.basis = Basis(start, min(capacity, self.n), generator)
        self.locked = self.degree = 0
        self.scale, self.size = 1.0, 0.0
        self.failed = False
        self.T = self.C = self.Y = torch.zeros(0, 0, dtype=torch.float64)
        longest = float(vec.norm(start).amax())
        _, independent, _ = self.basis.expand(vec.as_block(start), ROUNDINGS * self.eps * longest)
        self.pending = self.basis.fresh(self.block_size, independent)
        self.C = torch.zeros(self.pending_columns, 0, dtype=torch.float64)

    def state(self) -> dict[str, Any]:
        """Return the state from which a run continues, without the source of random directions."""
        return state_of(self, self.STATE) | state_of(self.multiply, COUNTED) | {"basis": self.basis.columns}

    def recall(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        restore(self, self.STATE, state)
        restore(self.multiply, COUNTED, state)
        self.basis.width = 0
        self.basis.append(state["basis"])

    @abstractmethod
    def step(self) -> None:
        """Multiply the pending block and project; ``failed`` is set if a product contained NaN or Inf."""

    @abstractmethod
    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return the values, ascending, and the residual norm of each, in units of ``scale``."""

    @abstractmethod
    def restart(self, positions: Tensor) -> None:
        """Continue from these Ritz vectors, numbered as in the last ``ritz``, and the pending block."""

    @abstractmethod
    def _rotate(self, old: Tensor, wanted: Tensor) -> None:
        """Keep some locked columns and some Ritz vectors as the basis."""

    def lock(self, old: Tensor, wanted: Tensor) -> None:
        """Lock some of the locked columns and some Ritz vectors; drop the rest of the basis and the pending block."""
        self._rotate(old, wanted)
        self.locked = self.basis.width
        self.T = self.C = torch.zeros(0, 0, dtype=torch.float64)
        self.pending = vec.part(self.pending, 0, 0)
        self.degree = 0

    def refill(self, width: int) -> None:
        """Add random directions to the pending ones, up to ``width``."""
        self.pending = self.basis.fresh(width, self.pending)
        self.C = within_zeros(self.C, self.pending_columns, self.C.shape[1])

    @property
    def width(self) -> int:
        """The dimension of the search space."""
        return len(self.T)

    @property
    def pending_columns(self) -> int:
        """The number of columns to be multiplied next."""
        return self.pending.shape[1]

    @property
    def matvecs(self) -> int:
        """The number of products spent, of one vector each."""
        return self.multiply.matvecs

    @property
    def complete(self) -> bool:
        """Whether nothing is left to multiply: the basis spans the whole space, or an invariant part of it."""
        return not self.pending_columns

    @property
    def noise(self) -> float:
        """The part of a residual that is rounding, in units of ``scale``."""
        return self.eps * self.size

    @property
    def settled(self) -> Float[Vectors, "n k"]:
        """The locked columns."""
        return vec.part(self.basis.store, 0, self.locked)

    def krylov_value(self, value: float) -> float:
        """Return a value's eigenvalue in the operator whose powers make the Krylov space (a bound may be negative)."""
        return value

    def _in_units(self, W: Vectors) -> Vectors:
        """Return a copy of a product in units of ``scale``, which the first non-zero product sets."""
        W = vec.as_block(W)
        image = float(vec.norm(W).amax())
        if not math.isfinite(image):
            self.failed = True
            return W
        if self.size == 0 and image > 0:
            self.scale = 2.0 ** round(math.log2(image))  # a power of two, so that dividing by it is exact
        self.size = max(self.size, image / self.scale)
        W /= self.scale
        return W

    def _advance(self, R: Tensor) -> None:
        """Store the residual's coefficients on the new pending block."""
        self.C = within_zeros(R, len(R), self.width, self.width - R.shape[1])
        self.degree += 1
        self.refill(self.block_size)


class Basis:
    """An orthonormal basis in one piece of memory, n × capacity, of which ``width`` columns are in use."""

    def __init__(self, like: Float[Vectors, "n k"], capacity: int, generator: torch.Generator | None) -> None:
        self.n = like.shape[0]
        self.store = vec.empty_block(like, capacity)
        self.width = 0
        self.generator = generator

    @property
    def columns(self) -> Float[Vectors, "n m"]:
        """The columns in use, sharing memory."""
        return vec.part(self.store, 0, self.width)

    def append(self, V: Float[Vectors, "n b"]) -> None:
        """Add orthonormal columns that are orthogonal to those in use."""
        vec.put(self.store, self.width, V)
        self.width += V.shape[1]

    def rotate(self, old: Tensor, Y: Float[Tensor, "m k"]) -> None:
        """Replace the basis by its columns ``old`` and its last m times Y (on the CPU), which is orthonormal."""
        C = torch.zeros(self.width, len(old) + Y.shape[1], dtype=torch.float64)
        C[old, torch.arange(len(old))] = 1.0
        C[self.width - len(Y) :, len(old) :] = Y
        vec.rotate(self.columns, C)
        self.width = C.shape[1]

    def expand(
        self, W: Float[Vectors, "n b"], floor: float
    ) -> tuple[Float[Tensor, "m b"], Float[Vectors, "n r"], Float[Tensor, "r b"]]:
        """Return H, V, R with W = Q H + V R, V orthonormal and orthogonal to Q; W is overwritten.

        H and R are on the CPU. Directions of W − Q H of size at most ``floor`` are dropped, so that r ≤ b. Cost: 8 n
        m b operations.
        """
        Q = self.columns
        H = vec.gram(Q, W)
        V = vec.axpy(W, Q, -H)
        R = torch.eye(V.shape[1], dtype=torch.float64)
        H = H.cpu()
        for turn in range(4):
            V, R, share = _trim(V, R, floor, self.n - self.width)
            if not V.shape[1] or (turn and share > 0.7):  # orthogonal once a pass leaves this share
                break
            again = vec.gram(Q, V)
            V = vec.axpy(V, Q, -again)
            H += again.cpu() @ R
        return H, V, R

    def fresh(self, width: int, beside: Float[Vectors, "n r"]) -> Float[Vectors, "n b"]:
        """Add random directions to ``beside``, orthogonal to it and to the basis, up to ``width`` columns or all."""
        missing = min(width, self.n - self.width) - beside.shape[1]
        if missing <= 0:
            return beside
        drawn = vec.random_block(beside, missing, "gaussian", self.generator)
        for _ in range(2):
            drawn = vec.axpy(drawn, self.columns, -vec.gram(self.columns, drawn))
            drawn, _ = vec.tall_qr(vec.axpy(drawn, beside, -vec.gram(beside, drawn)))
        return vec.join(beside, drawn)


def _trim(V: Vectors, R: Tensor, floor: float, most: int) -> tuple[Vectors, Tensor, float]:
    """Return V's orthonormal basis without directions of V R up to ``floor``, its R, and V's least singular value."""
    Q, S = vec.tall_qr(V)
    S = S.cpu()
    share = float(torch.linalg.svdvals(S)[-1]) if S.numel() else 0.0
    total = S @ R
    U, sizes, Wt = torch.linalg.svd(total, full_matrices=False)
    rank = min(int((sizes > floor).sum()), most)
    if rank == len(sizes):
        return Q, total, share
    return vec.combine(Q, U[:, :rank].to(Q.device)), sizes[:rank, None] * Wt[:rank], share
