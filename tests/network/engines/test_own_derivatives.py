"""Models that differentiate themselves: residuals of equations, forces of energies, by `torch.func` or autograd."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap

import curvops as co
from tests.network.products import WAYS, agree, require_curvature
from tests.zoo import dense_jacobian

N, D_IN = 5, 2


class Field(nn.Module):
    """A field u(x) and what a function of (field, x) makes of its derivatives."""

    def __init__(self, derive: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D_IN, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        self.derive = derive

    def forward(self, x: Tensor) -> Tensor:
        return self.derive(self.body, x)


def total(body: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: body(x).sum()


def by_autograd(body: Any, x: Tensor) -> Tensor:
    energy = body(x)
    return torch.cat([energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]], 1)


def marked(body: Any, x: Tensor) -> Tensor:
    x.requires_grad_(True)
    return by_autograd(body, x)


def laplacian(body: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(body(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(slopes[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(D_IN)]
    return torch.stack(second, 1)


def pulled(body: Any, x: Tensor) -> Tensor:
    u, back = vjp(body, x)
    return torch.cat([u, back(torch.ones_like(u))[0]], 1)


FIELDS: dict[str, Callable[..., Tensor]] = {
    "grad": lambda body, x: torch.cat([body(x), grad(total(body))(x)], 1),
    "grad of points": lambda body, x: vmap(grad(total(body)))(x) + body(x).square(),
    "vjp": pulled,
    "hessian": lambda body, x: vmap(hessian(total(body)))(x).diagonal(dim1=1, dim2=2),
    "jvp": lambda body, x: torch.cat(jvp(body, (x,), (torch.ones_like(x),)), 1),
    "jacfwd": lambda body, x: vmap(jacfwd(body))(x).flatten(1),
    "autograd": lambda body, x: by_autograd(body, x.clone().requires_grad_()),
    "autograd of marked inputs": marked,
    "second derivatives": laplacian,
}


@functools.cache
def field(name: str) -> tuple[Field, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = Field(FIELDS[name]).double(), torch.randn(N, D_IN).double()
    return model, x, dense_jacobian(model, x.clone())


WITHOUT_LAYERS = {"grad of points", "vjp", "hessian", "jvp", "jacfwd"}
"""Their first product streams, and later ones come from a record, also where layers are asked for."""
CASES = [(name, way) for name in FIELDS for way in ("streamed", "layerwise")]


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, way in CASES if way == "layerwise" or name not in WITHOUT_LAYERS]
)
def test_products_are_those_of_the_dense_jacobian(name: str, way: str) -> None:
    model, x, J = field(name)
    y = torch.zeros(N, len(J) // N).double()
    lin = co.linearize(model, [(x[:3], y[:3]), (x[3:], y[3:])], co.likelihoods.Gaussian(noise=1.0), **WAYS[way])
    v = torch.randn(J.shape[1]).double()
    assert agree(co.GGN(lin) @ v, J.mT @ (J @ v))
    assert name not in WITHOUT_LAYERS or lin.plan.in_use == {}
    require_curvature(lin, J, times=1)
    assert not x.requires_grad


@pytest.mark.parametrize("name", FIELDS)
def test_predictions_hessian_and_factors(name: str) -> None:
    model, x, J = field(name)
    y = torch.zeros(N, len(J) // N).double()
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=1.0))
    covariance = J @ (J.mT @ J + torch.eye(J.shape[1])).inverse() @ J.mT
    with torch.no_grad():
        predicted = co.laplace(lin, co.GGN, 1.0, check_mode=False).predict(x)
    assert agree(predicted.variance.flatten(), covariance.diagonal())
    loss, leaves = 0.5 * model(x.clone()).square().sum(), list(model.parameters())
    slopes = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    v = torch.randn(J.shape[1]).double()
    along = torch.cat([g.flatten() for g in slopes]) @ v
    curved = torch.autograd.grad(along, leaves, materialize_grads=True)
    assert agree(co.Hessian(lin) @ v, torch.cat([g.flatten() for g in curved]))
    factored, positions = co.KFAC(lin).to_dense(), lin.model.selection.positions()
    for parameter in lin.plan.others:  # without a layer rule: an exact block
        part = positions[parameter].flatten()
        assert agree(factored[part][:, part], (J.mT @ J)[part][:, part])


def test_an_output_by_name_may_have_layer_rules_that_all_outputs_together_lack() -> None:
    def named(body: Any, x: Tensor) -> Any:
        f = FIELDS["autograd"](body, x)
        return {"u": f[:, :1], "slopes": f[:, 1:]}

    (model, x, J), parts = field("autograd"), Field(named).double()
    parts.load_state_dict(model.state_dict())
    J, y = J[:9], {"u": torch.zeros(3, 1), "slopes": torch.zeros(3, 2)}
    lin = co.linearize(parts, (x[:3], y), dict.fromkeys(y, co.likelihoods.Gaussian(noise=1.0)))
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    assert post.plan(1).chosen["predictions"] == "formed kernel"
    covariance = J @ (J.mT @ J + torch.eye(J.shape[1])).inverse() @ J.mT
    assert agree(post.predict(x[:3])["u"].variance.flatten(), covariance.diagonal()[::3])


def test_gradients_in_the_inputs_of_an_energy_that_asks_whether_they_have_one() -> None:
    def asking(body: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return by_autograd(body, x if x.requires_grad else x.detach().requires_grad_())

    gradients = []
    for derive in (asking, FIELDS["grad"]):
        torch.manual_seed(0)
        model, x = Field(derive).double(), torch.randn(N, D_IN).double()
        lin = co.linearize(model, (x, torch.zeros(N, 3).double()), co.likelihoods.Gaussian(noise=1.0))
        given = x.clone().requires_grad_()
        variance = co.laplace(lin, co.GGN, 1.0, check_mode=False).predict(given).variance
        gradients.append(torch.autograd.grad(variance.sum(), given)[0])
    assert agree(*gradients)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_derivatives_of_the_models_own_where_the_caller_records_none(mode: Any) -> None:
    model, x, _ = field("autograd of marked inputs")
    lin = co.linearize(model, (x, torch.zeros(N, 3).double()), co.likelihoods.Gaussian(noise=1.0))
    expected = model(x.clone()).detach()
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    with mode():
        assert agree(lin.predict(x), expected)
        assert agree(post.predict(x).mean, expected)
        assert post.functions(x, 2).shape == (2, N, 3)
    assert not x.requires_grad


def test_an_energy_without_a_graph_says_what_to_do() -> None:
    def detached(body: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = body(x)
            return torch.cat([energy, torch.autograd.grad(energy.sum(), x)[0]], 1)

    data = torch.randn(N, D_IN).double(), torch.zeros(N, 3).double()
    with pytest.raises(ValueError, match="the model's own autograd.grad by one with create_graph=True"):
        co.linearize(Field(detached).double(), data, co.likelihoods.Gaussian(noise=1.0))
