"""The demo's checks: each compares two independent computations of one number, and passes or fails.

The reference for predictive variances is a dense solve in function space, in float64. With A = Lᵀ J (softmax Hessian
H = L Lᵀ) and posterior precision AᵀA + λI over D weights, Woodbury's identity gives

    var = (1/λ) diag( J* J*ᵀ − J* Aᵀ (λI + A Aᵀ)⁻¹ A J*ᵀ ),

where A Aᵀ is N(C−1) x N(C−1): dense, but far smaller than D x D. Nothing uses curvops' operators or solvers: plain
autograd gives the sensitivity δ of each output to each layer, and the tangent kernel J J'ᵀ is a sum over layers (a
linear layer with inputs a adds (a a'ᵀ + 1) ∘ δ δ'ᵀ). The model may contain only Linear and Conv2d layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

WORST_ERROR = 1e-3
INSIDE = 0.85
TILE = 1500
"""The number of rows of the kernel formed at once; it bounds the memory in addition to the N(C-1) x N(C-1) matrix."""


@dataclass(frozen=True)
class Check:
    """A line of the report; `numbers` go to results.json. A failed `proof` is an error; other failures are findings."""

    name: str
    passed: bool
    text: str
    numbers: dict[str, float]
    proof: bool = True


def check_exact(solved: Float[Tensor, "M C"], reference: Float[Tensor, "M C"]) -> Check:
    """Compare variances from block solves in weight space with those of a dense solve in function space."""
    worst = float(((solved.to(reference) - reference).abs() / reference).max())
    return Check(
        "exact variances",
        worst <= WORST_ERROR,
        f"{len(solved)} test points by block solves against a dense solve in function space: "
        f"worst relative error {worst:.1e} (at most {WORST_ERROR:.0e})",
        {"worst_relative_error": worst},
    )


def check_samples(
    drawn: Float[Tensor, "M C"], solved: Float[Tensor, "M C"], reference: Float[Tensor, "M C"], samples: int
) -> Check:
    """Compare variances from samples with the other two: the share within two relative standard errors √(2/k)."""
    error = (2 / samples) ** 0.5
    shares = [
        float(((drawn.double() / v.double() - 1).abs() <= 2 * error).double().mean()) for v in (solved, reference)
    ]
    return Check(
        "sampled variances",
        min(shares) >= INSIDE,
        f"{samples} samples (each variance ±{100 * error:.0f} %): within two standard errors of the block solves for "
        f"{100 * shares[0]:.0f} %, of the dense solve for {100 * shares[1]:.0f} % (at least {100 * INSIDE:.0f} %; "
        "95 % expected)",
        {"relative_standard_error": error, "inside_solved": shares[0], "inside_reference": shares[1]},
    )


def check_nll(laplace: Float[Tensor, "S N"], at_mode: Float[Tensor, "S N"]) -> Check:
    """Compare the NLL of Laplace with that of the MAP by seed and test point, in standard errors over the points."""
    mean = float((laplace - at_mode).mean())
    error = float(at_mode.mean(0).std() / at_mode.shape[1] ** 0.5)
    return Check(
        "NLL at 0°",
        mean <= error,
        f"Laplace minus MAP {mean:+.4f} nats per point; MAP's is known to ±{error:.4f} (allowed: up to that much more)",
        {"difference": mean, "standard_error": error},
        proof=False,
    )


def compute_variances(
    model: nn.Module, train: Float[Tensor, "N ..."], points: Float[Tensor, "M ..."], prior_precision: float
) -> Float[Tensor, "M C"]:
    """Compute each output's variance at `points` under the full GGN posterior of a softmax classifier, in float64.

    Costs O((NC)²·D_conv + (NC)³/3) operations and two (NC)² float64 matrices: meant for checks only.
    """
    model = copy.deepcopy(model).double()
    train, points = train.double(), points.double()
    rows = _rows(model, train, _hessian_root(model(train).detach()))
    here = _rows(model, points)
    kernel, cross = _kernel(rows, rows), _kernel(rows, here)
    kernel.diagonal().add_(prior_precision)
    norms = sum(delta.square().sum(1) * a.square().sum(1) for delta, a in here)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(kernel, out=kernel), cross, upper=False)
    variance: Tensor = (norms - half.square().sum(0)) / prior_precision
    return variance.reshape(len(points), -1)


def _hessian_root(logits: Tensor) -> Tensor:
    """Return L (N, C, C−1) with L Lᵀ = diag(p) − ppᵀ, whose null space is the vector of ones: C−1 columns."""
    p = logits.softmax(-1)
    eigenvalues, vectors = torch.linalg.eigh(torch.diag_embed(p) - p[:, :, None] * p[:, None, :])
    root: Tensor = vectors[:, :, 1:] * eigenvalues[:, None, 1:].clamp_min(0).sqrt()
    return root


LayerRows = list[tuple[Tensor, Tensor]]
"""Rows of a Jacobian as a pair (δ, a) for each layer; the kernel is the sum of (δ δ'ᵀ) ∘ (a a'ᵀ)."""


def _rows(model: nn.Module, x: Tensor, root: Tensor | None = None) -> LayerRows:
    """Compute the rows of J, or of Lᵀ J given the root L (N, C, R), by layer."""
    modules: list[nn.Module] = []
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        modules.append(module)
        inputs.append(args[0].detach())
        outputs.append(output)

    owners = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    handles = [module.register_forward_hook(record) for module in owners]
    f = model(x)
    for handle in handles:
        handle.remove()
    per_class = [torch.autograd.grad(f[:, c].sum(), outputs, retain_graph=True) for c in range(f.shape[1])]
    rows = []
    for module, a, deltas in zip(modules, inputs, zip(*per_class, strict=True), strict=True):
        delta = torch.stack(deltas, 1)
        if root is not None:
            delta = torch.einsum("ncr,nc...->nr...", root, delta)
        if isinstance(module, nn.Linear):
            a = torch.cat([a, torch.ones_like(a[:, :1])], 1)  # the bias
            rows.append((delta.flatten(0, 1), a.repeat_interleave(delta.shape[1], 0)))
        elif isinstance(module, nn.Conv2d) and not isinstance(module.padding, str):
            patches = nn.functional.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride)
            weight = torch.einsum("nrot,nit->nroi", delta.flatten(3), patches)
            dense = torch.cat([weight.flatten(2), delta.flatten(3).sum(3)], 2).flatten(0, 1)
            rows.append((dense.new_ones(len(dense), 1), dense))
        else:
            raise ValueError("the function-space reference needs Linear and Conv2d layers with numeric padding.")
    return rows


def _kernel(left: LayerRows, right: LayerRows) -> Tensor:
    """Sum J J'ᵀ over layers, in row tiles; for a symmetric kernel (left is right) only the lower triangle."""
    n, m = len(left[0][0]), len(right[0][0])
    kernel = torch.zeros(n, m, dtype=torch.float64)
    for start in range(0, n, TILE):
        rows = slice(start, start + TILE)
        columns = slice(0, min(start + TILE, n)) if left is right else slice(0, m)
        for (delta, a), (other_delta, other_a) in zip(left, right, strict=True):
            kernel[rows, columns] += (a[rows] @ other_a[columns].mT).mul_(delta[rows] @ other_delta[columns].mT)
    return kernel
