"""The processes of a `torch.distributed` group, with shards of the data or chains, and sums and rows over all of them.

Torch's tensors and modules that are shared among processes are recognised here, too.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from curvops.errors import NoProcessGroupWarning, RanksDifferError, warn

R = TypeVar("R")
FSDP = "torch.distributed.fsdp"


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


class Ranks:
    """The ranks of a process group that share one linearisation, this one among them.

    All ranks make the same calls in the same order, with equal arguments and equal seeds; each holds a shard of the
    data. Sums and concatenations over the data are equal on all ranks, to the bit, so that all ranks take the same
    decisions. If a rank fails, the others wait for it until the launcher ends them, or the group's timeout.

    Args:
        group: a process group of torch.distributed, with a backend for the tensors' device (gloo, nccl).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise TypeError(
                f"process_group must be one with this process, such as torch.distributed.group.WORLD, got {group!r}."
            )
        self.group: dist.ProcessGroup = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.messages = self.bytes_sent = 0
        """The number of collective calls made so far, and the bytes of their tensors."""

    @property
    def names(self) -> str:
        """Describe this rank and the size of the group, for messages."""
        return f"rank {self.rank} of {self.size}"

    def require_ranks_of(self, other: Ranks) -> None:
        """Raise ValueError unless another group has the same processes in the same order."""
        ours, theirs = (dist.get_process_group_ranks(ranks.group) for ranks in (self, other))
        if ours != theirs:
            raise ValueError(
                f"the data are shared among the processes {ours}, but the vectors among {theirs}: linearise with the "
                "process group of the vectors' mesh, process_group=mesh.get_group()."
            )

    def add_up(self, local_sum: Tensor) -> Tensor:
        """Return the sum of the parts of all ranks. One all-reduce."""
        if torch.is_grad_enabled() and local_sum.requires_grad:
            return _linear(local_sum, self._reduced, lambda gradient: gradient)  # each rank has the loss of the sum
        return self._reduced(local_sum.detach())

    def line_up(self, local_rows: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the parts of all ranks, whose sizes may differ in this dimension. Two collective calls."""
        if torch.is_grad_enabled() and local_rows.requires_grad:
            whole, counts = self.line_up_counted(local_rows, dim)
            start, count = sum(counts[: self.rank]), counts[self.rank]
            return _linear(local_rows, lambda _: whole, lambda gradient: gradient.narrow(dim, start, count))
        return self.line_up_counted(local_rows, dim)[0]

    def line_up_counted(self, local_rows: Tensor, dim: int = 0) -> tuple[Tensor, list[int]]:
        """Return the rows of all ranks, without a gradient, and the number of rows of each."""
        if local_rows.dtype == torch.bool:
            whole, counts = self.line_up_counted(local_rows.to(torch.uint8), dim)
            return whole.bool(), counts
        moved = local_rows.detach().movedim(dim, 0).contiguous()
        lengths = moved.new_zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(moved)
        counts = self._reduced(lengths).tolist()
        padded = moved.new_zeros(max(counts), *moved.shape[1:])
        padded[: len(moved)] = moved
        rows = zip(self._gathered(padded), counts)
        return torch.cat([rank[:count] for rank, count in rows]).movedim(0, dim), counts

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape. One all-gather."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        self._count(tensor)
        dist.all_gather(tensors, tensor, group=self.group)
        return tensors

    def broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the tensor of one rank; the others pass a tensor of the same shape, which is overwritten."""
        if self.size > 1:
            source, tensor = dist.get_global_rank(self.group, rank), tensor.contiguous()
            self._count(tensor)
            dist.broadcast(tensor, source, group=self.group)
        return tensor

    def add_up_apart(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the sum over the ranks of the blocks (K, n_r) addressed to this one. One all-to-all.

        Each rank gives one block to each rank; n_r may be zero.
        """
        if self.size == 1:
            return blocks[0]
        # An all-to-all and a sum: gloo's own reduce-scatter does not report when it is done.
        sent, own_block = torch.cat([block.flatten() for block in blocks]), blocks[self.rank]
        received = sent.new_empty(self.size, *own_block.shape)
        self._count(sent)
        sizes, lengths = [own_block.numel()] * self.size, [block.numel() for block in blocks]
        dist.all_to_all_single(received.view(-1), sent, sizes, lengths, self.group)
        return received.sum(0)

    def gather_rows(self, local_rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows (n, K) of all ranks, `counts` on each. One all-gather; columns are contiguous."""
        if self.size == 1:
            return local_rows
        padded = local_rows.new_zeros(local_rows.shape[1], max(counts))
        padded[:, : len(local_rows)] = local_rows.mT
        return torch.cat([rows[:, :count] for rows, count in zip(self._gathered(padded), counts)], 1).mT

    def scatter_rows(self, block: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum over ranks of a block (n, K), `counts` rows on each. One all-to-all."""
        return self.add_up_apart(block.mT.split(list(counts), 1)).mT

    def replicate(self, tensor: Tensor) -> Tensor:
        """Return the tensor; its gradient is the sum over ranks of the gradients of each rank's own terms."""
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _linear(tensor, lambda copied: copied.view_as(copied), self._reduced)
        return tensor

    def from_first(self, work: Callable[[], R]) -> R:
        """Return the result of the first rank's `work` (plain values and tensors), or raise its error, on all ranks."""
        if self.size == 1:
            return work()
        answers: list[Any] = [None]
        if self.rank == 0:
            try:
                answers = [(work(), None)]
            except Exception as error:
                answers = [(None, error)]
        dist.broadcast_object_list(answers, dist.get_global_rank(self.group, 0), self.group)
        value, problem = answers[0]
        if problem is not None:
            raise problem
        result: R = value
        return result

    def gather(self, value: R) -> list[R]:
        """Return a plain value from each rank, in the order of the ranks."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device)
        whole, counts = self.line_up_counted(data)
        return [pickle.loads(buffer.numpy().tobytes()) for buffer in whole.cpu().split(counts)]

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """Raise RanksDifferError, on all ranks, if a fact differs between ranks."""
        everywhere = self.gather(facts)
        for name in facts:
            values = [rank_facts[name] for rank_facts in everywhere]
            if any(value != values[0] for value in values):
                rank = next(i for i, value in enumerate(values) if value != values[0])
                raise RanksDifferError(
                    f"{name}: {values[0]} on rank 0, but {values[rank]} on rank {rank} (this is {self.names}). "
                    "Give all ranks the same arguments, except for their shards of the data."
                )

    def __reduce__(self) -> Any:
        raise TypeError("a linearisation over a process group cannot be pickled or copied: linearise on each rank.")

    def _reduced(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks; columns of a block stay contiguous."""
        if self.size == 1:
            return tensor
        by_columns = tensor.ndim == 2 and tensor.mT.is_contiguous()
        total = (tensor.mT if by_columns else tensor).clone(memory_format=torch.contiguous_format)
        self._count(total)
        dist.all_reduce(total, group=self.group)
        return total.mT if by_columns else total

    def _count(self, sent: Tensor) -> None:
        self.messages += 1
        self.bytes_sent += sent.nbytes

    @cached_property
    def _device(self) -> torch.device:
        """The device of messages: the backend of a GPU accepts only that GPU's tensors."""
        return torch.device("cuda" if "nccl" in dist.get_backend(self.group) else "cpu")


def _linear(tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a linear function of a tensor over the ranks, with its gradient by the transposed one."""
    image: Tensor = _Exchange.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return image


class _Exchange(Function):
    """A linear function and its transpose."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Any) -> Tensor:
        ctx.transposed = backward
        return forward(tensor.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(gradient.detach()), None, None


@dataclass(frozen=True, eq=False)
class Spread:
    """The chains of one rank among all: rank r of n has the chains r, r + n, r + 2n, … of `chains`."""

    ranks: Ranks
    chains: int
    gather: bool

    def __post_init__(self) -> None:
        self.ranks.require_equal({"the number of chains, and gather": (self.chains, self.gather)})
        if self.chains < self.ranks.size:
            raise ValueError(f"{self.chains} chains are fewer than the {self.ranks.size} ranks: each rank needs one.")

    @property
    def indices(self) -> slice:
        """The positions of this rank's chains among all chains."""
        return slice(self.ranks.rank, None, self.ranks.size)

    @property
    def count(self) -> int:
        """The number of this rank's chains."""
        return len(range(self.chains)[self.indices])

    def line_up(self, rows: Shaped[Tensor, "own *n"]) -> Shaped[Tensor, "k *n"]:
        """Return the rows of the chains of all ranks, in the order of the chains."""
        by_rank = self.ranks.line_up(rows)
        order = torch.cat([torch.arange(self.chains)[r :: self.ranks.size] for r in range(self.ranks.size)])
        return by_rank[order.argsort().to(by_rank.device)]

    def mean(self, values: Float[Tensor, " own"]) -> float:
        """Return the mean of one number per chain, over the chains of all ranks."""
        return float(self.ranks.add_up(values.sum())) / self.chains

    def require_apart(self, other: Ranks) -> None:
        """Raise ValueError if the ranks that share the data are those that share the chains."""
        both = set(dist.get_process_group_ranks(self.ranks.group)) & set(dist.get_process_group_ranks(other.group))
        if len(both) > 1:
            raise ValueError("the ranks of process_group share the data of log_posterior: leave process_group out.")


def _class_of(module: str, name: str) -> Any:
    """Return a class of torch; () if its module was never imported, for then nothing is of this class."""
    return getattr(sys.modules.get(module), name, ())


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    return isinstance(value, _class_of("torch.distributed.tensor", "DTensor"))


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `torch.distributed.fsdp.fully_shard` was applied to a module itself."""
    return isinstance(module, _class_of(FSDP, "FSDPModule"))


def holds_shards(model: Any) -> bool:
    """Return whether `fully_shard` was applied to a model or to a part of it."""
    return isinstance(model, nn.Module) and any(map(is_fully_sharded, model.modules()))


def even_share(length: int, ranks: int, rank: int) -> range:
    """Return the positions that `Shard` gives a rank: ⌈n/ranks⌉ each, fewer or none at the end."""
    step = -(-length // ranks)
    return range(min(length, rank * step), min(length, (rank + 1) * step))


def unsharded_class(kind: type) -> type:
    """Return the class that a module had before `fully_shard`, which derives a new one from it."""
    marked = len(kind.__bases__) == 2 and kind.__bases__[0] is _class_of(FSDP, "FSDPModule")
    return kind.__bases__[1] if marked else kind


def has_hooks(module: Any) -> bool:
    """Return whether a module has hooks of its forward pass, other than those of `fully_shard`."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if not hooks or not is_fully_sharded(module):
        return bool(hooks)
    fsdp_state = module._get_fsdp_state()
    return any(getattr(hook, "__self__", None) is not fsdp_state for hook in hooks)


def require_whole(source: Any) -> None:
    """Raise ValueError if the parameters of a model, or of a function with its own, are shared among processes."""
    named: Any = {}
    if isinstance(source, nn.Module):
        for path, module in source.named_modules():
            if isinstance(module, _class_of(FSDP, "FullyShardedDataParallel")):
                raise ValueError(
                    f"{f'the module {path!r}' if path else 'the model'} is a FullyShardedDataParallel: linearise the "
                    "module inside, on each process, with a shard of the data and process_group=."
                )
        named = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    elif isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        named = source[1]
    for name, tensor in named.items():
        if is_dtensor(tensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor: linearise a model of whole tensors (tensor.full_tensor()) on each "
                "process, with process_group=, or pass co.linearize a whole model that fully_shard has sharded."
            )
