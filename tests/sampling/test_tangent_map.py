"""The tangent-kernel form: its exact three terms, their estimates, and its inverse."""

import pytest
import torch

import curvops as co
from tests.sampling.repriors import NOISE, flat, jacobian, mlp, named, one, precision, regression


def built(width=4, reg=0.5, n=4):
    model = mlp(3, width, 2)
    return co.sampling.reprior(model, regression(n), NOISE, reg, "ntk", prior_precision=precision(model))


def test_without_its_third_term_the_log_determinant_is_another():
    """By the network's derivatives, taken here by autograd alone."""
    rep = built()
    phi = one(rep)
    like, (x, y), model = flat(phi), regression(4), mlp(3, 4, 2)
    scale = torch.cat(
        [torch.full((p.numel(),), precision(model)[n], dtype=p.dtype) for n, p in model.named_parameters()]
    ).rsqrt()

    def f(v):
        parts = (scale * v).split([12, 4, 8, 2])
        return (torch.tanh(x @ parts[0].view(4, 3).mT + parts[1]) @ parts[2].view(2, 4).mT + parts[3]).flatten()

    J = torch.autograd.functional.jacobian(f, like)
    alpha = torch.linalg.solve(J @ J.mT + 0.5 * torch.eye(8).double(), y.flatten() - f(like))
    hessians = torch.stack([torch.autograd.functional.hessian(lambda v, i=i: f(v)[i], like) for i in range(8)])
    curved = torch.eye(26) + torch.einsum("i,ijk->jk", alpha, hessians)
    R = hessians @ (J.mT @ alpha)
    first = -torch.linalg.slogdet(torch.eye(8) + J @ J.mT / 0.5)[1]
    second = torch.linalg.slogdet(curved)[1]
    third = torch.linalg.slogdet(torch.eye(8) - R @ torch.linalg.solve(curved, J.mT) / 0.5)[1]
    found = rep.logdet(phi) - scale.log().sum()
    torch.testing.assert_close(found, first + second + third, rtol=1e-10, atol=1e-10)
    assert abs(float(third)) > 0.1 and abs(float(second)) > 0.01
    torch.testing.assert_close(flat(rep.map(phi)), scale * (like + J.mT @ alpha), rtol=1e-10, atol=1e-10)


def test_chains_that_are_mapped_together_have_the_values_of_each(two_threads):
    """With 170 weights: on several threads torch's LU of two such matrices is wrong."""
    rep = built(width=28)
    phis = [one(rep, seed) for seed in (0, 1)]
    together = torch.vmap(rep.energy)({name: torch.stack([phi[name] for phi in phis]) for name in phis[0]})
    torch.testing.assert_close(together, torch.stack([rep.energy(phi) for phi in phis]), rtol=1e-10, atol=1e-10)


def test_the_energy_has_a_gradient():
    rep = built(width=2, n=2)
    phi = one(rep)
    assert torch.autograd.gradcheck(lambda v: rep.energy(named(v, phi)), flat(phi).requires_grad_(), rtol=1e-6)


def test_the_inverse_is_found_where_the_map_does_not_fold():
    rep = built(width=3, reg=2.0, n=3)
    phi = one(rep)
    torch.testing.assert_close(flat(rep.inverse(rep.map(phi))), flat(phi), rtol=1e-8, atol=1e-8)


def test_where_no_inverse_is_found_it_says_so():
    rep = built(width=1, reg=1e-4, n=3)
    far = {name: 3 + block for name, block in one(rep).items()}
    with pytest.raises(ValueError, match="no φ with T"):
        rep.inverse(far)


def test_the_estimate_holds_the_exact_value():
    """Seeded; a 95 % interval, widened by the bias bound: a false alarm in 20 other seeds at most."""
    rep = built(width=45, reg=2.0)
    phi = one(rep)
    generator = torch.Generator().manual_seed(0)
    found = rep.estimated_logdet(phi, rtol=2e-3, generator=generator, max_matvecs=None)
    low, high = found.interval()
    exact = rep.logdet(phi)
    assert found.samples > 1 and float(found.stderr) > 0
    assert bool(low <= exact) and bool(exact <= high) and float(high - low) < 0.05 * abs(float(exact))


def test_of_few_weights_quadrature_is_exact():
    rep = built()
    phi = one(rep)
    found = rep.estimated_logdet(phi)
    assert found.samples == 0
    assert float(found) == pytest.approx(float(rep.logdet(phi)), abs=1e-6)  # between lies a solve to 1e-10


def test_of_a_linear_model_it_is_the_mean_and_twice_the_shrinkage():
    x, y = regression()
    model = torch.nn.Linear(3, 2, bias=False).double()
    rep = co.sampling.reprior(model, (x, y), NOISE, form="ntk")
    sigma = torch.linalg.inv(torch.eye(3) + x.mT @ x / NOISE)
    phi = one(rep)
    expected = sigma @ x.mT @ y / NOISE + sigma @ phi["weight"].mT
    torch.testing.assert_close(rep.map(phi)["weight"].mT, expected, rtol=1e-10, atol=1e-10)
    J = jacobian(rep, phi)
    assert float(torch.linalg.slogdet(J)[1]) == pytest.approx(float(2 * torch.linalg.slogdet(sigma)[1]), abs=1e-9)


def test_a_function_needs_no_readout():
    x, y = regression(4, outputs=1)
    params = {"u": torch.ones(3, 2).double(), "v": torch.ones(2, 1).double()}
    rep = co.sampling.reprior((lambda p, at: (at @ p["u"]).tanh() @ p["v"], params), (x, y), NOISE, 1.0, "ntk")
    phi = one(rep)
    torch.testing.assert_close(rep.logdet(phi), torch.linalg.slogdet(jacobian(rep, phi))[1], rtol=1e-10, atol=1e-10)
    assert rep.readout == () and rep.gradient_gap(rep.normal(2)).readout is None
