"""The three forms of inputs."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import Tensor

from curvops.network import move
from curvops.network.data import as_inputs, components, num_points, take

A, B = torch.randn(5, 3), torch.arange(5)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (A, ["inputs"]),
        ((A, B), ["inputs[0]", "inputs[1]"]),
        ([A, B], ["inputs[0]", "inputs[1]"]),
        ({"ids": B, "mask": A}, ["inputs['ids']", "inputs['mask']"]),
        (UserDict(ids=B), ["inputs['ids']"]),
    ],
    ids=["tensor", "tuple", "list", "dict", "mapping"],
)
def test_forms(given: object, names: list[str]) -> None:
    inputs = as_inputs(given, dtype=torch.float64)
    assert isinstance(inputs, (Tensor, tuple, dict))
    assert [name for name, _ in components(inputs)] == names
    assert num_points(inputs) == 5
    assert num_points(take(inputs, slice(3, 9))) == 2
    for _, tensor in components(inputs):
        assert tensor.dtype in (torch.float64, torch.int64)


def test_move_casts_floating_tensors_only_and_keeps_gradients() -> None:
    x = A.clone().requires_grad_()
    moved = move((x, B, B > 2), "cpu", torch.float64)
    assert [tensor.dtype for tensor in moved] == [torch.float64, torch.int64, torch.bool]
    moved[0].sum().backward()
    assert x.grad is not None
    assert move(A) is A


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_is_found(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(50, 7, dtype=dtype)
    as_inputs(x)
    x[31, 2] = bad
    with pytest.raises(ValueError, match="NaN or inf"):
        as_inputs(x)
