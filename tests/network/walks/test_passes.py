"""The walk over the data: what is kept, what is read again, who may share it, and what gradients pass through.

Tests `walk.py` and `budget.py`.
"""

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from curvops.network import Model, Passes
from tests.network.products import WAYS, agree, columns, pull, push, walk
from tests.threads import run_in_threads
from tests.zoo import ZOO, batches, reference


class Failing:
    """Batches that may fail at the end."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.fail = items, False

    def __iter__(self) -> Iterator[Any]:
        yield from self.items
        if self.fail:
            raise RuntimeError("the data changed")


def failing(name: str, way: str) -> tuple[Passes, Failing]:
    model, inputs = ZOO[name].build()
    source = Failing(batches(inputs))
    return Passes(Model(model), source, **WAYS[way]), source


@pytest.mark.parametrize("way", ["recorded", "layerwise"])
def test_what_is_kept_does_not_change_with_the_users_tensors(way: str) -> None:
    model, inputs = ZOO["mlp"].build()
    passes, J = Passes(Model(model), batches(inputs), **WAYS[way]), reference("mlp")
    V = columns(J.shape[1], 3)
    for _ in range(2):
        push(passes, V)
    inputs.mul_(2)
    assert passes.plan.in_use and agree(push(passes, V), J @ V)


def test_engines_built_in_a_walk_that_failed_are_not_used_again() -> None:
    """The data were other data then: they may be right again in the next walk."""
    passes, source = failing("inplace_relu", "layerwise")
    right, source.fail = source.items, True
    source.items = [(inputs + 1, label) for inputs, label in right]
    V = columns(passes.model.theta.numel(), 3)
    with pytest.raises(RuntimeError, match="the data changed"):
        push(passes, V)
    source.items, source.fail = right, False
    assert agree(push(passes, V), reference("inplace_relu") @ V)


@pytest.mark.parametrize(("name", "way"), [("lstm", "streamed"), ("resnet_groupnorm", "layerwise")])
def test_two_threads_share_one_model(name: str, way: str) -> None:
    """Two walks over the same model, each from two threads: the module can hold one set of values at a time."""
    model, inputs = ZOO[name].build()
    network, J = Model(model), reference(name)
    walks = [Passes(network, batches(inputs), **WAYS[way]) for _ in range(2)]
    V, U = columns(J.shape[1], 2), columns(J.shape[0], 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def work(passes: Passes) -> None:
        for _ in range(4):
            assert agree(push(passes, V), J @ V) and agree(pull(passes, U), J.mT @ U)

    run_in_threads(*(partial(work, passes) for passes in walks for _ in range(2)))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda passes: pickle.loads(pickle.dumps(passes))])
@pytest.mark.parametrize("name", ["lstm", "resnet_batchnorm"])
def test_copies_leave_caches_behind_and_still_work(name: str, copied: Any) -> None:
    passes, J = walk(name, "layerwise"), reference(name)
    V = columns(J.shape[1], 2)
    push(passes, V)
    assert passes.plan.in_use
    other = copied(passes)
    assert other.plan.in_use == {}
    assert other.model.module is not passes.model.module
    assert agree(push(other, V), J @ V)


@pytest.mark.parametrize("name", ["mlp", "embedding_padding"])
@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
def test_gradients_flow_through_push_and_pull(name: str, way: str) -> None:
    """First and second derivatives; push and pull are each other's adjoints, so their gradients are each other."""
    passes, J = walk(name, way), reference(name)
    V = columns(J.shape[1], 3)
    for _ in range(2):
        push(passes, V)
    vector = torch.randn(J.shape[1], 1, dtype=torch.float64, requires_grad=True)
    pushed = push(passes, vector)
    weights = torch.randn_like(pushed, requires_grad=True)
    (gradient,) = torch.autograd.grad((weights * pushed**2).sum(), vector, create_graph=True)
    assert agree(gradient, J.mT @ (2 * weights * pushed).detach())
    (second,) = torch.autograd.grad(gradient.sum(), vector)
    ones = torch.ones_like(gradient)
    assert agree(second, J.mT @ (2 * weights.detach() * (J @ ones)))


def test_no_graph_without_being_asked() -> None:
    passes = walk("mlp", "layerwise")
    V = columns(passes.model.theta.numel(), 1)
    assert not push(passes, V).requires_grad
    with torch.no_grad():
        assert not push(passes, V.requires_grad_()).requires_grad
