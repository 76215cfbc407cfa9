"""Complex parameters, which count as pairs of reals; the zoo has pairs that a model reads as complex numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.network.products import WAYS, agree, require_curvature
from tests.zoo import dense_jacobian

N, GRID, KEPT = 5, 7, 3
FORMS = ["complex", "complex layers"]


class Spectral(nn.Module):
    """A Fourier layer between two linear ones, with an even or an odd number of weights before its own."""

    def __init__(self, form: str, before: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(before).double())
        self.lift, self.head = nn.Linear(1, 2).double(), nn.Linear(2, 1).double()
        self.weight = nn.Parameter(torch.randn(2, 2, KEPT, dtype=torch.complex128))
        self.mix = nn.Linear(2, 2, dtype=torch.complex128).requires_grad_(form == "complex layers")

    def forward(self, x: Tensor) -> Tensor:
        h = self.scale.sum() * self.lift(x.unsqueeze(2))
        waves = torch.fft.rfft(h, dim=1)[:, :KEPT]
        mixed = self.mix(torch.einsum("nki,iok->nko", waves, self.weight))
        return self.head(torch.tanh(torch.fft.irfft(mixed, n=GRID, dim=1)) + h).squeeze(2)


def spectral(form: str, before: int = 1) -> tuple[Spectral, tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    model, x = Spectral(form, before), torch.randn(N, GRID).double()
    return model, (x, torch.randn(N, GRID).double()), dense_jacobian(model, x)


CASES = [(form, 1, way) for form in FORMS for way in ("streamed", "layerwise")]
CASES += [("complex", 2, "streamed"), ("complex layers", 2, "layerwise"), ("complex layers", 1, "auto")]


@pytest.mark.parametrize(("form", "before", "way"), CASES)
def test_products_are_those_of_the_dense_jacobian(form: str, before: int, way: str) -> None:
    model, (x, y), J = spectral(form, before)
    lin = co.linearize(model, [(x[:3], y[:3]), (x[3:], y[3:])], co.likelihoods.Gaussian(noise=1.0), **WAYS[way])
    require_curvature(lin, J, times=1 if way == "streamed" else 2)
    v = torch.randn(J.shape[1]).double()
    assert agree(co.GGN(lin) @ v, J.mT @ (J @ v))


@pytest.mark.parametrize("form", FORMS)
def test_factors_and_predictions(form: str) -> None:
    model, data, J = spectral(form)
    lin, G = co.linearize(model, data, co.likelihoods.Gaussian(noise=1.0)), J.mT @ J
    covariance = J @ (G + torch.eye(len(G))).inverse() @ J.mT
    assert agree(
        co.laplace(lin, co.GGN, 1.0, check_mode=False).predict(data[0]).variance.flatten(), covariance.diagonal()
    )
    part = lin.model.selection.positions()["weight"].flatten()
    assert agree(co.KFAC(lin).to_dense()[part][:, part], G[part][:, part])
    v = torch.randn(len(G)).double()
    hessian = torch.func.hessian(lambda theta: _loss(model, lin.unflatten(theta), data))(lin.theta)
    assert agree(co.Hessian(lin) @ v, hessian @ v)
    assert agree(co.GGN(lin).float() @ v.float(), (G @ v).float(), 1e-5)


def _loss(model: nn.Module, weights: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
    held = {name: p.is_complex() for name, p in model.named_parameters()}
    given = {name: torch.view_as_complex(t.clone()) if held[name] else t.clone() for name, t in weights.items()}
    return 0.5 * (torch.func.functional_call(model, given, data[0]) - data[1]).square().sum()


def test_chains_run_together_as_one_by_one() -> None:
    model, data, _ = spectral("complex layers")
    log_posterior = co.sampling.log_posterior(co.linearize(model, data, co.likelihoods.Gaussian(noise=1.0)))

    def run(vectorized: bool) -> dict[str, Tensor]:
        sampler: Any = co.sampling.chains(co.sampling.sgld(log_posterior, 1e-3), 3, vectorized=vectorized)
        seed = torch.Generator().manual_seed(0)
        return co.sampling.run(
            sampler, log_posterior.params, [data], steps=4, generator=seed, progress=False
        ).state.params

    together, apart = run(True), run(False)
    assert together["weight"].shape == (3, 2, 2, KEPT, 2)
    assert all(agree(together[name], apart[name]) for name in apart)


def test_a_file_and_training_under_the_evidence(tmp_path: Path) -> None:
    model, data, _ = spectral("complex layers")
    post = co.laplace(co.linearize(model, data, co.likelihoods.Gaussian(noise=1.0)), co.GGN, 1.0, check_mode=False)
    post.save(tmp_path / "posterior")
    again = co.load(tmp_path / "posterior", model, data)
    assert torch.equal(again.predict(data[0]).variance, post.predict(data[0]).variance)
    before, weight = _loss(model, post.lin.unflatten(post.lin.theta), data), model.weight.detach().clone()
    with pytest.warns(co.errors.ModeWarning):
        trained = co.evidence.train(model, data, "regression", epochs=4, every=2)
    assert _loss(model, trained.lin.unflatten(trained.lin.theta), data) < before
    assert model.weight.is_complex() and not torch.equal(model.weight, weight)
