"""The demo's checks: each compares two independent computations of one number, in float64, and passes or fails."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import curvops as co

STEP = 1e-5
"""The step of the central difference, whose error is about its square."""


@dataclass(frozen=True)
class Check:
    """A line of the report: a relative error and the largest that passes."""

    name: str
    error: float
    most: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; NaN is not."""
        return self.error <= self.most

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}  {self.name}: relative error {self.error:.1e} (at most {self.most:.0e})"


def run_checks(model: nn.Module, x: Tensor, y: Tensor, at: Tensor, generator: torch.Generator) -> list[Check]:
    """Check a product, a solve and variances of the network's posterior under the full GGN at prior precision 1.

    The reference for the product is a finite difference, for the solve its residual, and for the variances a dense
    computation in function space from gradients by autograd (Woodbury's identity).
    """
    model, (x, y, at) = copy.deepcopy(model).double(), (part.double() for part in (x, y, at))
    noise = 0.04
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))
    v = torch.randn(lin.num_parameters, generator=generator, dtype=torch.float64)
    product = lin.jacobian(at) @ v
    difference = (_moved(model, STEP * v)(at) - _moved(model, -STEP * v)(at)).detach().flatten() / (2 * STEP)
    post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
    solution = post.precision.cg(v, rtol=1e-8).x
    J, J_at = (_rows(model, points) for points in (x, at))
    inner = torch.linalg.solve(J @ J.mT + noise * torch.eye(len(x)).double(), J @ J_at.mT)
    exact = (J_at @ J_at.mT - (J @ J_at.mT).mT @ inner).diagonal()
    found = post.predict(at).variance.flatten()
    return [
        Check("Jacobian product against a finite difference", _error(product, difference), 1e-6),
        Check("solve with the posterior's precision, its residual", _error(post.precision @ solution, v), 1e-6),
        Check("variances against a dense computation", _error(found, exact), 1e-6),
    ]


def _moved(model: nn.Module, step: Tensor) -> nn.Module:
    moved = copy.deepcopy(model)
    vector_to_parameters(parameters_to_vector(moved.parameters()).detach() + step, moved.parameters())
    return moved


def _rows(model: nn.Module, x: Tensor) -> Tensor:
    """Return the gradient of the output at each point, (N, D)."""
    rows = [torch.autograd.grad(model(point[None]).sum(), list(model.parameters())) for point in x]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
