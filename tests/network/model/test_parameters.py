"""Names and the flat vector: what a selection means, and the way there and back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from curvops.network import Model
from tests.network.definitions import PARAMETERS, chosen

TRAINABLE = [name for name in PARAMETERS if name != "body.bias"]


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (None, TRAINABLE),
        ("head.*", ["head.weight", "head.bias"]),
        ("body.*", ["body.weight", "body.bias"]),
        (["head.bias", "*.weight"], ["body.weight", "head.weight", "head.bias"]),
        (("scale",), ["scale"]),
        (lambda name, tensor: tensor.ndim > 1 and "body" in name, ["body.weight"]),
        (lambda name, tensor: 1 if name == "scale" else 0, ["scale"]),
    ],
)
def test_names_in_the_models_order(spec: Any, names: list[str]) -> None:
    selection = chosen(spec)
    assert list(selection.names) == names
    assert selection.num_parameters == sum(PARAMETERS[name].numel() for name in names)


@pytest.mark.parametrize(
    "positions",
    [torch.tensor([0, 5, 6, 12]), torch.tensor([14, 2, 6], dtype=torch.int32), torch.arange(15) % 3 == 0],
    ids=["index", "any order", "mask"],
)
def test_positions_are_those_of_the_trainable_vector(positions: Tensor) -> None:
    selection = chosen(positions)
    trainable = torch.cat([PARAMETERS[name].flatten() for name in TRAINABLE])
    touched = {name: PARAMETERS[name] for name in selection.names}
    assert torch.equal(selection.flatten(touched), trainable[positions])
    assert "body.bias" not in selection.names
    assert chosen(torch.tensor([6, 0])).names == ("scale", "body.weight")


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (torch.zeros(2, dtype=torch.float64), ValueError, "'other' is torch.float64 on cpu, but parameter 'one'"),
        (torch.zeros(2, device="meta"), ValueError, "'other' is torch.float32 on meta, but .* convert it"),
        (torch.tensor([0.0, torch.nan]), ValueError, "'other' holds NaN or Inf; train again, or leave it out"),
        (torch.tensor([0.0, -torch.inf]), ValueError, "'other' holds NaN or Inf"),
    ],
    ids=["dtypes", "devices", "nan", "inf"],
)
def test_selected_tensors_must_match_and_be_finite(tensor: Tensor, error: type, message: str) -> None:
    parameters = {"one": torch.zeros(2), "other": tensor}
    with pytest.raises(error, match=message):
        Model((lambda params, x: x, parameters))
    if tensor.dtype is torch.float64:
        assert Model((lambda params, x: x, parameters), "one").selection.names == ("one",)


def test_a_large_block_is_joined_tensor_by_tensor() -> None:
    """The tensors are freed one after another, so that they and the block are never in memory together."""
    selection = Model((lambda params, x: x, {"weight": torch.zeros(3, 2**19), "bias": torch.zeros(3)})).selection
    blocks = {name: torch.randn(6, *shape) for name, shape in zip(selection.names, selection.shapes)}
    expected = torch.cat([block.flatten(1) for block in blocks.values()], 1).mT
    assert torch.equal(selection.join(blocks), expected)
    assert not blocks
