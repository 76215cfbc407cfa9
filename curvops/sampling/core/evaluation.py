"""`log_posterior` and its gradient at the vectors of a state: one point, or k points together or one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.errors import NotVectorizedWarning, warn
from curvops.process_group import Ranks
from curvops.sampling.core.log_density import LogPosterior
from curvops.sampling.core.structure import Structure
from curvops.summary import summary

LogDensity = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """A log posterior and how chains evaluate it: together (`torch.vmap`), one by one, or (None) as possible."""

    log_posterior: LogDensity
    vectorized: bool | None = None
    _together: list[bool] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        return summary(self.log_posterior)

    def value(self, theta: Float[Tensor, "*k d"], structure: Structure, batch: Any) -> Float[Tensor, "*k"]:
        """Return the value of log_posterior."""
        with torch.no_grad():
            value = self._evaluate(self._value, theta, structure, batch)[0]
        if self._split is not None:
            value += self._split.prior_and_gradient(theta, structure)[0]
        return value if self.ranks is None else self.ranks.add_up(value)

    def gradient(
        self, theta: Float[Tensor, "*k d"], structure: Structure, batch: Any
    ) -> tuple[Float[Tensor, "*k"], Float[Tensor, "*k d"]]:
        """Return log_posterior and its gradient, each in new memory."""
        value, gradient = self._evaluate(self._gradient, theta, structure, batch)
        if self._split is not None:
            prior, pull = self._split.prior_and_gradient(theta, structure)
            value, gradient = value + prior, gradient.add_(pull)
        if self.ranks is None:
            return value, gradient
        both = self.ranks.add_up(torch.cat([gradient, value.unsqueeze(-1)], -1))  # in one message
        return both[..., -1].clone(), both[..., :-1]

    @property
    def ranks(self) -> Ranks | None:
        """The ranks whose shares of log_posterior are added up."""
        return self.log_posterior.ranks if isinstance(self.log_posterior, LogPosterior) else None

    @property
    def _split(self) -> LogPosterior | None:
        """The log posterior whose prior is added in closed form, for all chains together, outside of the graph."""
        f = self.log_posterior
        return f if isinstance(f, LogPosterior) and f.ranks is None and f.prior.diagonal is not None else None

    def _evaluate(self, compute: Any, theta: Tensor, structure: Structure, batch: Any) -> tuple[Tensor, ...]:
        if theta.ndim == 1 or self._is_together():
            try:
                found = compute(theta, structure, batch)
            except (RuntimeError, NotImplementedError) as error:
                if theta.ndim == 1 or isinstance(error, torch.OutOfMemoryError):
                    raise
                self._fall_back(error)
            else:
                return found
        each = [compute(row, structure, batch) for row in theta]
        return tuple(torch.stack(parts) for parts in zip(*each))

    def _is_together(self) -> bool:
        return self._together[0] if self._together else self.vectorized is not False

    def _fall_back(self, error: Exception) -> None:
        """Evaluate chains one by one from now on; raise ValueError if a batch changes what the chains share."""
        if "running_mean" in str(error):
            raise ValueError("the model normalises by batch statistics in train mode: call model.eval().") from error
        if self.vectorized:
            raise ValueError(f"vectorized=True, but torch.vmap cannot run log_posterior: {error}") from error
        warn(
            f"torch.vmap cannot run log_posterior, so the chains are computed one by one, with the same draws: {error} "
            "To choose this from the start, pass chains(..., vectorized=False).",
            NotVectorizedWarning,
        )
        self._together[:] = [False]

    def _value(self, theta: Tensor, structure: Structure, batch: Any) -> tuple[Tensor]:
        return (self._call(structure.parts(theta), theta.ndim, structure, batch),)

    def _gradient(self, theta: Tensor, structure: Structure, batch: Any) -> tuple[Tensor, Tensor]:
        leaves = [part.requires_grad_() for part in structure.parts(theta.detach())]
        with torch.enable_grad():
            value = self._call(leaves, theta.ndim, structure, batch)
        if self._split is not None and not value.requires_grad:
            return value, torch.zeros_like(theta)
        if not value.requires_grad:
            raise ValueError("log_posterior has no gradient in params: compute it from the params that it receives.")
        gradients = torch.autograd.grad(value, leaves, torch.ones_like(value), allow_unused=True)
        if self._split is not None:  # the prior depends on all of them
            gradients = tuple(torch.zeros_like(l) if g is None else g for l, g in zip(leaves, gradients))
        missing = [name for name, each in zip(structure.names, gradients) if each is None]
        if missing:
            raise ValueError(f"log_posterior does not depend on {', '.join(missing)}: leave them out of params.")
        return value.detach(), structure.concatenate([each for each in gradients if each is not None], theta.ndim - 1)

    def _call(self, parts: Sequence[Tensor], ndim: int, structure: Structure, batch: Any) -> Tensor:
        function = self.log_posterior
        if isinstance(function, LogPosterior) and function.ranks is not None:
            function = function.share
        elif self._split is not None:
            function = self._split.log_likelihood

        def call(*tensors: Tensor) -> Tensor:
            return checked_value(function(structure.tree(tensors), batch))

        return call(*parts) if ndim == 1 else torch.vmap(call)(*parts)


def checked_value(value: Any) -> Tensor:
    """Return the value of `log_posterior`; raise TypeError or ValueError unless it is one real number."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"log_posterior must return one real number (), the mean log-likelihood of the batch + log prior / N, got "
            f"{kind}: take the mean over the batch."
        )
    return value
