"""The table of layer rules: each against autograd on the layer alone.

Tests `convolution.py` and `layer_rules.py`.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.pytorch_utils import Conv1D

from curvops.network.engines import Rule, rule_for, rule_of
from tests.linalg.operands import close

K, SIX = 2, (5, 5)
Inputs = tuple[Tensor, ...]


def randn(*shape: int) -> Inputs:
    return (torch.randn(shape, dtype=torch.float64),)


def tokens(*shape: int) -> Inputs:
    """Two points with every token of 5, 0 and 4 among them."""
    return ((torch.arange(torch.Size(shape).numel()) % 5).view(shape),)


def changed(layer: nn.Module, **settings: Any) -> nn.Module:
    """The layer with attributes that were set after its construction, as segmentation networks dilate a backbone."""
    for name, value in settings.items():
        setattr(layer, name, value)
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "linear": (lambda: nn.Linear(3, 4), randn(2, 3)),
    "linear_positions": (lambda: nn.Linear(3, 4), randn(2, 5, 3)),
    "transposed_linear": (lambda: Conv1D(4, 3), randn(2, 3)),
    "transposed_linear_grid": (lambda: Conv1D(4, 3), randn(2, 5, 2, 3)),
    "conv": (lambda: nn.Conv2d(2, 4, 3), randn(2, 2, *SIX)),
    "conv_stride": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), randn(2, 2, *SIX)),
    "conv_stride_leaves_rows": (lambda: nn.Conv2d(2, 4, 3, stride=(2, 3)), randn(2, 2, 6, 7)),
    "conv_groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), randn(2, 4, *SIX)),
    "conv_depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), randn(2, 4, *SIX)),
    "conv_same": (lambda: nn.Conv2d(2, 4, 3, padding="same", dilation=2), randn(2, 2, *SIX)),
    "conv_same_of_one_side": (lambda: nn.Conv2d(2, 4, (2, 3), padding="same"), randn(2, 2, *SIX)),
    "conv_circular": (lambda: nn.Conv2d(2, 4, 3, padding=(2, 1), padding_mode="circular"), randn(2, 2, *SIX)),
    "conv_reflect": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect", stride=2), randn(2, 2, *SIX)),
    "conv_replicate_one_side": (lambda: nn.Conv1d(2, 4, 4, padding="same", padding_mode="replicate"), randn(2, 2, 7)),
    "conv_1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), randn(2, 4, 9)),
    "conv_3d": (
        lambda: nn.Conv3d(2, 4, (1, 2, 3), padding=(0, 1, 2), stride=(1, 2, 1), groups=2),
        randn(2, 2, 2, 3, 4),
    ),
    "conv_3d_same": (lambda: nn.Conv3d(2, 3, (2, 1, 3), padding="same", dilation=(1, 1, 2)), randn(2, 2, 2, 3, 4)),
    "conv_dilated_later": (
        lambda: changed(nn.Conv2d(2, 4, 3, padding=1, stride=2), dilation=(2, 1), padding=(2, 1), stride=(1, 2)),
        randn(2, 2, *SIX),
    ),
    "conv_same_dilated_later": (lambda: changed(nn.Conv1d(2, 4, 4, padding="same"), dilation=3), randn(2, 2, 9)),
    "conv_valid_later": (lambda: changed(nn.Conv2d(2, 4, 3, padding=1), padding="valid"), randn(2, 2, *SIX)),
    "conv_circular_changed_in_vain": (
        lambda: changed(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), padding=(2, 2), dilation=(1, 2)),
        randn(2, 2, *SIX),
    ),
    "conv_with_another_kernel": (
        lambda: changed(nn.Conv2d(2, 4, 3, padding=1), weight=nn.Parameter(torch.ones(4, 2, 2, 5))),
        randn(2, 2, *SIX),
    ),
    "transposed_2d_changed": (
        lambda: changed(nn.ConvTranspose2d(2, 3, 3), stride=2, padding=(1, 2), output_padding=1, dilation=(2, 1)),
        randn(2, 2, 3, 4),
    ),
    "transposed_1d": (lambda: nn.ConvTranspose1d(2, 3, 4, stride=2, padding=1), randn(2, 2, 5)),
    "transposed_2d": (lambda: nn.ConvTranspose2d(3, 4, (3, 2), bias=False), randn(2, 3, 3, 4)),
    "transposed_2d_groups": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=(2, 3), padding=(1, 0), output_padding=(1, 2), groups=2),
        randn(2, 4, 2, 2),
    ),
    "transposed_3d": (lambda: nn.ConvTranspose3d(2, 4, 2, stride=(1, 2, 1), groups=2), randn(2, 2, 2, 2, 2)),
    "layer_norm": (lambda: nn.LayerNorm(4), randn(2, 4)),
    "layer_norm_two": (lambda: nn.LayerNorm((3, 4)), randn(2, 5, 3, 4)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), randn(2, 4, *SIX)),
    "group_norm_flat": (lambda: nn.GroupNorm(2, 4), randn(2, 4)),
    "rms_norm_two": (lambda: nn.RMSNorm((3, 4), eps=0.1), randn(2, 5, 3, 4)),
    "rms_norm_of_gemma": (lambda: GemmaRMSNorm(4, eps=0.1), randn(2, 5, 4)),
    "instance_norm_1d": (lambda: nn.InstanceNorm1d(4, affine=True), randn(2, 4, 5)),
    "instance_norm_2d_tracked": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        randn(2, 4, *SIX),
    ),
    "instance_norm_2d_no_longer_tracked": (
        lambda: changed(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), track_running_stats=False),
        randn(2, 4, *SIX),
    ),
    "batch_norm_1d": (lambda: nn.BatchNorm1d(4), randn(2, 4)),
    "batch_norm_1d_positions": (lambda: nn.BatchNorm1d(4), randn(2, 4, 5)),
    "batch_norm_2d": (lambda: nn.BatchNorm2d(4), randn(2, 4, *SIX)),
    "prelu": (lambda: nn.PReLU(4), randn(2, 4)),
    "prelu_positions": (lambda: nn.PReLU(4), randn(2, 4, *SIX)),
    "prelu_of_one_slope": (lambda: nn.PReLU(), randn(2, 4, *SIX)),
    "embedding": (lambda: nn.Embedding(5, 3), tokens(2, 4)),
    "embedding_vector": (lambda: nn.Embedding(5, 3), tokens(2)),
    "embedding_padding": (lambda: nn.Embedding(5, 3, padding_idx=1), tokens(2, 2, 2)),
    "embedding_32_bits": (lambda: nn.Embedding(5, 3, padding_idx=-1), (tokens(2, 4)[0].int(),)),
    "embedding_grown": (lambda: changed(nn.Embedding(3, 3), weight=nn.Parameter(torch.ones(5, 3))), tokens(2, 4)),
    "embedding_padding_set_to_the_last": (lambda: changed(nn.Embedding(5, 3), padding_idx=-1), tokens(2, 4)),
    "bag_grown": (lambda: changed(nn.EmbeddingBag(3, 3), weight=nn.Parameter(torch.ones(5, 3))), tokens(2, 4)),
    "bag_mean": (lambda: nn.EmbeddingBag(5, 3), tokens(2, 4)),
    "bag_mean_padding": (lambda: nn.EmbeddingBag(5, 3, padding_idx=1), (torch.tensor([[1, 1, 1], [1, 2, 2]]),)),
    "bag_sum": (lambda: nn.EmbeddingBag(5, 3, mode="sum"), (tokens(2, 4)[0].int(),)),
    "bag_sum_padding": (lambda: nn.EmbeddingBag(5, 3, mode="sum", padding_idx=0), tokens(2, 4)),
}


def build(name: str) -> tuple[nn.Module, Inputs, Tensor]:
    """The layer, its inputs and its output."""
    make, inputs = LAYERS[name]
    layer = make().double().eval()
    for tensor in [*layer.parameters(), *(b for b in layer.buffers() if b.is_floating_point())]:
        tensor.data.uniform_(0.5, 1.5)
    return layer, inputs, layer(*inputs)


def jacobians(layer: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """d output / d parameter by name, (n, outputs of a point, *shape), by one backward pass for all rows."""
    parameters = dict(layer.named_parameters())
    each = torch.eye(output.numel(), dtype=output.dtype).view(-1, *output.shape)
    rows = torch.autograd.grad(output, [*parameters.values()], each, is_grads_batched=True)
    return {local: of_rows.unflatten(0, (len(output), -1)) for local, of_rows in zip(parameters, rows)}


def the_rule(layer: nn.Module) -> Rule:
    rule = rule_of(type(layer))
    assert rule is not None
    return rule


def without_matrices(name: str) -> bool:
    return any(kind in name for kind in ("norm", "prelu", "transposed_1d", "transposed_2d", "transposed_3d"))


def subsets(layer: nn.Module) -> list[tuple[str, ...]]:
    names = tuple(name for name, _ in layer.named_parameters())
    return [names, *((name,) for name in names if len(names) > 1)]


@pytest.mark.parametrize("name", LAYERS)
def test_products_rows_and_sides_are_those_of_autograd(name: str) -> None:
    """Row by row: forward mode does not exist for every layer, and is wrong for padding.

    Rows are sums of outer products of two sides over the positions, where the layer multiplies by a matrix.
    """
    layer, inputs, output = build(name)
    rule = the_rule(layer)
    assert rule_for(layer) is rule
    kept = rule.keep(layer, *inputs)
    J = jacobians(layer, output)
    s = torch.randn(len(output), K, *output.shape[1:], dtype=output.dtype)
    for names in subsets(layer):
        tangents = {local: torch.randn(K, *J[local].shape[2:], dtype=output.dtype) for local in names}
        expected = sum(torch.einsum("nop,kp->nko", J[x].flatten(2), tangents[x].flatten(1)) for x in names)
        close(rule.push(layer, kept, tangents), expected.view_as(s))
        rows, pulled = rule.rows(layer, kept, s, names), rule.pull(layer, kept, s, names)
        assert set(rows) == set(pulled) == set(names)
        left = rule.left(layer, kept, s, names)
        assert (left is None) is (without_matrices(name) or "weight" not in names)
        sides = {} if left is None else outer(layer, left, rule.right(layer, kept, names), names)
        for local in names:
            close(rows[local], torch.einsum("nko,no...->nk...", s.flatten(2), J[local]))
            close(pulled[local], rows[local].sum(0))
            close(sides.get(local, rows[local]), rows[local])


def outer(layer: nn.Module, left: Tensor, right: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The rows (n, R, *shape) that the two sides stand for; indices stand for one-hot rows."""
    if not right.is_floating_point():
        right = nn.functional.one_hot(right, len(layer.weight)).to(left.dtype)
    products = torch.einsum("nrgtp,ngtq->nrgpq", left, right)
    weight = products[..., :-1] if "bias" in names else products
    weight = weight.mT if the_rule(layer).matrix_is_transposed else weight
    rows = {"weight": weight.reshape(*products.shape[:2], *layer.weight.shape)}
    return rows | ({"bias": products[..., -1].flatten(2)} if "bias" in names else {})


NOT_SERVED: dict[str, Callable[[], nn.Module]] = {
    "a subclass, which may do anything": lambda: type("Linear", (nn.Linear,), {})(3, 3),
    "batch statistics": lambda: nn.BatchNorm1d(3).train(),
    "no statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "statistics that change": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True).train(),
    "a further parameter": lambda: changed(nn.Linear(3, 3), scale=nn.Parameter(torch.ones(3))),
    "a class that derives from Conv1D": lambda: type("Conv1D", (Conv1D,), {})(3, 3),
}


@pytest.mark.parametrize("what", NOT_SERVED)
def test_no_rule_for(what: str) -> None:
    assert rule_for(NOT_SERVED[what]()) is None


def test_looking_up_the_rule_of_a_class_does_not_keep_the_class() -> None:
    """A notebook that defines its model again lets go of the data that the methods of the earlier one refer to."""
    kind = type("Mine", (nn.Linear,), {})
    alive = weakref.ref(kind)
    assert rule_of(kind) is None
    del kind
    gc.collect()
    assert alive() is None
