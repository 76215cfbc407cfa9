"""Any torch optimiser under the samplers' protocol: no hidden state, functional or in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from curvops.argument_types import Density, OptimizerChoice
from curvops.sampling.state import Info, NoiseSource, State
from curvops.sampling.transition import Constant, Transition, at, common_arguments

Slots = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class OptimizerState(State):
    """The state of an optimiser, with its slots for each tensor of each chain, {chain: {tensor: {name: value}}}."""

    slots: Slots = field(repr=False)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Optimizer(Transition):
    """A torch optimiser, rebuilt in each step around the state's tensors."""

    make: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    state_type: ClassVar[type[State]] = OptimizerState

    def _initial_tensors(self, state: State, noise: NoiseSource) -> dict[str, Any]:
        return {"slots": {}}

    def with_preconditioner(self, preconditioner: Any) -> NoReturn:
        """Raise TypeError: the optimiser has its own steps."""
        raise TypeError("a torch optimiser takes no preconditioner: use sgld or sghmc at temperature 0.")

    def with_step_size(self, step_size: Any) -> Optimizer:
        """Return this optimiser with another `lr`; states stay valid."""
        return replace(self, **descent(self.make, {**self.options, "lr": step_size}))

    def step_length(self, step: int) -> tuple[str, float]:
        """Return "lr" and its value, by default the optimiser's own."""
        return "lr", float(self.step_size(step))

    def _step(self, state: OptimizerState, batch: Any, noise: NoiseSource) -> Info:
        value, g = self._gradient(state, batch)
        single = state.theta.ndim == 1
        rows = [(state.theta, g)] if single else list(zip(state.theta, g))
        for chain, (theta, gradient) in enumerate(rows):
            slopes = [slope.neg() for slope in state.structure.parts(gradient)]
            held = state.slots.setdefault(str(chain), {})
            self._descend(state.structure.parts(theta), slopes, held, int(state.step))
        return Info(value)

    def _descend(
        self, tensors: Sequence[Tensor], slopes: Sequence[Tensor], held: dict[str, dict[str, Any]], step: int
    ) -> None:
        """Take a step against these gradients, in place; `held` are the optimiser's own values for each tensor."""
        lr = self.options.get("lr")
        options = {**self.options, "lr": at("lr", lr, step)} if callable(lr) else self.options
        leaves = [tensor.detach() for tensor in tensors]
        for leaf, slope in zip(leaves, slopes):
            leaf.requires_grad_().grad = slope
        optimizer = self.make(leaves, **options)
        for i, leaf in enumerate(leaves):
            if str(i) in held:
                optimizer.state[leaf] = held[str(i)]
        optimizer.step()
        held.update({str(i): optimizer.state[leaf] for i, leaf in enumerate(leaves)})


def optimizer(
    make: OptimizerChoice, log_posterior: Density, *, data_size: int | None = None, **options: Any
) -> Optimizer:
    """Build a torch optimiser that ascends `log_posterior`, under the samplers' protocol.

    Args:
        make: the optimiser's class, such as `torch.optim.AdamW`, or another function of (tensors, **options).
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N, such as
            `co.sampling.log_posterior` returns. The optimiser's own weight decay (AdamW has one unless weight_decay=0)
            is added to the prior's.
        data_size: N, required unless log_posterior carries it; it affects no step.
        options: options of the optimiser; `lr` may be a schedule.

    Returns:
        An optimiser with `init(params, generator)` and `update(state, batch)`.

    Raises:
        TypeError, ValueError: `make` does not have these options, is an instance, or calls the model itself (LBFGS).

    Cost: a gradient and the optimiser's own step; building it again takes some 50 µs.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.optimizer(torch.optim.Adam, density, lr=1e-2)
        >>> co.sampling.run(sampler, density.params, [(x, y)], steps=5).theta.shape
        torch.Size([1, 5, 17])
    """
    if data_size is None:
        data_size = getattr(log_posterior, "data_size", 1)  # at temperature 0 it has no effect
    return Optimizer(**common_arguments(log_posterior, 1.0, 0.0, data_size, None) | descent(make, options))


def descent(make: OptimizerChoice, options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an `Optimizer` for these options; raise as `make` does for those that it does not have."""
    if isinstance(make, torch.optim.Optimizer) or make is torch.optim.LBFGS:  # which calls the model itself
        raise TypeError("make must be the class of an optimiser with one gradient per step, such as torch.optim.AdamW.")
    lr = options.get("lr")
    made = make([torch.zeros(1, requires_grad=True)], **{**options, "lr": lr(0)} if callable(lr) else options)
    schedule = lr if callable(lr) else Constant(made.defaults.get("lr", math.nan))
    return {"make": make, "options": dict(options), "step_size": schedule}
