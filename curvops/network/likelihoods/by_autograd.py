"""Likelihoods given as functions: gradients and the output Fisher by autograd."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.inputs import require_finite
from curvops.network.likelihoods.likelihood import Likelihood, OutputBlock, Outputs, RootBlock, Weights, weigh


class ByAutograd(Likelihood):
    """A likelihood whose H, C x C per point, is computed in each product; its root costs O(C^3) per point."""

    @property
    def kind(self) -> str:
        return repr(self)

    @abstractmethod
    def _log_factors(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the terms (n, F) of each point's log-likelihood."""

    @abstractmethod
    def _fisher(self, f: Tensor, y: Tensor) -> Tensor:
        """Return H (n, C, C) without weights."""

    def log_prob(self, f: Outputs, y: Tensor, w: Weights = None) -> Float[Tensor, " n"]:
        return weigh(self._log_factors(f, y), w).sum(-1)

    def residual(self, f: Outputs, y: Tensor, w: Weights = None) -> Outputs:
        return weigh(with_autograd(self._residual, f, y), w)

    def fisher(self, f: Outputs, y: Tensor, w: Weights = None) -> Float[Tensor, "n C C"]:
        """Return H of each point, weights included."""
        H = with_autograd(self._fisher, f, y)
        return H if w is None else H * w[:, None, None]

    def hessian_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        return torch.einsum("ncd,...nd->...nc", self.fisher(f, y, w), u)

    def root_product(self, f: Outputs, z: RootBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        values, vectors = torch.linalg.eigh(self.fisher(f, y, w))
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT
        return torch.einsum("ncd,...nd->...nc", root, z)

    def root_transpose_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> RootBlock:
        return self.root_product(f, u, y, w)

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        """Check that targets are finite; shapes and values are checked when targets are scored."""
        require_finite("targets", y)

    def _residual(self, f: Tensor, y: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(lambda g: -self._log_factors(g, y).sum())(f)
        return gradient

    def _hessians(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the Hessians (n, C, C) of -log p."""
        _, pull = vjp(lambda g: self._residual(g, y), f)
        units = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
        H = torch.stack([pull(unit.expand_as(f))[0] for unit in units], -1)
        return (H + H.mT) / 2


def vjp(function: Callable[[Tensor], Tensor], f: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
    """Return function(f), and the function that pulls cotangents back."""
    result: Any = torch.func.vjp(function, f)
    return result[0], result[1]


def with_autograd(compute: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> Tensor:
    """Return compute(f, y) with autograd, even if the caller records no gradients or is in inference mode."""
    keep = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        f, y = (t.clone() if t.is_inference() else t for t in (f, y))
        result = compute(f if keep or not f.requires_grad else f.detach(), y)
    return result if keep or not result.requires_grad else result.detach()
