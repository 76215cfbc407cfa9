"""What the tests of the engines share: walks over a network of the zoo, and products with the whole Jacobian."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import curvops as co
from curvops.network import Model, Passes
from tests.zoo import ZOO, Network, batches

PLENTY = 10**9

# engine and budget that force each way of making a product
WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"engine": "autodiff", "memory_budget": 0},
    "recorded": {"engine": "autodiff", "memory_budget": PLENTY},
    "layerwise": {"engine": "layerwise", "memory_budget": PLENTY},
    "auto": {"engine": "auto", "memory_budget": PLENTY},
}


def walk(
    network: str | Network, way: str, dtype: torch.dtype = torch.float64, parameters: Any = None, sizes: Any = (3, 2)
) -> Passes:
    """A fresh walk over a network's points, in ragged batches."""
    model, inputs = (ZOO[network] if isinstance(network, str) else network).build(dtype)
    return Passes(Model(model, parameters), batches(inputs, sizes), **WAYS[way])


def push(passes: Passes, V: Tensor) -> Tensor:
    """J V, (N·C, K)."""
    return torch.cat([J.push(V).flatten(1) for _, J in passes.each(V.shape[1])], 1).mT


def pull(passes: Passes, U: Tensor) -> Tensor:
    """Jᵀ U, (D, K)."""
    total, start = None, 0
    for _, J in passes.each(U.shape[1]):
        n, num_outputs = J.outputs.shape
        rows = U[start : start + n * num_outputs].mT.unflatten(1, (n, num_outputs))
        part, start = J.pull(rows), start + n * num_outputs
        total = part if total is None else total + part
    assert total is not None
    assert start == len(U)
    return total


def agree(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    """Whether two products agree, relative to the larger of 1 and the expected product's largest entry."""
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1))


def require_products(passes: Passes, J: Tensor, *vectors: Tensor, tolerance: float = 1e-10) -> None:
    """Require J V and Jᵀ U, of random vectors or those given, of the first products and of those that follow."""
    dtype = passes.model.theta.dtype
    V, U = vectors or (columns(J.shape[1], 3), columns(J.shape[0], 3))
    for _ in range(2):
        assert agree(push(passes, V.to(dtype)).to(J.dtype), J @ V, tolerance)
        assert agree(pull(passes, U.to(dtype)).to(J.dtype), J.mT @ U, tolerance)


def softmax_hessian(f: Tensor) -> Tensor:
    """diag(p) − ppᵀ of all points as one matrix (N·C, N·C), where p is the softmax of f (N, C)."""
    p = f.detach().softmax(1)
    return torch.block_diag(*(torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)))


def require_curvature(
    lin: co.operators.Linearization, J: Tensor, H: Tensor | None = None, tolerance: float = 1e-10, times: int = 2
) -> None:
    """Require products with J, Jᵀ and Jᵀ H J, several times, and the diagonal; without H, that is the identity."""
    V, U, HJ = columns(J.shape[1], 3), columns(len(J), 2), J if H is None else H @ J
    for _ in range(times):
        assert agree((co.GGN(lin) @ V.to(lin.theta)).to(J), J.mT @ (HJ @ V), tolerance)
    assert agree((lin.jacobian() @ V.to(lin.theta)).to(J), J @ V, tolerance)
    assert agree((lin.jacobian().mT @ U.to(lin.theta)).to(J), J.mT @ U, tolerance)
    assert agree(co.DiagonalGGN(lin).diagonal().to(J), (J * HJ).sum(0), tolerance)


def columns(rows: int, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random block (rows, k), a column contiguous."""
    return torch.randn(k, rows, dtype=dtype).mT


@contextmanager
def linear_layers_off_by(factor: float, out_features: int | None = None) -> Iterator[None]:
    """Inside, linear layers (those of so many outputs) do what their rule does not know, as in another torch."""
    plain = nn.Linear.forward

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        return plain(layer, x) * (factor if out_features in (None, layer.out_features) else 1.0)

    with patch.object(nn.Linear, "forward", forward):
        yield
