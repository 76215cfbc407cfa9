"""The base of the network's operators: weights give dtype and device, and a conversion makes a new linearisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import Progress
from curvops.linalg.core.memory import Memories
from curvops.linalg.core.sources import Sources
from curvops.linalg.core.spaces import Space, Spaces
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.contract import convert
from curvops.network import Passes, likelihoods
from curvops.ranks.process_group import Ranks
from curvops.ranks.sharded_vectors import RowLayout


class NetworkOperator(Operator):
    """An operator of a linearisation; its first tensor is θ, which gives dtype and device and has a zero gradient."""

    _shown: ClassVar[tuple[str, ...]] = ("lin",)
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """The keywords that define the operator, in addition to the linearisation."""

    MADE_BY: ClassVar[str] = ""
    """The call that makes the operator, if users do not call its class, which then takes the stored form only."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.MADE_BY and args and not isinstance(args[0], Tensor):  # a copy is made without arguments
            raise TypeError(
                f"{cls.MADE_BY} makes the {cls.__name__} of a linearised network, "
                "lin = co.linearize(model, data, likelihood); its class is not called."
            )
        return super().__new__(cls)

    @property
    def theta(self) -> Tensor:
        """The weights θ* of the linearisation, (D,)."""
        return self._args[0]

    @property
    def lin(self) -> Any:
        """The linearisation that the operator belongs to."""
        return self._kwargs["lin"]

    @property
    def likelihood(self) -> likelihoods.Likelihood:
        """The likelihood with this operator's hyperparameters."""
        likelihood: likelihoods.Likelihood = self.lin.likelihood
        if len(self._args) == 1:
            return likelihood
        return likelihood.with_hyperparameters([self.passes.replicated(tensor) for tensor in self._args[1:]])

    def _size(self) -> torch.Size:
        return torch.Size((self.theta.shape[-1], self.theta.shape[-1]))

    def _made_of(self) -> str:
        chosen = ((name, value) for name, value in self.options.items() if value is not None and value is not False)
        options = (f"{len(value)} {name} per point" if isinstance(value, Tensor) else name for name, value in chosen)
        return ", ".join([f"of {self.lin.likelihood.kind} on {self.lin.num_data} points", *options])

    @property
    def space(self) -> Any:
        """The tangent space of the linearisation; without its weights once the operator is detached from them."""
        return self._kwargs.get("space") or self._tangent_space()

    def _tangent_space(self) -> Space:
        space: Space = self.lin.tangent_space
        return space

    @property
    def spaces(self) -> Spaces:
        return self.space, self.space

    @property
    def sources(self) -> Sources | None:
        if not self.symmetric:  # J and per-point gradients have a row for each point and are not sums over points
            return None
        sources: Sources = self.lin.sources
        return sources if self._kwargs.get("space") is None else sources.detach()

    def detached_from_weights(self) -> LinearOperator:
        return self.__class__(*self._args, **self._kwargs | {"space": self.space.detached()})

    @property
    def passes(self) -> Passes:
        """The walk over the points of this operator."""
        walk: Passes = self.lin.passes
        return walk

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that share the data of this operator."""
        shard = self.passes.shard
        return None if shard is None else shard.ranks

    @property
    def memories(self) -> Memories:
        return frozenset((self.lin.memory,))

    @property
    def multiply_adds(self) -> float | int:
        """The multiply-adds of a gradient of the data, which a product takes, too; at least one a weight and point."""
        plan = getattr(self.lin, "plan", None)  # a model that runs itself has none
        count: int = 3 * self.lin.num_data * max(self.theta.shape[-1], 0 if plan is None else plan.forward)
        return count

    @property
    def progress(self) -> Progress:
        progress: Progress = self.lin.passes.progress
        return progress

    def _matmul(self, rhs: Tensor) -> Tensor:
        product = super()._matmul(rhs)
        return self._attached(product) if self.theta.requires_grad else product

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        product = super()._t_matmul(rhs)
        return self._attached(product) if self.theta.requires_grad else product

    def _attached(self, product: Tensor) -> Tensor:
        """Return a product with a zero gradient for θ, which linear_operator differentiates by, too."""
        return product + 0 * self.theta.sum() if torch.is_grad_enabled() else product

    def on_layouts(self, rows: RowLayout, columns: RowLayout) -> LinearOperator:
        if (shard := self.passes.shard) is not None:  # vectors must be sharded among the processes of the data
            shard.ranks.require_ranks_of(rows.ranks)
        return super().on_layouts(rows, columns)

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        """Return the operator of a new linearisation in another dtype or on another device."""
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        if (dtype in (None, self.dtype)) and (device in (None, self.device)):
            return self
        hyperparameters = [convert(tensor, device, dtype) for tensor in self._args[1:]]
        converted = self._converted(hyperparameters, dtype, device)
        return converted if self._kwargs.get("space") is None else converted.detached_from_weights()

    def _converted(
        self, hyperparameters: list[Tensor], dtype: torch.dtype | None, device: torch.device | None
    ) -> LinearOperator:
        options = {name: convert(value, device, dtype) for name, value in self.options.items()}
        return self.build_at(self.lin.cast(dtype, device), hyperparameters, **options)

    @property
    def options(self) -> dict[str, Any]:
        """The values of the keywords in `OPTIONS`."""
        return {name: self._kwargs[name] for name in self.OPTIONS}

    @classmethod
    def build_at(cls, lin: Any, hyperparameters: Sequence[Tensor], **options: Any) -> LinearOperator:
        """Build the operator of a linearisation, with these hyperparameters of the likelihood and these options."""
        return cls(lin.theta, *hyperparameters, lin=lin, **options)
