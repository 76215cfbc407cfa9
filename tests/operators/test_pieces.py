"""Operators made of rows, with everything cut into many small pieces: the same as the dense matrices.

Tests `kfac_factors.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import curvops as co
from curvops.network.walks import row_squares
from curvops.network.walks.passes import Passes
from curvops.operators.kfac import kfac_factors
from tests.zoo import ZOO, dense_jacobian

NETWORKS = ["mlp", "cnn_1d", "embedding_padding", "bag_mean", "own_parameters", "linear_twice", "weight_norm"]
DTYPE = torch.float64


@pytest.fixture(params=[1, 3000], ids=["a-row-at-a-time", "a-few-rows"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a chunk, of a block of squares, and the least size of a symmetric product, far below any in use."""
    monkeypatch.setattr(Passes, "chunk_bytes", property(lambda self: request.param))
    monkeypatch.setattr(row_squares, "CACHE_BYTES", 200)
    monkeypatch.setattr(kfac_factors, "LEAST_SYMMETRIC", 4)


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest, small_pieces: None) -> tuple[Any, Tensor, Tensor, Any]:
    """Linearisation, J (N·C, D), the GGN (D, D) and inputs."""
    model, x = ZOO[request.param].build()
    n = len(x)
    J = dense_jacobian(model, x)
    C = J.shape[0] // n
    lin = co.linearize(model, [(x, torch.arange(n) % C)], "classification")
    p = lin.outputs().softmax(-1)
    H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    rows = J.unflatten(0, (n, C))
    return lin, J, torch.einsum("ncd,nce,nef->df", rows, H, rows), x


def agree(ours: Tensor, expected: Tensor) -> bool:
    return bool((ours - expected).norm() <= 1e-10 * expected.norm())


def test_the_diagonal(network: Any) -> None:
    lin, _, G, _ = network
    assert agree(co.DiagonalGGN(lin).entries, G.diagonal())


def test_the_tangent_kernel(network: Any) -> None:
    """Of one set of points, of two, and with a prior that varies within a layer."""
    lin, J, _, x = network
    prior = 0.5 + torch.arange(J.shape[1], dtype=DTYPE) / J.shape[1]
    assert agree(co.TangentKernel(lin).to_dense(), J @ J.mT)
    assert agree(co.TangentKernel(lin, prior).to_dense(), (J / prior) @ J.mT)
    few = J[: 2 * lin.num_outputs]
    assert agree(co.TangentKernel(lin, x=x, x2=x[:2]).to_dense(), J @ few.mT)


def test_kfac_does_not_depend_on_the_pieces(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors of one piece, and EKFAC's trace, which is that of the GGN."""
    lin, _, G, _ = network
    in_pieces = co.KFAC(lin).to_dense()
    monkeypatch.setattr(Passes, "chunk_bytes", property(lambda self: 2**20))
    assert agree(in_pieces, co.KFAC(lin).to_dense())
    assert agree(co.EKFAC(lin).to_dense().trace(), G.trace())
