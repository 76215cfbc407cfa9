"""The table of layer rules: each against autograd on the layer alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from curvops.network.layers import RULES, rule_for

K, SIX = 3, (6, 6)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), (2, 3)),
    "linear_positions": (lambda: nn.Linear(3, 4), (2, 5, 3)),
    "linear_grid": (lambda: nn.Linear(3, 4), (2, 5, 2, 3)),
    "linear_no_bias": (lambda: nn.Linear(3, 4, bias=False), (2, 3)),
    "conv": (lambda: nn.Conv2d(2, 4, 3), (2, 2, *SIX)),
    "conv_stride": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 2, *SIX)),
    "conv_stride_leaves_rows": (lambda: nn.Conv2d(2, 4, 3, stride=(2, 3)), (2, 2, 6, 7)),
    "conv_dilation": (lambda: nn.Conv2d(2, 4, (3, 2), padding=(2, 1), dilation=(2, 1)), (2, 2, *SIX)),
    "conv_groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, *SIX)),
    "conv_depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (2, 4, *SIX)),
    "conv_same": (lambda: nn.Conv2d(2, 4, 3, padding="same", dilation=2), (2, 2, *SIX)),
    "conv_same_of_one_side": (lambda: nn.Conv2d(2, 4, (2, 3), padding="same"), (2, 2, *SIX)),
    "conv_circular": (lambda: nn.Conv2d(2, 4, 3, padding=(2, 1), padding_mode="circular"), (2, 2, *SIX)),
    "conv_reflect": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect", stride=2), (2, 2, *SIX)),
    "conv_replicate_one_side": (lambda: nn.Conv1d(2, 4, 4, padding="same", padding_mode="replicate"), (2, 2, 7)),
    "conv_1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (2, 4, 9)),
    "conv_1d_no_bias": (lambda: nn.Conv1d(3, 2, 1, bias=False), (2, 3, 5)),
    "conv_3d": (lambda: nn.Conv3d(2, 4, (1, 2, 3), padding=(0, 1, 2), stride=(1, 2, 1), groups=2), (2, 2, 2, 3, 4)),
    "conv_3d_same": (lambda: nn.Conv3d(2, 3, (2, 1, 3), padding="same", dilation=(1, 1, 2)), (2, 2, 2, 3, 4)),
    "transposed_1d": (lambda: nn.ConvTranspose1d(2, 3, 4, stride=2, padding=1), (2, 2, 5)),
    "transposed_2d": (lambda: nn.ConvTranspose2d(3, 4, (3, 2), bias=False), (2, 3, 3, 4)),
    "transposed_2d_groups": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=(2, 3), padding=(1, 0), output_padding=(1, 2), groups=2),
        (2, 4, 3, 4),
    ),
    "transposed_2d_dilation": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=1, padding=2, output_padding=1, dilation=2),
        (2, 2, 4, 5),
    ),
    "transposed_3d": (lambda: nn.ConvTranspose3d(2, 4, 2, stride=(1, 2, 1), groups=2), (2, 2, 2, 2, 3)),
    "layer_norm": (lambda: nn.LayerNorm(4), (2, 4)),
    "layer_norm_positions": (lambda: nn.LayerNorm(4), (2, 3, 4)),
    "layer_norm_two": (lambda: nn.LayerNorm((3, 4)), (2, 5, 3, 4)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, *SIX)),
    "group_norm_flat": (lambda: nn.GroupNorm(2, 4), (2, 4)),
    "batch_norm_1d": (lambda: nn.BatchNorm1d(4), (2, 4)),
    "batch_norm_1d_positions": (lambda: nn.BatchNorm1d(4), (2, 4, 5)),
    "batch_norm_2d": (lambda: nn.BatchNorm2d(4), (2, 4, *SIX)),
    "batch_norm_3d": (lambda: nn.BatchNorm3d(4), (2, 4, 2, 3, 2)),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    layer = make().double().eval()
    for tensor in [*layer.parameters(), *(b for b in layer.buffers() if b.is_floating_point())]:
        tensor.data.uniform_(0.5, 1.5)
    return layer, torch.randn(shape, dtype=torch.float64)


def without_matrices(name: str) -> bool:
    return "norm" in name or "transposed" in name


def subsets(layer: nn.Module) -> list[tuple[str, ...]]:
    names = tuple(name for name, _ in layer.named_parameters())
    return [names, *((name,) for name in names if len(names) > 1)]


@pytest.mark.parametrize("name", LAYERS)
def test_push_is_the_layers_forward_derivative(name: str) -> None:
    layer, a = build(name)
    rule = RULES[type(layer)]
    values = dict(layer.named_parameters())
    for names in subsets(layer):
        tangents = {local: torch.randn(K, *values[local].shape, dtype=a.dtype) for local in names}
        pushed = rule.push(layer, rule.keep(layer, a), tangents)
        for k in range(K):
            held = {local: values[local].detach() for local in names}
            one = {local: tangents[local][k] for local in names}
            _, expected = torch.func.jvp(lambda part: torch.func.functional_call(layer, part, (a,)), (held,), (one,))
            torch.testing.assert_close(pushed[:, k], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_are_the_pull_point_by_point_and_the_pull_is_their_sum(name: str) -> None:
    layer, a = build(name)
    rule = RULES[type(layer)]
    output = layer(a)
    s = torch.randn(len(a), K, *output.shape[1:], dtype=a.dtype)
    for names in subsets(layer):
        kept = rule.keep(layer, a)
        rows, pulled = rule.rows(layer, kept, s, names), rule.pull(layer, kept, s, names)
        assert set(rows) == set(pulled) == set(names)
        for local in names:
            parameter = layer.get_parameter(local)
            for k in range(K):
                (expected,) = torch.autograd.grad(layer(a), parameter, s[:, k])
                torch.testing.assert_close(pulled[local][k], expected, rtol=1e-10, atol=1e-10)
                (one,) = torch.autograd.grad(layer(a[:1]), parameter, s[:1, k])
                torch.testing.assert_close(rows[local][0, k], one, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(rows[local].sum(0), pulled[local], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in LAYERS if not without_matrices(name)])
def test_rows_are_sums_of_outer_products_over_the_positions(name: str) -> None:
    layer, a = build(name)
    rule = RULES[type(layer)]
    kept = rule.keep(layer, a)
    s = torch.randn(len(a), K, *layer(a).shape[1:], dtype=a.dtype)
    for names in subsets(layer):
        found = rule.matrices(layer, kept, s, names)
        assert (found is None) is ("weight" not in names)
        if found is not None:
            rows, expected = outer(layer, *found, names), rule.rows(layer, kept, s, names)
            for local in names:
                torch.testing.assert_close(rows[local], expected[local], rtol=1e-10, atol=1e-10)


def outer(layer: nn.Module, left: Tensor, right: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The rows (n, R, *shape) that `matrices` stands for."""
    products = torch.einsum("nrgtp,ngtq->nrgpq", left, right)
    weight = products[..., :-1] if "bias" in names else products
    rows = {"weight": weight.reshape(*products.shape[:2], *layer.weight.shape)}
    return rows | ({"bias": products[..., -1].flatten(2)} if "bias" in names else {})


@pytest.mark.parametrize("name", [name for name in LAYERS if without_matrices(name)])
def test_other_layers_have_no_matrices(name: str) -> None:
    layer, a = build(name)
    s = torch.randn(len(a), K, *layer(a).shape[1:], dtype=a.dtype)
    assert RULES[type(layer)].matrices(layer, RULES[type(layer)].keep(layer, a), s, ("weight", "bias")) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", 3 * 4),
        ("linear_positions", 5 * 3 * 4),
        ("conv_groups", 36 * 6 * 2 * 9),
        ("transposed_1d", 5 * 2 * 3 * 4),
        ("transposed_2d_groups", 12 * 4 * 3 * 9),
        ("conv_3d", 2 * 2 * 6 * 4 * 6),
        ("layer_norm", 4),
    ],
)
def test_multiply_adds_count_one_forward_pass_of_one_point(name: str, expected: int) -> None:
    layer, a = build(name)
    assert RULES[type(layer)].multiply_adds(layer, layer(a)) == expected


class Subclass(nn.Linear):
    """May do anything in its forward."""


def hooked() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, args, output: output**2)
    return layer


NOT_SERVED: dict[str, Callable[[], nn.Module]] = {
    "a subclass": lambda: Subclass(3, 3),
    "a parametrised layer": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "a hooked layer": hooked,
    "batch statistics": lambda: nn.BatchNorm1d(3).train(),
    "a further parameter": lambda: _with_scale(nn.Linear(3, 3)),
    "a layer without a rule": lambda: nn.PReLU(3),
}


def _with_scale(layer: nn.Module) -> nn.Module:
    layer.register_parameter("scale", nn.Parameter(torch.ones(3)))
    return layer


@pytest.mark.parametrize("what", NOT_SERVED)
def test_no_rule_for(what: str) -> None:
    assert rule_for(NOT_SERVED[what]()) is None


@pytest.mark.parametrize("name", LAYERS)
def test_a_rule_for_every_layer_of_the_table(name: str) -> None:
    layer, _ = build(name)
    assert rule_for(layer) is RULES[type(layer)]
