"""Rows of J layer by layer: those of the dense Jacobian, whole, in pieces of few bytes, and as a map."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import curvops as co
from curvops.network import Passes
from tests.network.products import PLENTY, agree, walk
from tests.zoo import reference
from tests.zoo_functions import NumpyTanh
from tests.zoo_modules import Applied

NETWORKS = [
    "mlp",
    "cnn",
    "shared_parameter",
    "dead_branch",
    "own_parameters",
    "function_pair",
    "flattened_positions",
    "embedding_padding",
]


@pytest.fixture(params=NETWORKS)
def passes(request: pytest.FixtureRequest) -> Passes:
    return walk(request.param, "auto")


def test_the_groups_hold_each_row_once(passes: Passes, request: pytest.FixtureRequest) -> None:
    positions, expected = passes.model.selection.positions(), reference(request.node.callspec.params["passes"])
    found, seen = torch.zeros_like(expected), 0
    for first, count, groups in passes.jacobian_rows():
        assert first == seen
        for group in groups:
            start = first + group.first_row
            for name, rows in group.rows().items():
                found[start : start + group.num_rows, positions[name].flatten()] += rows.reshape(group.num_rows, -1)
        seen += count
    assert seen == len(expected)
    assert agree(found, expected)


def test_a_group_in_pieces_and_as_a_map_is_its_rows(passes: Passes) -> None:
    """A piece has at most the bytes asked for, or a single point."""
    generator = torch.Generator().manual_seed(0)
    for _, _, groups in passes.jacobian_rows():
        for group in groups:
            whole = group.rows()
            point = sum(rows[0].nbytes for rows in whole.values())
            for most in (0, 2 * point, PLENTY):
                pieces = list(group.pieces(most))
                assert len(pieces) == -(-group.num_points // max(1, most // point))
                assert all(torch.equal(torch.cat([p[name] for p in pieces]), rows) for name, rows in whole.items())
            for columns in (1, 40):  # by way of rows, or of factors
                tangents = {
                    name: torch.randn(columns, *rows.shape[2:], dtype=rows.dtype, generator=generator)
                    for name, rows in whole.items()
                }
                pushed = sum(
                    torch.einsum("nrp,kp->knr", rows.reshape(*rows.shape[:2], -1), tangents[name].reshape(columns, -1))
                    for name, rows in whole.items()
                )
                assert agree(group.push(tangents), pushed)


@pytest.mark.parametrize("tanh", [torch.tanh, NumpyTanh.apply], ids=["batched", "without a batching rule"])
def test_rows_without_a_layer_rule(tanh: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """All outputs of a point take one backward pass, or one each if numpy computes it; both give the Jacobian."""
    n, outputs, passes, gradient = 5, 12, Counter[str](), torch.autograd.grad

    def grad(*args: Any, **options: Any) -> Any:
        passes["called"] += 1
        return gradient(*args, **options)

    layers = nn.LSTM(2, 3, batch_first=True), Applied(lambda found: tanh(found[0])), nn.Linear(3, 3)
    model, x, y = nn.Sequential(*layers).double(), torch.randn(n, 4, 2).double(), torch.randn(n, 4, 3).double()
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(1.0))
    co.DiagonalGGN(lin)  # checks the engine
    monkeypatch.setattr(torch.autograd, "grad", grad)
    diagonal = co.DiagonalGGN(lin).diagonal()
    assert n <= passes["called"] <= 2 * n if tanh is torch.tanh else passes["called"] >= n * outputs

    weights = {name: value.detach() for name, value in model.named_parameters()}
    jacobian = torch.autograd.functional.jacobian(
        lambda *values: functional_call(model, dict(zip(weights, values)), x), tuple(weights.values())
    )
    assert agree(diagonal, torch.cat([rows.square().sum((0, 1, 2)).flatten() for rows in jacobian]))
