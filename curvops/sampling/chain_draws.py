"""Draws of chains, in the form that a run returns and in the form that users pass.

Users pass named tensors with leading dimensions (chain, draw), or one such tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float, Float64
from torch import Tensor

from curvops.argument_types import SamplingMethod
from curvops.checks import check_kind
from curvops.ranks.spread_chains import Spread
from curvops.sampling.state import State, Structure
from curvops.summary import Summarised

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
        TypeError: the draws are not floating-point tensors.
        ValueError: tensors have different numbers of chains or draws, or too few of them, or draws are not finite.
    """
    if isinstance(draws, Chain) and draws.spread is not None:
        raise ValueError(f"{name} hold the chains of this rank alone: run chains(..., gather=True).")
    draws = getattr(draws, "params", draws)  # of the chain that a run returns
    tensors = {UNNAMED: draws} if isinstance(draws, Tensor) else draws
    check_kind(name, tensors, Mapping, "{name: tensor (chain, draw, ...)} or one such tensor")
    if not tensors:
        raise ValueError(f"{name} hold no parameter; pass at least one tensor.")
    for key, tensor in tensors.items():
        _check(f"{name}[{key!r}]" if tensors is draws else name, tensor)
    sizes = {tensor.shape[:2] for tensor in tensors.values()}
    if len(sizes) > 1:
        raise ValueError(f"{name} have unequal numbers of chains and draws: {sorted(map(tuple, sizes))}.")
    ((k, n),) = sizes
    if k < chains or n < least:
        raise ValueError(
            f"{name} are (chains, draws) = ({k}, {n}); this needs {chains} or more chains, of {least} or more draws. "
            "(Pass a single chain without a dimension for chains as tensor.unsqueeze(0).)"
        )
    return dict(tensors)


def _check(name: str, tensor: Any) -> None:
    """Raise TypeError or ValueError unless this is a tensor (chain, draw, ...) of finite floating-point numbers."""
    check_kind(name, tensor, Tensor, "a tensor (chain, draw, ...)")
    if tensor.ndim < 2 or 0 in tensor.shape:
        raise ValueError(f"{name} must have leading dimensions (chain, draw) and an entry, got {tuple(tensor.shape)}.")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} holds {tensor.dtype}; draws of weights are floating-point numbers.")
    if not bool(tensor.isfinite().all()):
        bad = int((~tensor.isfinite()).flatten(2).any(2).sum()) if tensor.ndim > 2 else int((~tensor.isfinite()).sum())
        raise ValueError(f"{name} holds NaN or Inf in {bad} draws: the chain diverged; use a smaller step size.")
