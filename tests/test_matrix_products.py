"""Matrix products by oneDNN: the numbers and derivatives of torch's own, whatever the processor.

Tests `eager_mode.py`, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import curvops as co
from curvops import matrix_products
from curvops.eager_mode import EagerMode
from curvops.matrix_products import add_product, fast_products, has_slow_products, multiply, multiply_each
from tests.zoo import ZOO

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")

needs_mode = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "ignore_compile_internals"),
    reason="this torch refuses operators of higher order in modes",
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The second factors that oneDNN is given, on a processor on which it is faster whatever the size."""
    found: list[Tensor] = []
    run = torch.ops.mkldnn._linear_pointwise

    def noted(a: Tensor, b: Tensor, *rest: object) -> Tensor:
        found.append(b)
        return run(a, b, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    monkeypatch.setattr(matrix_products, "_is_of_amd", lambda: True)
    for limit, size in (("LEAST", 1), ("LEAST_SIDE", 2), ("WIDE", 1)):
        monkeypatch.setattr(matrix_products, limit, size)
    return found


def factors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(7, 5, dtype=dtype), torch.randn(5, 3, dtype=dtype), torch.randn(3, dtype=dtype)


@needs_onednn
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    "stored",
    [
        Tensor.contiguous,
        lambda x: x.mT.contiguous().mT,
        lambda x: x.repeat(1, 2)[:, : x.shape[1]],
        lambda x: x.mT.repeat(1, 2)[:, : len(x)].mT,
        lambda x: x.repeat(2, 2)[::2, ::2],
    ],
)
def test_products_are_those_of_float64(
    stored: Callable[[Tensor], Tensor], added: bool, calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = factors()
    a, b, c = stored(a), stored(b), stored(torch.stack([c, c]))[0]
    expected = a.double() @ b.double() + (c.double() if added else 0.0)
    with torch.no_grad():
        found = multiply(a, b, c if added else None)
        assert len(calls) == 1 and found.is_contiguous()
        assert calls[0].is_contiguous() or calls[0].mT.is_contiguous()
        monkeypatch.setattr(matrix_products, "_is_of_amd", lambda: False)
        others = multiply(a, b, c if added else None)
    assert len(calls) == 1
    for product in (found, others):
        torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("bytes_at_once", [1, 24, 2**20])
def test_a_product_is_added_to_a_part_of_a_matrix(
    bytes_at_once: int, calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is formed at a time, down to a row, and in what order the factors are stored."""
    monkeypatch.setattr(matrix_products, "ADDED_BYTES", bytes_at_once)
    whole, a, b = torch.randn(9, 8), torch.randn(5, 7).mT, torch.randn(5, 6)[:, ::2]
    expected = whole.double()
    expected[1:8, 2:5] += a.double() @ b.double()
    with torch.no_grad():
        add_product(whole[1:8, 2:5], a, b)
    assert len(calls) == {1: 0, 24: 3, 2**20: 1}[bytes_at_once]  # a product of one row is left to torch
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("given", [False, True])
def test_groups_of_matrices_have_a_product_each(groups: int, given: bool, calls: list[Tensor]) -> None:
    a, b = torch.randn(groups, 5, 7).mT, torch.randn(groups, 5, 6)[..., ::2]
    out = torch.full((groups, 7, 3), torch.nan) if given else None
    with torch.no_grad():
        found = multiply_each(a, b, out)
    assert len(calls) == groups and (out is None or found is out)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@needs_onednn
def test_what_has_derivatives_or_another_dtype_is_left_to_torch(calls: list[Tensor]) -> None:
    a, b, c = factors()
    tangent = torch.randn_like(a)
    with torch.no_grad():
        with forward_ad.dual_level():
            dual = multiply(forward_ad.make_dual(a, tangent), b, c)
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent @ b)
        _, along = torch.func.jvp(lambda x: multiply(x, b, c), (a,), (tangent,))
        torch.testing.assert_close(along, tangent @ b)
        batched = torch.func.vmap(lambda x: multiply(x, b, c))(torch.stack([a, tangent]))
        torch.testing.assert_close(batched, torch.stack([a @ b + c, tangent @ b + c]))
        A, B, C = factors(torch.float64)
        assert torch.equal(multiply(A, B, C), torch.addmm(C, A, B)) and torch.equal(multiply(A, B), A @ B)
    a.requires_grad_()
    (gradient,) = torch.autograd.grad(multiply(a, b, c).sum(), a)
    torch.testing.assert_close(gradient, torch.ones(7, 3) @ b.mT)
    assert not calls


@needs_onednn
@pytest.mark.parametrize("name", ["mlp", "cnn", "sequence_layernorm"])
def test_curvature_products_are_those_of_float64(name: str, calls: list[Tensor]) -> None:
    model, inputs = ZOO[name].build()
    model, inputs = model.float(), inputs.float()
    likelihood = co.likelihoods.Gaussian(noise=1.0)
    targets = torch.zeros_like(model(inputs)).detach()
    ours = co.GGN(co.linearize(model, (inputs, targets), likelihood, engine="layerwise"))
    V = torch.randn(ours.shape[0], 2)
    found = ours @ V
    assert calls
    exact = ours.to(torch.float64) @ V.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (2, 7, 5)])
def test_passes_have_the_graph_and_the_derivatives_of_torch(
    shape: tuple[int, ...], bias: bool, calls: list[Tensor]
) -> None:
    """Forward and backward passes, twice differentiated, of one column and of several by a batching rule."""
    layer, x = nn.Linear(5, 3, bias=bias), torch.randn(shape, requires_grad=True)
    u = torch.randn(4, *shape[:-1], 3)
    graphs, found = [], []
    for context in (nullcontext, fast_products):
        with context():
            f = layer(x)
            graphs.append(f.grad_fn.name())
            wanted = [x, *layer.parameters()]
            once = torch.autograd.grad(f, wanted, u[0], create_graph=True)
            twice = torch.autograd.grad(once[0].square().sum(), layer.weight, retain_graph=True)
            batched = torch.autograd.grad(f, wanted, u, is_grads_batched=True)
            found.append([f, *once, *twice, *batched])
    assert calls and graphs[0] == graphs[1]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@needs_onednn
def test_products_of_torch_that_onednn_cannot_compute_are_left_to_it(calls: list[Tensor]) -> None:
    a, b, c = factors()
    tangent = torch.randn_like(a)
    with fast_products():
        torch.testing.assert_close(torch.addmm(c, a, b, alpha=2.0), c + 2 * a @ b)
        torch.testing.assert_close(torch.addmm(c[:1], a, b), c[:1] + a @ b)
        torch.testing.assert_close(torch.addmm(torch.ones(7, 3), a, b), 1 + a @ b)
        A, B, C = factors(torch.float64)
        torch.testing.assert_close(torch.addmm(C, A, B), C + (A.unsqueeze(2) * B).sum(1))
        assert all(each.dtype == torch.float32 for each in calls)
        calls.clear()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(a, tangent) @ b
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, (tangent.unsqueeze(2) * b).sum(1))
            constant = forward_ad.make_dual(a, torch._efficientzerotensor(a.shape)) @ b
            torch.testing.assert_close(forward_ad.unpack_dual(constant).primal, (a.unsqueeze(2) * b).sum(1))
        assert len(calls) > 2
        found = torch.func.vmap(lambda x: x @ b)(torch.stack([a, tangent]))
    torch.testing.assert_close(found, torch.stack([a @ b, tangent @ b]))


class Passing(EagerMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@needs_onednn
def test_the_mode_stays_out_of_transforms_and_of_other_modes(
    calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = factors()

    def product(x: Tensor) -> Tensor:
        with fast_products():
            return x @ b

    torch.func.vmap(product)(torch.stack([a, a]))
    torch.func.jvp(product, (a,), (a,))
    with Passing():
        product(a)
    with monkeypatch.context() as patched:
        patched.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
        product(a)
    assert not calls
    product(a)
    assert len(calls) == 1


@needs_onednn
@needs_mode
def test_operators_of_higher_order_are_passed_on(calls: list[Tensor]) -> None:
    q = torch.randn(2, 2, 16, 16)
    with fast_products():
        found = flex_attention(q, q, q)
    torch.testing.assert_close(found, nn.functional.scaled_dot_product_attention(q, q, q))


@needs_onednn
@needs_mode
def test_networks_with_wide_layers_take_it_in_every_pass(calls: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = ZOO["mlp"].build()
    model, inputs = model.float(), inputs.float()
    lin = co.linearize(model, (inputs, torch.zeros_like(model(inputs)).detach()), co.likelihoods.Gaussian(noise=1.0))
    calls.clear()
    torch.testing.assert_close(lin.outputs(), model(inputs).detach(), rtol=1e-5, atol=1e-5)
    forward = len(calls)
    gradient = lin.gradient()
    assert forward and len(calls) > 2 * forward
    torch.testing.assert_close(gradient.double(), lin.cast(torch.float64).gradient(), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(matrix_products, "WIDE", 10**6)
    assert not has_slow_products(model.modules())
    assert not has_slow_products([nn.Embedding(1000, 1000)])
