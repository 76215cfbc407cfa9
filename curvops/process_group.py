"""The processes of a `torch.distributed` group, each with a shard of the data, and sums and rows over all of them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from curvops.errors import NoProcessGroupWarning, RankFailedError, RanksDifferError, warn
from curvops.fingerprints import fingerprint
from curvops.rank_failures import TIMEOUT_VARIABLE, WatchedGroup

R = TypeVar("R")
IN_PLACE = 2**20
"""Size in bytes from which a sum is made in its own memory, and its check is a separate message."""
HASHES = 251
"""A prime: numbers below it distinguish vectors, and their squares are exact in single precision for 256 ranks."""


def warn_without_group() -> None:
    """Warn, once per process, if torch.distributed runs several processes and no group was given."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not _warned:
        _warned.append(True)
        warn(
            f"torch.distributed runs {dist.get_world_size()} processes, but linearize was given no process_group: it "
            "linearises this process's data alone.",
            NoProcessGroupWarning,
        )


_warned: list[bool] = []


class Ranks(WatchedGroup):
    """The ranks of a process group that share one linearisation, this one among them.

    All ranks make the same calls in the same order, with equal arguments and equal seeds; each holds a shard of the
    data. Sums and concatenations over the data are equal on all ranks, to the bit, so that all ranks take the same
    decisions. If a rank raises, ends or hangs, the others raise a `RankFailedError` that names it.

    Args:
        group: a process group of torch.distributed, with a backend for the tensors' device (gloo, nccl).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"curvops {self._begun_together()}", self._store
        )

    def _begun_together(self) -> int:
        """Return one time for all ranks; raise RanksDifferError if they wait for different times."""
        times, timeouts = zip(*self._gather_now((time.time_ns(), self.timeout)))
        for rank, timeout in enumerate(timeouts):
            if timeout != timeouts[0]:
                raise RanksDifferError(
                    f"{TIMEOUT_VARIABLE} gives {timeouts[0]:g} s on rank 0, but {timeout:g} s on rank {rank} (this is "
                    f"{self.names}): set it to the same on all ranks."
                )
        found: int = times[0]
        return found

    def require_ranks_of(self, other: Ranks) -> None:
        """Raise ValueError unless another group has the same processes in the same order."""
        ours, theirs = (dist.get_process_group_ranks(each.group) for each in (self, other))
        if ours != theirs:
            raise ValueError(
                f"the data are shared among the processes {ours}, but the vectors among {theirs}: use the process "
                "group of the vectors' mesh for the data, co.linearize(..., process_group=mesh.get_group())."
            )

    def add_up(self, part: Tensor, told: Tensor | None = None) -> Tensor:
        """Return the sum of the parts of all ranks.

        `told` is a tensor that must be equal on all ranks, such as the vectors of a product. A few bits of it travel
        with the part, and reveal ranks with different seeds or arguments.

        Costs one all-reduce, of two more numbers than the part has. A part of a megabyte or more becomes the sum
        itself, so that nothing is copied; the two numbers, computed meanwhile, are then a separate message.
        """
        if torch.is_grad_enabled() and part.requires_grad:
            total: Tensor = _AllReduce.apply(part, self)  # type: ignore[no-untyped-call]
            return total
        return self._reduced(part.detach(), told, _is_apart(part, told))

    def line_up(self, part: Tensor, dim: int = 0, told: Tensor | None = None) -> Tensor:
        """Concatenate the parts of all ranks, whose sizes may differ in this dimension. Two collective calls.

        `told` is as in `add_up`.
        """
        if torch.is_grad_enabled() and part.requires_grad:
            rows: Tensor = _LineUp.apply(part, self, dim)  # type: ignore[no-untyped-call]
            return rows
        return self.line_up_counted(part, dim, told)[0]

    def line_up_counted(self, part: Tensor, dim: int = 0, told: Tensor | None = None) -> tuple[Tensor, list[int]]:
        """Return the rows of all ranks, without a gradient, and the number of rows of each."""
        if part.dtype == torch.bool:
            whole, counts = self.line_up_counted(part.to(torch.uint8), dim, told)
            return whole.bool(), counts
        moved = part.detach().movedim(dim, 0).contiguous()
        lengths = moved.new_zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(moved)
        counts = self._reduced(lengths, told).tolist()
        padded = moved.new_zeros(max(counts), *moved.shape[1:])
        padded[: len(moved)] = moved
        found = zip(self._gathered(padded), counts)
        return torch.cat([rows[:count] for rows, count in found]).movedim(0, dim), counts

    def _gathered(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape. One all-gather."""
        found = [torch.empty_like(part) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(found, part, group=self.group, async_op=True), part)
        return found

    def broadcast(self, part: Tensor, rank: int) -> Tensor:
        """Return the tensor of one rank; the others pass a tensor of the same shape, which is overwritten."""
        if self.size > 1:
            source, part = dist.get_global_rank(self.group, rank), part.contiguous()
            self._wait(lambda: dist.broadcast(part, source, group=self.group, async_op=True), part)
        return part

    def add_up_apart(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum over the ranks of the parts (K, n_r) addressed to this one. One all-to-all.

        Each rank gives one part to each rank; n_r may be zero.
        """
        if self.size == 1:
            return parts[0]
        # An all-to-all and a sum: gloo's own reduce-scatter does not report when it is done.
        sent, own = torch.cat([part.flatten() for part in parts]), parts[self.rank]
        found = sent.new_empty(self.size, *own.shape)
        sizes, flat, group = [part.numel() for part in parts], found.view(-1), self.group
        wanted = [own.numel()] * self.size
        self._wait(lambda: dist.all_to_all_single(flat, sent, wanted, sizes, group, async_op=True), sent)
        return found.sum(0)

    def gather_rows(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows (n, K) of all ranks, `counts` on each. One all-gather; columns are contiguous."""
        if self.size == 1:
            return part
        padded = part.new_zeros(part.shape[1], max(counts))
        padded[:, : len(part)] = part.mT
        return torch.cat([rows[:, :count] for rows, count in zip(self._gathered(padded), counts)], 1).mT

    def scatter_rows(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum over ranks of a block (n, K), `counts` rows on each. One all-to-all."""
        return self.add_up_apart(part.mT.split(list(counts), 1)).mT

    def move_rows(self, part: Tensor, counts: Sequence[int], to: Sequence[int]) -> Tensor:
        """Move the rows of a block (n, K), `counts` on each rank, so that each has `to`; return this rank's.

        Costs one all-to-all, of the rows that change ranks.
        """
        held, asked, K = [0, *accumulate(counts)], [0, *accumulate(to)], part.shape[1]

        def crossing(holder: int, asker: int) -> slice:
            start = max(held[holder], asked[asker])
            return slice(start - held[holder], max(start, min(held[holder + 1], asked[asker + 1])) - held[holder])

        ranks = range(self.size)
        given = [part[crossing(self.rank, other)].mT.flatten() for other in ranks]
        kept, given[self.rank] = given[self.rank], part.new_empty(0)
        slices = [crossing(other, self.rank) for other in ranks]
        sizes = [0 if r == self.rank else K * (rows.stop - rows.start) for r, rows in zip(ranks, slices)]
        sent, found, group = torch.cat(given), part.new_empty(sum(sizes)), self.group
        lengths = [len(rows) for rows in given]
        self._wait(lambda: dist.all_to_all_single(found, sent, sizes, lengths, group, async_op=True), sent)
        parts = list(found.split(sizes))
        parts[self.rank] = kept
        return torch.cat([rows.view(K, len(rows) // max(1, K)) for rows in parts], 1).mT

    def replicate(self, tensor: Tensor) -> Tensor:
        """Return the tensor; its gradient is the sum over ranks of the gradients of each rank's own terms."""
        if torch.is_grad_enabled() and tensor.requires_grad:
            copied: Tensor = _Replicated.apply(tensor, self)  # type: ignore[no-untyped-call]
            return copied
        return tensor

    def from_first(self, work: Callable[[], R]) -> R:
        """Return the result of the first rank's `work` (plain values and tensors), or raise its error, on all ranks."""
        if self.size == 1:
            return work()
        answer: tuple[Any, Exception | None] = None, None
        if self.rank == 0:
            try:
                answer = work(), None
            except RankFailedError:
                raise
            except Exception as error:
                answer = None, error
        data = pickle.dumps(answer) if self.rank == 0 else b""
        length = self._reduced(torch.tensor([len(data)], device=self._device))
        buffer = torch.frombuffer(bytearray(data or int(length)), dtype=torch.uint8).to(self._device)
        buffer = self.broadcast(buffer, 0)
        value, problem = answer if self.rank == 0 else pickle.loads(buffer.cpu().numpy().tobytes())
        if problem is not None:
            raise problem
        found: R = value
        return found

    def gather(self, value: R) -> list[R]:
        """Return a plain value from each rank, in the order of the ranks."""
        with self.guarded():
            return self._gather_now(value)

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """Raise RanksDifferError, on all ranks, if a fact differs between ranks."""
        everywhere = self.gather(facts)
        for name in facts:
            values = [each[name] for each in everywhere]
            if any(value != values[0] for value in values):
                rank = next(i for i, value in enumerate(values) if value != values[0])
                raise RanksDifferError(
                    f"{name}: {values[0]} on rank 0, but {values[rank]} on rank {rank} (this is {self.names}). "
                    "Give all ranks the same arguments, except for their shards of the data."
                )

    def __reduce__(self) -> Any:
        raise TypeError("a linearisation over a process group cannot be pickled or copied: linearise on each rank.")

    def _reduced(self, part: Tensor, told: Tensor | None = None, owned: bool = False) -> Tensor:
        """Return the sum over ranks; columns of a block stay contiguous. A large owned part is overwritten by it."""
        if self.size == 1:
            return part
        by_columns = part.ndim == 2 and part.mT.is_contiguous()
        dense = part.mT if by_columns else part.contiguous()
        exact = dense.dtype.itemsize >= 4 if dense.is_floating_point() else dense.dtype == torch.int64
        checked = told if exact else None
        if owned and dense.nbytes >= IN_PLACE:
            total, check = dense, dense.new_zeros(2)
            self._add_up_with_hash(dense, check, checked)
        else:
            buffer = dense.new_empty(dense.numel() + 2)
            total, check = buffer[:-2].view(dense.shape).copy_(dense), buffer[-2:]
            _write_hash(check, checked)
            self._add_up_over_ranks(buffer)
        if checked is not None and not bool(check[1] * self.size == check[0] ** 2):
            raise RanksDifferError(
                f"the vectors of a product differ between the ranks (seen by {self.names}): give all ranks equal "
                "arguments and generators of equal seeds (without a generator torch's own is used: call "
                "torch.manual_seed(seed) on each rank), and use the same number of threads on processors of one kind."
            )
        return total.mT if by_columns else total

    def _add_up_over_ranks(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over ranks."""
        self._wait(lambda: dist.all_reduce(tensor, group=self.group, async_op=True), tensor)

    def _add_up_with_hash(self, tensor: Tensor, check: Tensor, told: Tensor | None) -> None:
        """Replace a tensor by its sum over ranks, and `check` by that of the hashes, if there is something to check.

        The hash is computed while the first message is under way. The rank waits for both together: on a busy processor
        each wait may cost a time slice.
        """
        if told is None:
            return self._add_up_over_ranks(tensor)

        def begin() -> list[Any]:
            first = dist.all_reduce(tensor, group=self.group, async_op=True)
            _write_hash(check, told)
            return [first, dist.all_reduce(check, group=self.group, async_op=True)]

        self._wait(begin, tensor, check)
        return None

    def _gather_now(self, value: R) -> list[R]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device)
        whole, counts = self.line_up_counted(data)
        return [pickle.loads(part.numpy().tobytes()) for part in whole.cpu().split(counts)]

    @cached_property
    def _device(self) -> torch.device:
        """The device of messages: the backend of a GPU accepts only that GPU's tensors."""
        return torch.device("cuda" if "nccl" in dist.get_backend(self.group) else "cpu")


class _AllReduce(Function):
    """The sum over ranks. Every rank has the same loss of the sum, so each part's gradient is the sum's own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        return ranks._reduced(part.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _LineUp(Function):
    """The rows of all ranks; each rank gets the gradient of its own rows."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, dim: int) -> Tensor:
        whole, counts = ranks.line_up_counted(part.detach(), dim)
        ctx.own = dim, sum(counts[: ranks.rank]), counts[ranks.rank]
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(*ctx.own), None, None


class _Replicated(Function):
    """The identity; its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks._reduced(gradient.detach()), None


def _write_hash(check: Tensor, told: Tensor | None) -> None:
    """Write a small whole number that differs for most different tensors, and its square; zeros for None."""
    hashed = 0.0 if told is None else float(int(fingerprint([told.detach()])) % HASHES)
    check[0], check[1] = hashed, hashed**2


def _is_apart(part: Tensor, told: Tensor | None) -> bool:
    """Return whether a part fills its memory, and shares none with the `told` tensor."""
    memory = part.untyped_storage()
    return memory.nbytes() == part.nbytes and (told is None or told.untyped_storage().data_ptr() != memory.data_ptr())
