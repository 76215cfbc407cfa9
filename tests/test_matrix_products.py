"""Matrix products by oneDNN: the numbers and derivatives of torch's own, whatever the processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import curvops as co
from curvops import matrix_products
from curvops.matrix_products import multiply
from tests.zoo import ZOO

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


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
    monkeypatch.setattr(matrix_products, "LEAST", 1)
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
    likelihood = co.likelihoods.Gaussian()
    targets = torch.zeros_like(model(inputs)).detach()
    ours = co.GGN(co.linearize(model, (inputs, targets), likelihood, engine="layerwise"))
    V = torch.randn(ours.shape[0], 2)
    found = ours @ V
    assert calls
    exact = ours.to(torch.float64) @ V.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))
