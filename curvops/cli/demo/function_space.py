"""An independent reference: predictive variances by a dense solve in function space, in float64.

With A = Lᵀ J (softmax Hessian H = L Lᵀ) and posterior precision AᵀA + λI over D weights, Woodbury's identity gives

    var = (1/λ) diag( J* J*ᵀ − J* Aᵀ (λI + A Aᵀ)⁻¹ A J*ᵀ ),

where A Aᵀ is N(C−1) x N(C−1): dense, but far smaller than D x D. Nothing of curvops' operators or solvers is used:
plain autograd gives the sensitivity δ of each output to each layer, and the tangent kernel J J'ᵀ is a sum over layers
(a linear layer with inputs a adds (a a'ᵀ + 1) ∘ δ δ'ᵀ). The model may hold Linear and Conv2d layers only.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

TILE = 1500
"""Rows of the kernel formed at once: bounds the memory beside the N(C-1) x N(C-1) matrix itself."""


def variances(
    model: nn.Module, train: Float[Tensor, "N ..."], points: Float[Tensor, "M ..."], prior_precision: float
) -> Float[Tensor, "M C"]:
    """Variance of each output at `points` under the full GGN posterior of a softmax classifier, float64.

    Costs O((NC)²·D_conv + (NC)³/3) operations and two (NC)² float64 matrices: for checks, not for use.
    """
    model = copy.deepcopy(model).double()
    train, points = train.double(), points.double()
    rows = _features(model, train).weighted(_hessian_root(model(train).detach()))
    here = _features(model, points)
    kernel = _kernel(rows, rows)
    kernel.diagonal().add_(prior_precision)
    cross = _kernel(rows, here)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(kernel, out=kernel), cross, upper=False)
    variance: Tensor = (here.squared_norms() - half.square().sum(0)) / prior_precision
    return variance.reshape(len(points), -1)


def _hessian_root(logits: Tensor) -> Tensor:
    """L (N, C, C−1) with L Lᵀ = diag(p) − ppᵀ; the vector of ones is its null space, so one column less than C."""
    p = logits.softmax(-1)
    eigenvalues, vectors = torch.linalg.eigh(torch.diag_embed(p) - p[:, :, None] * p[:, None, :])
    root: Tensor = vectors[:, :, 1:] * eigenvalues[:, None, 1:].clamp_min(0).sqrt()
    return root


@dataclass(frozen=True, eq=False)
class _Layer:
    """Rows of one layer's Jacobian, factored: `delta` (R, out), `inputs` (R, in) if linear, else `dense` (R, d)."""

    delta: Tensor
    inputs: Tensor | None
    dense: Tensor | None


@dataclass(frozen=True, eq=False)
class _Features:
    """R rows of a Jacobian, layer by layer; `layers` as computed for C outputs at each of N points."""

    inputs: list[Tensor]
    deltas: list[Tensor]
    convolutions: list[nn.Conv2d | None]

    def weighted(self, root: Tensor) -> _Features:
        """Rows Lᵀ J in place of J."""
        deltas = [torch.einsum("ncr,nc...->nr...", root, delta) for delta in self.deltas]
        return _Features(self.inputs, deltas, self.convolutions)

    def layers(self) -> list[_Layer]:
        result = []
        for a, delta, conv in zip(self.inputs, self.deltas, self.convolutions, strict=True):
            if conv is None:
                repeated = a.repeat_interleave(delta.shape[1], 0)
                result.append(_Layer(delta.flatten(0, 1), repeated, None))
                continue
            assert not isinstance(conv.padding, str)  # refused in `_features`
            patches = nn.functional.unfold(a, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
            weight = torch.einsum("nrot,nit->nroi", delta.flatten(3), patches)
            bias = delta.flatten(3).sum(3)
            dense = torch.cat([weight.flatten(2), bias], 2)
            result.append(_Layer(bias.flatten(0, 1), None, dense.flatten(0, 1)))
        return result

    def squared_norms(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for layer in self.layers():
            if layer.dense is not None:
                total = total + layer.dense.square().sum(1)
            elif layer.inputs is not None:
                total = total + layer.delta.square().sum(1) * (layer.inputs.square().sum(1) + 1)
        return total


def _features(model: nn.Module, x: Tensor) -> _Features:
    """Inputs a of every layer and sensitivities δ (N, C, ...) of every output to every layer's output."""
    modules: list[nn.Module] = []
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        modules.append(module)
        inputs.append(args[0].detach())
        outputs.append(output)

    owners = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    if not all(isinstance(module, (nn.Linear, nn.Conv2d)) for module in owners):
        raise ValueError("the function-space reference knows Linear and Conv2d layers only")
    if any(isinstance(module, nn.Conv2d) and isinstance(module.padding, str) for module in owners):
        raise ValueError("the function-space reference knows padding in numbers only")
    handles = [module.register_forward_hook(record) for module in owners]
    f = model(x)
    for handle in handles:
        handle.remove()
    per_class = [torch.autograd.grad(f[:, c].sum(), outputs, retain_graph=True) for c in range(f.shape[1])]
    deltas = [torch.stack(one_layer, 1) for one_layer in zip(*per_class, strict=True)]
    return _Features(inputs, deltas, [m if isinstance(m, nn.Conv2d) else None for m in modules])


def _kernel(left: _Features, right: _Features) -> Tensor:
    """Σ over layers of J J'ᵀ, in row tiles; a symmetric one (left is right) by its lower triangle, then mirrored."""
    pairs = list(zip(left.layers(), right.layers(), strict=True))
    n, m = len(pairs[0][0].delta), len(pairs[0][1].delta)
    kernel = torch.zeros(n, m, dtype=torch.float64)
    for start in range(0, n, TILE):
        rows = slice(start, start + TILE)
        columns = slice(0, min(start + TILE, n)) if left is right else slice(0, m)
        for a, b in pairs:
            if a.dense is not None and b.dense is not None:
                kernel[rows, columns].addmm_(a.dense[rows], b.dense[columns].mT)
            elif a.inputs is not None and b.inputs is not None:
                product = (a.inputs[rows] @ b.inputs[columns].mT).add_(1).mul_(a.delta[rows] @ b.delta[columns].mT)
                kernel[rows, columns] += product
    return kernel
