"""The general engine: where forward mode is missing or wrong, where a replay would be, and what is left untouched."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import curvops as co
from curvops.network import Model, Passes
from tests.network.products import WAYS, columns, push, require_products, walk
from tests.zoo import UNSUPPORTED, ZOO, batches, reference
from tests.zoo_functions import WrongJvp
from tests.zoo_modules import Applied


def has_forward_mode(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether torch itself takes the tangent of an input through a function."""
    with forward_ad.dual_level():
        try:
            output = function(forward_ad.make_dual(torch.zeros(1), torch.ones(1)))
        except NotImplementedError:
            return False
        return forward_ad.unpack_dual(output).tangent is not None


@pytest.mark.parametrize("name", ZOO)
def test_each_network_takes_the_fastest_route_that_is_right(name: str) -> None:
    """Forward mode is replayed wherever it is right, also where the model writes in place."""
    expected = ZOO[name].pushes
    # torch 2.7 keeps a checkpoint's inputs by a function without forward derivative.
    if name == "checkpointed" and not has_forward_mode(lambda x: checkpoint(torch.tanh, x, use_reentrant=False)):
        expected = "double backward"
    found = walk(name, "recorded").plan.routes
    assert found.pushes == expected
    assert found.replayed is (found.pushes == "forward mode")
    assert found.recordable is (found.pushes != "rows")
    assert bool(found.why) is (found.pushes == "rows")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_missing_derivatives_are_an_error_that_says_what_to_do(name: str, way: str) -> None:
    network, message = UNSUPPORTED[name]
    with pytest.raises(ValueError, match=message):
        _ = walk(network, way).plan


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
def test_checkpointed_blocks_run_again_with_the_snapshot(way: str) -> None:
    """A backward pass runs them after the forward pass returned the user's weights to the module."""
    model, inputs = ZOO["checkpointed"].build()
    passes = Passes(Model(model), batches(inputs), **WAYS[way])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    require_products(passes, reference("checkpointed"))


def settings() -> tuple[bool, ...]:
    return (
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


@pytest.mark.parametrize("name", ["transformer_encoder", "lstm", "fused_attention"])
def test_kernels_are_chosen_for_the_length_of_a_call(name: str) -> None:
    before = settings()
    push(walk(name, "recorded"), columns(reference(name).shape[1], 3))
    assert settings() == before

    def failing(*_: Any) -> None:
        raise RuntimeError("no more")

    model, inputs = ZOO[name].build()
    model.register_forward_pre_hook(failing)
    with pytest.raises(RuntimeError, match="no more"):
        _ = Passes(Model(model), batches(inputs)).plan
    assert settings() == before


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, torch.inference_mode) for name in ("resnet_groupnorm", "lstm", "weight_norm")),
        ("resnet_groupnorm", torch.no_grad),
    ],
)
def test_products_inside_no_grad_and_inference_mode(name: str, way: str, mode: type) -> None:
    J, passes = reference(name), walk(name, way)
    with mode():
        require_products(passes, J)


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
@pytest.mark.parametrize("name", ["resnet_groupnorm", "transformer_encoder", "lstm", "bag_max"])
def test_products_do_not_depend_on_how_vectors_are_stored(name: str, way: str) -> None:
    """Every second number of rows of other tensors: the kernel of group norms does not look at strides."""
    J = reference(name)
    require_products(walk(name, way), J, *(columns(n, 4).contiguous()[:, ::2] for n in (J.shape[1], J.shape[0])))


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
def test_model_and_inputs_made_in_inference_mode(way: str) -> None:
    with torch.inference_mode():
        model, inputs = ZOO["resnet_groupnorm"].build()
        passes = Passes(Model(model), batches(inputs.clone()), **WAYS[way])
        assert inputs.clone().is_inference()
    require_products(passes, reference("resnet_groupnorm"))


def test_a_network_of_many_megabytes_inside_inference_mode() -> None:
    """Its gradients are written into one block of memory."""
    model, x = nn.Sequential(nn.Linear(2900, 2900), nn.Tanh(), nn.Linear(2900, 2)), torch.randn(3, 2900)
    with torch.inference_mode():
        lin = co.linearize(model, (x, torch.arange(3) % 2), "classification", engine="streamed")
        inside = co.GGN(lin) @ torch.ones_like(lin.theta)
    assert torch.equal(inside, co.GGN(lin) @ torch.ones_like(lin.theta))


@pytest.mark.parametrize("function", [nn.Sigmoid(), Applied(WrongJvp.apply)], ids=["replayed", "double backward"])
def test_activations_are_freed_with_what_recorded_them(function: nn.Module) -> None:
    """An operation that saves its own output under a hook holds itself for ever, unless the hook hands out another."""
    alive: list[weakref.ref[Tensor]] = []
    model = nn.Sequential(nn.Linear(3, 4), function, nn.Linear(4, 2))
    model[1].register_forward_hook(lambda _, given, output: alive.append(weakref.ref(output)))
    passes = Passes(Model(model), [(torch.randn(5, 3), None)], **WAYS["recorded"])
    for _ in range(2):
        push(passes, columns(26, 3, torch.float32))
    assert passes.plan.in_use == {"recorded": 1} and passes.plan.routes.replayed is isinstance(function, nn.Sigmoid)
    del passes
    assert alive and all(output() is None for output in alive)
