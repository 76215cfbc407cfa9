"""Gradients of traces and log-determinants for the tensors inside A.

Tests `trace.py`, `logdet.py`.
"""

import pytest
import torch

from curvops.linalg import Dense, Operator, logdet, trace
from tests.linalg.matrices import generator, symmetric


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


class Gram(Operator):
    """B Bᵀ + diag(d) from its factors, with no closed form."""

    def __init__(self, root, shift):
        super().__init__(root, shift)

    @property
    def psd(self):
        return True

    def _size(self):
        return torch.Size((len(self._args[0]), len(self._args[0])))

    def _product(self, block):
        root, shift = self._args
        return root @ (root.mT @ block) + shift.unsqueeze(-1) * block


def gram(n, r, decay=1.0):
    root = random(n, r) * torch.arange(1, r + 1, dtype=torch.float64) ** -decay
    return root.requires_grad_(), (1 + random(n, seed=1).square()).requires_grad_()


def dense_of(root, shift):
    return root @ root.mT + shift.diag()


# Exact: gradcheck in float64.


@pytest.mark.parametrize("kind", ["tensor", "dense operator", "factors"])
@pytest.mark.parametrize("name", ["trace", "logdet", "logdet with a shift", "inv_quad_logdet"])
def test_gradcheck(kind, name):
    root, shift = gram(6, 4)
    b = random(6, 2)
    build = {"tensor": lambda A: A, "dense operator": lambda A: Dense((A + A.mT) / 2), "factors": Gram}[kind]
    inside = (root, shift) if kind == "factors" else (dense_of(root, shift).detach().requires_grad_(),)
    answer = {
        "trace": lambda A: trace(A).value,
        "logdet": lambda A: logdet(A).value,
        "logdet with a shift": lambda A: logdet(A, shift=0.3).value,
        "inv_quad_logdet": lambda A: sum(A.inv_quad_logdet(b, logdet=True)),
    }[name]
    if name == "inv_quad_logdet" and kind == "tensor":
        build = lambda A: Dense((A + A.mT) / 2)  # noqa: E731
    assert torch.autograd.gradcheck(lambda *t: answer(build(*t)), inside, atol=1e-6)


def test_an_estimate_without_gradients_has_none():
    A = symmetric(torch.linspace(1, 2, 300).double())
    assert not trace(A).value.requires_grad and not logdet(A, shift=1.0).value.requires_grad
    with torch.no_grad():
        assert not trace(A.clone().requires_grad_()).value.requires_grad


# Stochastic: the mean over the probes of lᵀ dA r, beside the dense gradient.


@pytest.mark.parametrize("method", ["xtrace", "xnystrace", "hutch++", "hutchinson"])
def test_the_trace_gradient_is_unbiased(method):
    root, shift = gram(300, 20, decay=0.5)
    expected = torch.autograd.grad(dense_of(root, shift).trace(), (root, shift))
    mean, count = [torch.zeros_like(t) for t in expected], 40
    squares = [torch.zeros_like(t) for t in expected]
    g = generator(2)
    for _ in range(count):
        value = trace(Gram(root, shift), method=method, max_matvecs=30, generator=g).value
        for total, square, part in zip(mean, squares, torch.autograd.grad(value, (root, shift))):
            total += part / count
            square += part.square() / count
    for found, square, exact in zip(mean, squares, expected):
        spread = ((square - found.square()).clamp_min(0) / count).sqrt().norm()
        # The error of the mean of a vector has the norm of its standard errors, give or take a few per cent.
        assert (found - exact).norm() <= 1.3 * spread + 1e-10
        assert spread < 0.5 * exact.norm()


def test_xtrace_has_the_exact_gradient_where_it_has_the_exact_trace():
    root = random(200, 5).requires_grad_()
    value = trace(Gram(root, torch.zeros(200, dtype=torch.float64)), max_matvecs=40, generator=generator()).value
    (found,) = torch.autograd.grad(value, root)
    torch.testing.assert_close(found, 2 * root.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize(("preconditioner", "as_tensor"), [("auto", True), (None, False)])
def test_the_logdet_gradient_lies_within_its_standard_error(preconditioner, as_tensor):
    root, shift = gram(300, 60, decay=0.7)
    options = {"shift": 0.5, "rtol": 0.01, "max_matvecs": 280, "preconditioner": preconditioner}
    exact = torch.autograd.grad(torch.logdet(dense_of(root, shift + 0.5)), (root, shift))
    draws = []
    for seed in range(12):
        A = dense_of(root, shift) if as_tensor else Gram(root, shift)
        e = logdet(A, **options, generator=generator(seed))
        draws.append(torch.cat([t.flatten() for t in torch.autograd.grad(e.value, (root, shift))]))
    draws, exact = torch.stack(draws), torch.cat([t.flatten() for t in exact])
    # Entry by entry the mean of 12 draws over its standard error has mean square 11/9; 1.5 is far out.
    z = (draws.mean(0) - exact) / (draws.std(0) / 12**0.5)
    assert z.square().mean() < 1.5
    # The derivative along the tensors themselves: four standard errors, once in 500 seeds by chance.
    along = torch.cat([root.detach().flatten(), shift.detach()])
    slopes = draws @ along
    assert (slopes.mean() - exact @ along).abs() < 4 * slopes.std() / 12**0.5 < 0.1 * (exact @ along).abs()


def test_the_gradient_costs_a_solve_for_each_probe_less_than_half_of_the_value():
    calls = 0

    class Counted(Gram):
        def _product(self, block):
            nonlocal calls
            calls += block.shape[1]
            return super()._product(block)

    root, shift = gram(400, 100, decay=1.5)
    e = logdet(Counted(root, shift), shift=0.5, max_matvecs=390, generator=generator())
    forward = calls
    assert forward == e.matvecs
    e.value.backward()
    assert calls - forward < forward / 2
