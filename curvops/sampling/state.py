"""The state of a sampler after a step, what the step tells, and the draws of a run of chains.

A state holds a tree of parameters as one vector, with the sources of noise of its chains. Users pass draws as a run
returns them, as named tensors with leading dimensions (chain, draw), or as one such tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Float64, Int, UInt8
from linear_operator import LinearOperator
from torch import Tensor
from torch.utils import _pytree as pytree

from curvops.argument_types import SamplingMethod
from curvops.checks import check_kind, check_like, refuse
from curvops.network.model.parameters import FlatLayout
from curvops.ranks.process_group import Spread
from curvops.summary import Summarised


@dataclass(frozen=True, eq=False)
class Structure(FlatLayout):
    """The layout of a tree of tensors in one vector (d,), with the tree's structure (`spec`)."""

    spec: Any

    def unflatten(self, vector: Float[Tensor, "*k d"]) -> Any:
        """Return the user's tree (a mapping by name, a tuple, one tensor, …), whose tensors are views of a vector."""
        return pytree.tree_unflatten(self.parts(vector), self.spec)


def flatten(trees: list[Any]) -> tuple[Float[Tensor, "k d"], Structure]:
    """Copy trees of parameters into vectors, one for each; return them and their layout.

    Raises:
        TypeError: a leaf is not a real floating-point tensor, or is in half precision.
        ValueError: tensors differ in dtype or device, or hold NaN or Inf; or the trees differ in their tensors.
    """
    rows, structures = [], []
    for tree in trees:
        paths_and_leaves, spec = pytree.tree_flatten_with_path(tree)
        leaves = {f"params{pytree.keystr(path)}": leaf for path, leaf in paths_and_leaves}
        first_name, first = next(iter(leaves.items()))
        for name, leaf in leaves.items():
            check_kind(
                name, leaf, Tensor, "a tensor: params are a tree of tensors, such as dict(model.named_parameters())"
            )
            if not leaf.is_floating_point() or torch.finfo(leaf.dtype).bits < 32:
                raise TypeError(f"{name} is {leaf.dtype}: steps need float32 or float64. Convert it, or leave it out.")
            check_like(name, leaf, first, first_name)
            refuse(not leaf.isfinite().all(), f"{name} holds NaN or Inf.")
        structures.append(Structure(tuple(leaves), tuple(leaf.shape for leaf in leaves.values()), spec))
        rows.append(structures[-1].concatenate([leaf.detach() for leaf in leaves.values()]))
    if any((other.names, other.shapes) != (structures[0].names, structures[0].shapes) for other in structures):
        raise ValueError("the starts differ in the names or shapes of their tensors: all chains need the same.")
    return torch.stack(rows), structures[0]


def long_dot(a: Float[Tensor, "*k d"], b: Float[Tensor, "*k d"]) -> Float64[Tensor, "*k"]:
    """Return Σ a b along the last dimension, summed in float64."""
    return (a * b).sum(-1, dtype=torch.float64)


def identity(size: int, like: Tensor) -> Float[Tensor, "n n"]:
    """Return the identity matrix in the dtype of another tensor."""
    return torch.eye(size, dtype=like.dtype, device=like.device)


def times_rows(A: LinearOperator, rows: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
    """Return A v for one vector, or for each of k."""
    product: Tensor = A._matmul(torch.atleast_2d(rows).mT)
    return product.mT.reshape(rows.shape)


AnyState = TypeVar("AnyState", bound="State")


@dataclass(frozen=True, eq=False, repr=False)
class State(Summarised):
    """The state of one chain, or of k chains; two states share no tensor, unless a step was made in place.

    theta: the parameters as one vector, (d,) or (k, d). step: the number of updates so far, on the CPU. random: the
    state of the generator of each chain's noise.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> state = co.sampling.sgld(density, 1e-3).init(density.params, torch.Generator().manual_seed(0))
        >>> state.theta.shape, list(state.params)
        (torch.Size([17]), ['0.weight', '0.bias', '2.weight', '2.bias'])
    """

    theta: Float[Tensor, "*k d"]
    step: Int[Tensor, ""]
    random: UInt8[Tensor, "*k bytes"] = field(repr=False)
    structure: Structure = field(repr=False)

    @property
    def params(self) -> Any:
        """The parameters as the tree that `init` received, as views of `theta`, with the dimension of chains first."""
        return self.structure.unflatten(self.theta)

    def clone(self: AnyState) -> AnyState:
        """Return a copy in new memory."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = value.clone()
            elif isinstance(value, dict):
                changed[name] = pytree.tree_map_only(Tensor, torch.clone, value)
            elif isinstance(value, list):
                changed[name] = list(value)
        return replace(self, **changed)


@dataclass(frozen=True, eq=False, repr=False)
class MomentumState(State):
    """The state of a sampler with momenta m, a vector like `theta`.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> state = co.sampling.sghmc(density, 1e-3).init(density.params, torch.Generator().manual_seed(0))
        >>> state.momentum.shape
        torch.Size([17])
    """

    momentum: Float[Tensor, "*k d"]

    @property
    def momenta(self) -> Any:
        """The momenta as a tree like the parameters."""
        return self.structure.unflatten(self.momentum)


@dataclass(frozen=True, eq=False, repr=False)
class Info(Summarised):
    """Information about one step: tensors 0-d, or (k,) for chains, on the parameters' device.

    log_posterior: the value of `log_posterior` for this batch at the start of the step, for Metropolis samplers at its
    end. acceptance: the probability of accepting the proposal. energy_error: H(proposal) − H(start); the acceptance
    is the exponential of its negative, at most 1. Both are None for samplers that accept every step.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.hmc(density, 0.01)
        >>> state, info = sampler.update(sampler.init(density.params, torch.Generator().manual_seed(0)), (x, y))
        >>> 0 <= float(info.acceptance) <= 1
        True
    """

    log_posterior: Float[Tensor, "*k"]
    acceptance: Float[Tensor, "*k"] | None = None
    energy_error: Float[Tensor, "*k"] | None = None


def generator_states(
    generator: torch.Generator | None, device: torch.device, chains: int | None
) -> UInt8[Tensor, "*k bytes"]:
    """Return the states of new generators, seeded by draws from `generator` or from torch's default generator."""
    on = "cpu" if generator is None else generator.device
    seeds = torch.randint(2**62, (1 if chains is None else chains,), generator=generator, device=on)
    states = [torch.Generator(device).manual_seed(seed).get_state() for seed in seeds.tolist()]
    return states[0] if chains is None else torch.stack(states)


class NoiseSource:
    """Random numbers for each chain from its own generator, so that k chains draw the same numbers as k single ones.

    `keep` writes the advanced states back into `states` (*k, bytes), in place.
    """

    def __init__(self, states: UInt8[Tensor, "*k bytes"], device: torch.device) -> None:
        self._single = states.ndim == 1
        self._states = states.unsqueeze(0) if self._single else states
        self._generators = []
        for state in self._states:
            self._generators.append(torch.Generator(device))
            self._generators[-1].set_state(state.clone())  # a view of several states would crash torch

    def normal(self, like: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """Draw standard normal numbers in the shape of `like`."""
        numbers = torch.empty_like(like)
        for row, generator in zip(numbers.unsqueeze(0) if self._single else numbers, self._generators):
            row.normal_(generator=generator)
        return numbers

    def per_chain(self, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        """Return the results of `draw` with the generator of each chain, stacked."""
        numbers = [draw(generator) for generator in self._generators]
        return numbers[0] if self._single else torch.stack(numbers)

    def uniform(self, like: Float[Tensor, "*k d"]) -> Float[Tensor, "*k"]:
        """Draw one number in [0, 1) for each chain, in float64."""
        return self.per_chain(lambda g: torch.rand((), generator=g, dtype=torch.float64, device=like.device))

    def keep(self) -> None:
        """Write the generators' states back."""
        for generator, state in zip(self._generators, self._states):
            state.copy_(generator.get_state())


UNNAMED = "x"
"""The name of a single tensor that is passed without one."""


@dataclass(frozen=True, eq=False, repr=False)
class Chain(Summarised):
    """The result of a run: k chains of S draws, on the parameters' device; a sampler of one chain has k = 1.

    theta: the draws as vectors, (k, S, d). log_posterior, and for Metropolis samplers acceptance and energy_error: the
    traces (k, steps) of the steps after warm-up, see `Info`. thin: the number of steps between two draws. state: the
    last state, from which a further run continues. sampler: the sampler that made the draws, with the step size from
    the warm-up. If the ranks of a process group share the chains, draws and traces are those of all chains (unless
    `gather=False`), and the state is that of this rank's own.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> chain = co.sampling.run(co.sampling.sgld(density, 1e-3), density.params, [(x, y)], steps=20)
        >>> chain.theta.shape, chain.log_posterior.shape
        (torch.Size([1, 20, 17]), torch.Size([1, 20]))
    """

    theta: Float[Tensor, "k S d"]
    log_posterior: Float64[Tensor, "k steps"]
    acceptance: Float64[Tensor, "k steps"] | None
    energy_error: Float64[Tensor, "k steps"] | None
    thin: int
    state: State = field(repr=False)
    sampler: SamplingMethod
    spread: Spread | None = field(default=None, repr=False)
    """The position of these chains among those of other ranks, if they are this rank's alone."""

    @property
    def structure(self) -> Structure:
        """The layout of the parameters in the vectors of `theta`."""
        return self.state.structure

    @property
    def params(self) -> Any:
        """The draws as a tree like the parameters, with tensors (k, S, *shape) that are views of `theta`."""
        return self.structure.unflatten(self.theta)

    def gathered(self, spread: Spread) -> Chain:
        """Return the chains of all ranks."""
        traces = {name: getattr(self, name) for name in ("theta", "log_posterior", "acceptance", "energy_error")}
        lined_up: dict[str, Any] = {name: spread.line_up(rows) for name, rows in traces.items() if rows is not None}
        return replace(self, **lined_up)


def checked_draws(draws: Any, name: str = "draws", chains: int = 1, least: int = 1) -> dict[str, Tensor]:
    """Return the draws by name, (chain, draw, *shape), after checking them.

    They must be finite, and have at least `chains` chains of `least` draws.

    Raises:
        TypeError: the draws are not tensors.
        ValueError: tensors have different numbers of chains or draws, or too few of them, or draws are not finite.
    """
    if isinstance(draws, Chain) and draws.spread is not None:
        raise ValueError(f"{name} hold the chains of this rank alone: run chains(..., gather=True).")
    draws = getattr(draws, "params", draws)  # of the chain that a run returns
    tensors = {UNNAMED: draws} if isinstance(draws, Tensor) else draws
    check_kind(name, tensors, Mapping, "{name: tensor (chain, draw, ...)} or one such tensor")
    for tensor in tensors.values():
        check_kind(name, tensor, Tensor, "a tensor (chain, draw, ...)")
        if tensor.ndim < 2 or 0 in tensor.shape:
            shape = tuple(tensor.shape)
            raise ValueError(f"{name} must have leading dimensions (chain, draw) and an entry, got {shape}.")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} hold NaN or Inf: the chain diverged; use a smaller step size.")
    sizes = {tensor.shape[:2] for tensor in tensors.values()}
    refuse(len(sizes) > 1, f"{name} have unequal numbers of chains and draws: {sorted(map(tuple, sizes))}.")
    ((k, n),) = sizes
    if k < chains or n < least:
        raise ValueError(
            f"{name} are (chains, draws) = ({k}, {n}); this needs {chains} or more chains, of {least} or more draws. "
            "(Pass a single chain without a dimension for chains as tensor.unsqueeze(0).)"
        )
    return dict(tensors)
