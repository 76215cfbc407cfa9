"""A walk over the public face on `cuda:0`: it runs, its results are on the device, and they equal the CPU's.

The draws of a GPU's generators are other numbers: on one, what rests on draws is compared in shape alone.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake"
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from curvops import linalg, metrics
from curvops.linalg.core import vectors
from curvops.network import likelihoods
from tests.posterior.trained import problem
from tests.randomness import perceptron
from tests.zoo_modules import Applied

pytestmark = pytest.mark.gpu


class PointOnHost:
    """A point that moves itself, as those of libraries of graphs do."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> PointOnHost:
        return PointOnHost(self.x.to(device))


def stacked(points: Any) -> Tensor:
    """Return the tensor of a list of points, or that which is given."""
    return torch.stack([point.x for point in points]) if isinstance(points, list) else points


def written_in_place(logits: Tensor) -> Tensor:
    """Return a linear function of the logits, which only a trial shows to be one."""
    logits = logits.clone()
    logits[:, 0] += logits[:, 1]
    return logits


def joined_points(w: World) -> list[Tensor]:
    """Return results at points on the host, which are moved by themselves, as tensors or inside their attributes."""
    _, given, labels = trained("classification")
    points = [PointOnHost(x) for x in given]
    results = []
    for collate in (list, stacked):
        model = nn.Sequential(Applied(stacked), w.fresh()[0])
        lin = co.linearize(model, (points, labels), "classification", collate=collate)
        results += [co.GGN(lin) @ w.V, lin.predict(points[:2]), co.DiagonalGGN(lin).diagonal()]
    return results


@functools.cache
def trained(likelihood: str) -> tuple[nn.Module, Tensor, Tensor]:
    return problem(likelihood, n=12, outputs=3 if likelihood == "classification" else 2)


class World:
    """What the rows below are given, on one device. What is built from it once is built once."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.drew = False

    def generator(self, seed: int = 0) -> torch.Generator:
        self.drew = True
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, seed: int = 5) -> Tensor:
        drawn = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device)

    def fresh(self) -> tuple[nn.Module, Tensor, Tensor]:
        """A classifier trained to a mode, its inputs and labels."""
        model = perceptron(4, 6, 3, seed=3)
        model.load_state_dict(trained("classification")[0].state_dict())
        return model.to(self.device), *(t.to(self.device) for t in trained("classification")[1:])

    def linearized(self, parameters: Any = None, data: Any = None, **options: Any) -> Any:
        model, *own = self.fresh()
        return co.linearize(model, tuple(own) if data is None else data, "classification", parameters, **options)

    @functools.cached_property
    def lin(self) -> Any:
        return self.linearized()

    def at(self, params: Any) -> Any:
        """The linearisation at these weights."""
        model, x, y = self.fresh()
        model.load_state_dict(params, strict=False)
        return co.linearize(model, (x, y), "classification")

    @functools.cached_property
    def other(self) -> Any:
        return co.linearize(self.fresh()[0], (self.x, self.labels[:5]), "classification")

    @functools.cached_property
    def regression(self) -> Any:
        model, x, y = trained("regression")
        layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        layers.load_state_dict(model.state_dict())
        return co.linearize(
            layers.to(self.device), (x.to(self.device), y.to(self.device)), co.likelihoods.Gaussian(noise=1.0)
        )

    @functools.cached_property
    def x(self) -> Tensor:
        return self.normal(5, 4, seed=8)

    @functools.cached_property
    def post(self) -> Any:
        return co.laplace(self.lin, co.GGN, 1.0)

    @functools.cached_property
    def draws(self) -> Tensor:
        return self.lin.theta + 0.1 * self.normal(8, self.lin.num_parameters)

    @functools.cached_property
    def dense(self) -> Tensor:
        """A positive definite matrix."""
        root = self.normal(30, 30)
        return root @ root.mT / 30 + torch.eye(30, dtype=torch.float64, device=self.device)

    @functools.cached_property
    def A(self) -> Any:
        return linalg.Dense(self.dense, psd=True)

    @functools.cached_property
    def b(self) -> Tensor:
        return self.normal(30, 3, seed=6)

    @functools.cached_property
    def V(self) -> Tensor:
        return self.normal(self.lin.num_parameters, 2)

    @functools.cached_property
    def density(self) -> Any:
        return co.sampling.log_posterior(self.fresh()[0], "classification", data_size=12)

    @functools.cached_property
    def chain(self) -> Any:
        sampler = co.sampling.chains(co.sampling.sgld(self.density, 1e-3), 4)
        return co.sampling.run(sampler, self.params, self.batches, steps=8, generator=self.generator())

    @functools.cached_property
    def params(self) -> Any:
        return dict(self.fresh()[0].named_parameters())

    @functools.cached_property
    def batches(self) -> Any:
        return [self.fresh()[1:]]

    @functools.cached_property
    def probabilities(self) -> Tensor:
        return self.normal(12, 3).softmax(-1)

    @functools.cached_property
    def labels(self) -> Tensor:
        return self.fresh()[2]


def identity_minus(K: Tensor) -> Any:
    return linalg.Dense(K - 3 * torch.eye(len(K), dtype=K.dtype, device=K.device))


def reloaded(w: World, save: Callable[[Path], object]) -> Any:
    """What was saved, loaded with the network and the data."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "saved")
        model, x, y = w.fresh()
        return co.load(Path(folder) / "saved", model, (x, y))


def preferences(w: World) -> Any:
    """Rewards of pairs of items, the first one preferred in every other pair."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double().to(w.device)
    for p in model.parameters():
        nn.init.uniform_(p, -0.5, 0.5, torch.Generator(w.device).manual_seed(p.numel()))
    pairs, first = w.normal(6, 2, 4), torch.arange(6, device=w.device) % 2
    lin = co.linearize(co.likelihoods.RewardPairs(model), (pairs, first), likelihoods.BradleyTerry())
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    return post.predict(pairs), post.probabilities(pairs)


def sampled(name: str, **options: Any) -> Callable[[World], Any]:
    """Steps of a sampler, of one chain and of three at a time."""

    def call(w: World) -> Any:
        sampler = getattr(co.sampling, name)(w.density, 1e-3, **options)
        many = co.sampling.chains(sampler, 3)
        state, info = many.update(many.init(w.params, generator=w.generator()), w.batches[0])
        return state.theta, info.log_posterior, ran(w, sampler)

    return call


def ran(w: World, sampler: Any, **options: Any) -> Tensor:
    """Three draws of a chain."""
    options |= {"steps": 3, "generator": w.generator()}
    return co.sampling.run(sampler, w.params, w.batches, **options).theta


def function_space(w: World, prior: Any, streamed: bool = False) -> Any:
    """What Laplace's approximation in function space gives, with the Gram matrix or by products."""
    lin = w.linearized()
    if streamed:
        lin.memory.room = lambda: 0  # type: ignore[method-assign]
    process = co.gp.laplace_gp(lin, prior)
    assert process.is_formed != streamed
    return {
        "predict": process.predict(w.x),
        "joint": process.predict(w.x, joint=True),
        "probabilities": process.probabilities(w.x),
        "sample": process.sample(3, generator=w.generator()),
        "outputs": process.outputs,
        "evidence": process.log_evidence(generator=w.generator()),
    }


def posterior(curvature: Any) -> Callable[[World], Any]:
    """What a posterior of this curvature gives."""

    def call(w: World) -> Any:
        post = co.laplace(w.lin, curvature if isinstance(curvature, type) else curvature(w.lin), 1.0)
        return {
            "predict": post.predict(w.x),
            "joint": post.predict(w.x, joint=True),
            "probabilities": post.probabilities(w.x),
            "bridge": post.probabilities(w.x, link="bridge"),
            "mc": post.probabilities(w.x, link="mc", generator=w.generator()),
            "uncertainty": post.uncertainty(w.x, generator=w.generator()),
            "sample": post.sample(3, generator=w.generator()),
            "functions": post.functions(w.x, 3, generator=w.generator()),
            "deviations": post.deviations(2, generator=w.generator()),
            "trace": post.trace(co.GGN(w.lin), generator=w.generator()),
            "evidence": post.log_evidence(generator=w.generator()),
            "weights": post.effective_parameters(generator=w.generator()),
            "penalty": post.penalty(w.params),
            "log_likelihood": post.log_likelihood(w.x, w.labels[:5], generator=w.generator()),
            "probit's log_likelihood": post.log_likelihood(w.x, w.labels[:5], link="probit"),
            "precision": post.precision @ w.V,
        }

    return call


CURVATURES: dict[str, Any] = {
    "GGN": co.GGN,
    "Hessian": co.Hessian,
    "EmpiricalFisher": co.EmpiricalFisher,
    "KFAC": co.KFAC,
    "EKFAC": co.EKFAC,
    "DiagonalGGN": co.DiagonalGGN,
    "BlockDiagonal": co.BlockDiagonal,
    "low_rank": lambda lin: co.low_rank(
        co.GGN(lin), rank=10, generator=torch.Generator(lin.theta.device).manual_seed(0)
    ),
}
LIKELIHOODS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "Bernoulli": (likelihoods.Bernoulli(), lambda f: (f > 0).double()),
    "Poisson": (likelihoods.Poisson(), lambda f: f.exp().round()),
    "Gaussian": (likelihoods.Gaussian(0.3), lambda f: f + 0.1),
    "HeteroscedasticGaussian": (likelihoods.HeteroscedasticGaussian(), lambda f: f[:, :2]),
    "FromDistribution": (
        lambda f: torch.distributions.Independent(torch.distributions.LogNormal(f, 1.0), 1),
        lambda f: f.exp() + 0.1,
    ),
    "Categorical": (likelihoods.Categorical(label_smoothing=0.1), lambda f: f.argmax(1)),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(reduction="sum"), lambda f: f.argmax(1)),
}


def likelihood_row(spec: Any, targets: Callable[[Tensor], Tensor]) -> Callable[[World], Any]:
    def call(w: World) -> Any:
        model = perceptron(4, 5, 4, seed=1).to(w.device)
        lin = co.linearize(model, (w.x, targets(model(w.x).detach())), spec)
        post = co.laplace(lin, co.KFAC(lin, fisher="empirical"), 1.0, check_mode=False)
        noise = lin.likelihood.form == "numbers"
        return {
            "targets": post.predict(w.x, noise=noise).covariance_matrix,
            "uncertainty": post.uncertainty(w.x, generator=w.generator()),
            "ggn": co.GGN(lin).to_dense(),
            "hessian": co.Hessian(lin).to_dense(),
            "gradient": lin.gradient(),
            "log_likelihood": lin.log_likelihood(),
            "fisher": co.EmpiricalFisher(lin).to_dense(),
            "monte carlo": co.GGN(lin, mc_samples=2, generator=w.generator()).to_dense(),
            "diagonal": co.DiagonalGGN(lin).diagonal(),
        }

    return call


FACE: dict[str, Callable[[World], Any]] = {
    **{f"laplace({name})": posterior(curvature) for name, curvature in CURVATURES.items()},
    **{f"likelihoods.{name}": likelihood_row(*pair) for name, pair in LIKELIHOODS.items()},
    **{f"sampling.{name}": sampled(name) for name in ("sgld", "sghmc", "sgnht", "baoa", "lmc", "hmc", "pcn")},
    "gradient": lambda w: (w.lin.gradient(), w.lin.gradients() @ w.V, w.lin.log_likelihood()),
    "flatten": lambda w: w.lin.flatten(w.lin.unflatten(w.V[:, 0])),
    "predict": lambda w: w.lin.predict(w.x),
    "jacobian": lambda w: (
        w.lin.jacobian() @ w.V,
        w.lin.jacobian(w.x).mT @ w.normal(15, 2),
        w.lin.jacobian(w.x).to_dense(),
    ),
    "Gradients": lambda w: w.lin.gradients().to_dense(),
    "Jacobian": lambda w: w.lin.jacobian(w.x, differentiable=True).to_dense(),
    "engines": lambda w: [co.GGN(w.linearized(engine=e)) @ w.V for e in ("autodiff", "layerwise", "streamed")],
    "loader on the host": lambda w: (
        co.GGN(w.linearized(data=DataLoader(TensorDataset(*trained("classification")[1:]), batch_size=5))) @ w.V
    ),
    "points of any kind": lambda w: joined_points(w),
    "data on the host": lambda w: co.GGN(w.linearized(data=trained("classification")[1:])) @ w.V,
    "inputs on the host": lambda w: w.post.predict(w.x.cpu()).variance,
    "last layer": lambda w: co.KFAC(w.linearized("last_layer")).to_dense(),
    "last layer, proved affine": lambda w: (
        co.GGN(
            co.linearize(
                nn.Sequential(w.fresh()[0], Applied(written_in_place)), w.fresh()[1:], "classification", "last_layer"
            )
        )
        @ w.normal(21)
    ),
    "weights": lambda w: co.GGN(w.linearized(data=(*w.fresh()[1:], w.normal(12).abs()), weights=True)) @ w.V,
    "subsample": lambda w: co.GGN(co.subsample(w.lin, torch.tensor([1, 3, 4], device=w.device))) @ w.V,
    "subsample of a generator": lambda w: co.GGN(co.subsample(w.lin, 4, generator=w.generator())) @ w.V,
    **{
        f"InfiniteWidthKernel({activation!r})": lambda w, activation=activation: (
            co.gp.InfiniteWidthKernel(2, activation).to(w.device, w.x.dtype)(w.x).to_dense().detach()
        )
        for activation in ("relu", "erf", "gelu")
    },
    "TangentKernel": lambda w: (
        co.TangentKernel(w.lin, 2.0).to_dense(),
        co.TangentKernel(w.lin, 2.0, w.x) @ w.normal(15),
    ),
    "KFAC reduce": lambda w: co.KFAC(w.lin, fisher="mc", sharing="reduce", generator=w.generator()).to_dense(),
    "heuristic_damping": lambda w: co.KFAC(w.lin).heuristic_damping(0.1).to_dense(),
    "sequences": lambda w: sequences(w),
    "several outputs": lambda w: several_outputs(w),
    "unflatten": lambda w: (w.lin.unflatten_weights(w.draws[0]), w.lin.unflatten_tangent(w.V[:, 0])),
    "prior_mean, compression": lambda w: (
        w.post.prior_mean,
        co.laplace(w.lin, co.KFAC, 1.0).update(w.other, form="kronecker", generator=w.generator()).compression,
    ),
    "wasserstein": lambda w: co.wasserstein(w.post, torch.arange(7, device=w.device)),
    "linear_mode": lambda w: w.post.linear_mode(),
    "fit_mode": lambda w: (
        co.fit_mode(*w.fresh()[:1], w.fresh()[1:], "classification", 1.0).remaining < 0.01,
        co.fit_mode(*w.fresh()[:1], w.fresh()[1:], "classification", 1.0, parameters="last_layer"),
    ),
    "mode_gap": lambda w: w.post.mode_gap,
    "plan": lambda w: [route.name for route in w.post.plan(2).tables["draws"]],
    "dual": lambda w: w.post.deviations(2, method="dual", generator=w.generator()),
    "sgd": lambda w: (
        co.laplace(w.regression, co.GGN, 1.0)
        .deviations(
            2, method=co.posterior.StochasticDescent(epochs=20, batch_size=12), rtol=0.9, generator=w.generator()
        )
        .draws
    ),
    "with_prior": lambda w: w.post.with_prior(3.0).log_evidence(generator=w.generator()),
    "with_noise": lambda w: co.laplace(w.regression, co.GGN, 1.0).with_noise(0.2).log_evidence(generator=w.generator()),
    **{
        f"prior of {name}": lambda w, c=CURVATURES[name]: co.laplace(w.other, c, co.laplace(w.lin, c, 1.0)).predict(w.x)
        for name in ("GGN", "KFAC", "DiagonalGGN")
    },
    "Subnetwork": lambda w: (
        co.Subnetwork(co.GGN(w.lin), torch.arange(9, device=w.device)).to_dense(),
        co.laplace(w.linearized(torch.arange(9, device=w.device)), co.GGN, 1.0).predict(w.x),
    ),
    "update": lambda w: w.post.update(w.other).predict(w.x),
    "observation_noise": lambda w: co.laplace(w.regression, co.GGN, 1.0).predict(w.x, noise=True),
    "samples": lambda w: w.post.predict(w.x, samples=w.post.sample(8, w.generator())),
    "chosen prior": lambda w: [co.laplace(lin, check_mode=False).prior_precision for lin in (w.lin, w.regression)],
    "held-out prior": lambda w: co.laplace(w.lin, validation=(w.x + 0.1, w.labels[:5])).prior_precision,
    "laplace_gp": lambda w: function_space(w, 1.0),
    "laplace_gp, streamed": lambda w: function_space(w, {"0.*": 2.0, "2.*": 3.0}, streamed=True),
    "LinearizedGP": lambda w: co.gp.LinearizedGP(w.regression, prior_precision=2.0).eval()(w.x),
    **{
        f"reduced_posterior({features})": lambda w, features=features: co.gp.reduced_posterior(
            w.lin, 8, features=features, generator=w.generator()
        ).predict(w.x)
        for features in ("inducing", "leading", "random")
    },
    "reduced_posterior(points)": lambda w: (
        co.gp.reduced_posterior(w.lin, points=w.x[:3]).without_rest().predict(w.x),
        co.gp.reduced_posterior(w.lin, points=w.x[:3]).remainder,
    ),
    "save": lambda w: reloaded(w, w.post.save).predict(w.x),
    "save, an operator": lambda w: reloaded(w, lambda path: co.save(co.KFAC(w.lin), path, w.lin)),
    "RewardPairs, BradleyTerry": preferences,
    "FromLoss": lambda w: co.Hessian(
        co.linearize(w.regression.model.module, (w.x, w.normal(5, 2)), likelihoods.FromLoss(nn.HuberLoss()))
    ).to_dense(),
    "log_prob": lambda w: w.post.log_prob(w.draws),
    **{
        f"select({score})": lambda w, score=score: co.select(
            w.lin,
            7,
            score,
            x=w.x if score == "predictive" else None,
            generator=w.generator(),
            snapshots=list(w.draws) if score == "swag" else None,
        )
        for score in ("variance", "swag", "marginal", "predictive", "magnitude", "obd", "random")
    },
    "evidence.maximize": lambda w: co.evidence.maximize(w.post, generator=w.generator(), steps=3).prior_precision,
    "evidence.maximize noise": lambda w: (
        co.evidence.maximize(
            co.laplace(w.regression, co.GGN, 1.0), ["scalar", "noise"], steps=3, generator=w.generator()
        ).prior_precision
    ),
    "evidence.mackay": lambda w: (
        co.evidence.mackay(
            co.laplace(w.regression, co.GGN, 1.0), steps=2, tune_noise=True, generator=w.generator()
        ).prior_precision
    ),
    "evidence.grid": lambda w: co.evidence.grid(w.post, [0.5, 1.0, 2.0], generator=w.generator()),
    "evidence.validate": lambda w: (
        co.evidence.validate(w.post, w.x + 0.1, w.labels[:5], generator=w.generator()).prior_precision
    ),
    "evidence.train": lambda w: (
        co.evidence.train(
            *w.fresh()[:1],
            w.fresh()[1:],
            "classification",
            epochs=2,
            every=1,
            steps=1,
            batch_size=5,
            generator=torch.Generator().manual_seed(0),
        ).prior_precision
    ),
    # linear algebra
    "cg": lambda w: linalg.cg(w.A, w.b, rtol=1e-12),
    "as_operator": lambda w: linalg.as_operator(lambda v: w.dense @ v, like=w.b[:, 0]) @ w.b,
    "cg, refined": lambda w: linalg.cg(w.A.to(torch.float32), w.b.float(), rtol=1e-12, refine=True).x,
    "minres": lambda w: linalg.minres(identity_minus(w.dense), w.b, rtol=1e-12),
    "lsmr": lambda w: linalg.lsmr(w.A, w.b, rtol=1e-12),
    "dual_descent": lambda w: linalg.dual_descent(w.A, w.b, noise=1.0, batch_size=8, generator=w.generator()),
    "solve": lambda w: (linalg.solve(w.A, w.b), w.A.solve(w.b), w.A.add_diagonal(1.0).solve(w.b)),
    "lanczos": lambda w: linalg.lanczos(w.A, 10, generator=w.generator()),
    "eigsh": lambda w: linalg.eigsh(w.A, 4, rtol=1e-10, generator=w.generator()),
    "eigsh inside": lambda w: linalg.eigsh(w.A, 2, sigma=1.5, generator=w.generator()),
    "svds": lambda w: linalg.svds(w.A, 3, generator=w.generator()),
    "trace": lambda w: linalg.trace(w.A, max_matvecs=12, generator=w.generator()),
    "trace, hutchinson": lambda w: linalg.trace(w.A, method="hutchinson", max_matvecs=12, generator=w.generator()),
    "diagonal": lambda w: linalg.diagonal(w.A, max_matvecs=12, generator=w.generator()),
    "frobenius_norm": lambda w: linalg.frobenius_norm(w.A, max_matvecs=12, generator=w.generator()),
    "logdet": lambda w: linalg.logdet(w.A, shift=0.5, max_matvecs=200, generator=w.generator()),
    "effective_dimension": lambda w: linalg.effective_dimension(w.A, 1.0, max_matvecs=200, generator=w.generator()),
    "spectral_density": lambda w: linalg.spectral_density(w.A, steps=10, probes=3, generator=w.generator()),
    "spectral_quadrature": lambda w: linalg.spectral_quadrature(
        w.A, shift=1.0, probes=3, generator=w.generator()
    ).logdet(1.0),
    "apply_function": lambda w: linalg.apply_function(w.A, torch.exp, w.b),
    "sqrt": lambda w: linalg.sqrt(w.A, w.b).value,
    "inverse_sqrt": lambda w: [linalg.inverse_sqrt(w.A, w.b, memory_budget=budget).value for budget in (None, 1)],
    "nystrom": lambda w: linalg.nystrom(w.A, 8, shift=1.0, generator=w.generator()),
    "cholesky": lambda w: [
        linalg.cholesky(w.A, 8, pivoting=p, shift=1.0, generator=w.generator()).F for p in ("greedy", "random")
    ],
    "block_jacobi": lambda w: linalg.block_jacobi(w.A, [torch.arange(i, i + 10) for i in (0, 10, 20)], 1.0).sqrt(w.b),
    "BlockRows": lambda w: rows_of_a_mesh(w),
    "diagonal_preconditioner": lambda w: linalg.diagonal_preconditioner(w.A, 1.0).sqrt_inverse(w.b),
    "as_preconditioner": lambda w: linalg.as_preconditioner(w.A.add_diagonal(1.0)).sqrt(w.b),
    "draw": lambda w: linalg.draw(w.A, 3, w.generator()),
    "low_rank": lambda w: linalg.low_rank(w.A, 5, generator=w.generator()).to_dense(),
    "algebra": lambda w: (2.0 * w.A + w.A.add_diagonal(w.b[:, 0].abs()) - linalg.Diagonal(w.b[:, 1])).to_dense(),
    "DirectSum": lambda w: (
        linalg.DirectSum(w.A, linalg.Diagonal(w.b[:, 0].abs()), positions=[range(30), range(30, 60)])
        .add_diagonal(1.0)
        .logdet()
    ),
    "Kronecker": lambda w: (
        linalg.Kronecker(w.dense[:4, :4][None], w.dense[:5, :5][None]).add_diagonal(1.0).solve(w.b[:20])
    ),
    "EigenKronecker": lambda w: linalg.Kronecker(w.dense[:4, :4][None], w.dense[:5, :5][None]).eigen().to_dense(),
    "Damped": lambda w: co.linalg.Damped(w.A, w.b[:, 0].abs()).solve(w.b),
    "LowRank": lambda w: co.linalg.LowRank(w.b, w.b[0].abs()).add_diagonal(2.0).logdet(),
    "Scaled, Sum, Transposed": lambda w: (3.0 * w.regression.jacobian().mT + w.regression.jacobian().mT) @ w.normal(24),
    "method_for": lambda w: str(linalg.method_for(w.A.add_diagonal(1.0))),
    "Inverse": lambda w: (w.A.inverse() @ w.b, w.A.inverse().to_dense()),
    "Sliced": lambda w: w.A[3:9, 1:4].to_dense() @ w.b[:3],
    "Product": lambda w: (w.A @ w.A).to_dense(),
    "to": lambda w: (w.A.cpu().to(w.device) @ w.b, (w.A.to(torch.float32).to(torch.float64)) @ w.b),
    "methods": lambda w: (
        w.A.inv_quad_logdet(w.b, logdet=True),
        w.A.diagonalization(),
        w.A.root_decomposition().to_dense(),
        w.A.sqrt_inv_matmul(w.b),
        w.A.diagonal(),
    ),
    "mvn": lambda w: w.A.zero_mean_mvn_samples(3).shape,
    # samplers
    "vi": lambda w: variational(w, "diagonal"),
    "vi low rank": lambda w: variational(w, "low_rank_diagonal", rank=2),
    **{f"ekf {form}": lambda w, form=form: filtered(w, form) for form in ("diagonal", "dense", "low_rank_diagonal")},
    "optimizer": lambda w: ran(w, co.sampling.optimizer(torch.optim.Adam, w.density)),
    "schedules": lambda w: [
        ran(w, co.sampling.sgld(w.density, schedule, preconditioner=p))
        for schedule, p in (
            (co.sampling.Constant(1e-3), 0.5),
            (co.sampling.Cosine(1e-3, 10), w.draws[0].abs()),
            (co.sampling.RobbinsMonro(1e-3), w.post.precision.inverse()),
            (1e-3, co.KFAC(w.lin).add_diagonal(1.0).inverse()),
        )
    ],
    "minibatches": lambda w: [
        list(part)
        for data in (w.batches[0], TensorDataset(*w.batches[0]))
        for source in (w.generator(), torch.Generator().manual_seed(0))
        for part in co.sampling.minibatches(w.density, data, 5, source)
    ],
    "warmup": lambda w: ran(w, co.sampling.hmc(w.density, 1e-3, leapfrog_steps=3), warmup=3, target_acceptance=0.8),
    "empirical": lambda w: co.sampling.empirical(w.lin, w.draws[None]).predict(w.x),
    "empirical, linear": lambda w: co.sampling.empirical(w.lin, w.draws[None], "linearization").probabilities(w.x),
    "diagnostics": lambda w: (co.sampling.diagnostics.ess(w.chain), co.sampling.diagnostics.rhat(w.chain)),
    "random_projections": lambda w: co.sampling.diagnostics.random_projections(w.chain, 5, generator=w.generator()),
    "stein": lambda w: co.sampling.diagnostics.stein_discrepancy(w.draws, w.normal(*w.draws.shape)),
    "scores": lambda w: co.sampling.diagnostics.scores(w.density, w.chain, w.batches),
    "to_inference_data": lambda w: co.sampling.diagnostics.to_inference_data(w.chain).posterior.sizes["draw"],
    "ntk_precision": lambda w: co.sampling.ntk_precision(w.fresh()[0]),
    "reprior": lambda w: repriored(w),
    # measures
    "metrics": lambda w: (
        *(
            getattr(metrics, name)(w.probabilities, w.labels)
            for name in ("accuracy", "nll", "brier", "ece", "reliability_bins")
        ),
        metrics.auroc(w.probabilities[:, 0], w.labels == 0),
        metrics.predictive_entropy(w.probabilities),
        metrics.mutual_information(w.probabilities.expand(3, 12, 3)),
        metrics.temperature(w.probabilities.log(), w.labels),
    ),
}


def rows_of_a_mesh(w: World) -> Any:
    """What a matrix by rows gives over a mesh of one process, as the stand-in has no messages."""
    on_device = "fake" if torch.cuda.get_device_name() == "stand-in" else "nccl"
    backend = "gloo" if w.device.type == "cpu" else on_device
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh.from_group(dist.group.WORLD, w.device.type)
        A = linalg.BlockRows.of(DTensor.from_local(w.dense, mesh, [Shard(0)]), psd=True)
        kernel = co.TangentKernel(w.lin).formed(mesh)
        solved = linalg.cg(A, DTensor.from_local(w.b, mesh, [Shard(0)]), rtol=1e-12).x
        return A.to_dense(), A @ w.b, A.diagonal(), kernel.to_dense(), solved.to_local()
    finally:
        dist.destroy_process_group()


def variational(w: World, family: str, **options: Any) -> Any:
    vi = co.sampling.vi(w.density, family, lr=1e-2, **options)
    run = co.sampling.run(vi, w.params, w.batches, steps=3, generator=w.generator())
    return vi.posterior(run.state, w.at(run.state.params)).predict(w.x)


def filtered(w: World, form: str) -> Any:
    _, x, y = w.fresh()
    filter = co.sampling.ekf(w.density, form, **({"rank": 3} if form == "low_rank_diagonal" else {}))
    state = filter.init(w.params)
    for i in range(0, 12, 4):
        state, _ = filter.update(state, (x[i : i + 4], y[i : i + 4]))
    return state.theta, filter.posterior(state, w.at(state.params)).predict(w.x)


def repriored(w: World) -> Any:
    model, x, y = trained("regression")
    model = copy.deepcopy(model).to(w.device)
    found = co.sampling.reprior(model, (x.to(w.device), y.to(w.device)), noise=0.1, reg=0.1)
    kernel = co.sampling.reprior(model, (x.to(w.device), y.to(w.device)), noise=0.1, reg=0.1, form="ntk")
    phi = {name: 0.3 * w.normal(*t.shape) for name, t in model.named_parameters()}
    theta = found.map(phi)
    return {
        "map": theta,
        "inverse": found.inverse(theta),
        "logdet": (found.logdet(phi), kernel.logdet(phi), kernel.estimated_logdet(phi, generator=w.generator())),
        "density": (found.energy(phi), found.log_ratio(phi)),
        "draws": (found.sample(2, w.generator()), found.normal(2, w.generator())),
        "divergence": found.divergence(3, w.generator()),
        "gap": found.gradient_gap(samples=3, generator=w.generator()),
    }


def sequences(w: World) -> Any:
    """Tokens with positions, by an attention layer and by a recurrent one."""
    x, y = w.normal(4, 3, 4), torch.arange(12, device=w.device).view(4, 3) % 2
    found = []
    recurrent = nn.Sequential(nn.LSTM(4, 4, batch_first=True), Applied(lambda found: found[0]))
    for layer in (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), recurrent):
        torch.manual_seed(2)
        model = nn.Sequential(copy.deepcopy(layer), nn.Linear(4, 2)).double().to(w.device)
        for p in model.parameters():
            nn.init.uniform_(p, -0.5, 0.5, torch.Generator(w.device).manual_seed(p.numel()))
        lin = co.linearize(model.eval(), (x, y), likelihoods.as_likelihood("classification"))
        assert isinstance(lin.likelihood, likelihoods.Sequences)
        found += [
            co.GGN(lin).to_dense(),
            co.KFAC(lin).to_dense(),
            lin.predict(x),
            co.laplace(lin, co.KFAC, 1.0).predict(x),
        ]
    return found


def several_outputs(w: World) -> Any:
    """A class and values of which some are missing, from one network."""
    weights = {"kind": w.normal(4, 3), "value": w.normal(4, 2)}
    y = {"kind": torch.arange(len(w.x), device=w.device) % 3, "value": w.normal(len(w.x), 2)}
    y["value"][::3, 0] = torch.nan
    choice = {"kind": "classification", "value": likelihoods.Gaussian("per_output", missing="ignore")}
    lin = co.linearize((lambda p, x: {name: x @ p[name] for name in p}, weights), (w.x, y), choice)
    assert isinstance(lin.likelihood, likelihoods.Multitask)
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    at = post.at(w.x)
    assert isinstance(at, co.posterior.NamedPredictions)
    return [
        co.GGN(lin).to_dense(),
        co.GGN(lin, mc_samples=2, generator=w.generator()).to_dense(),
        co.EmpiricalFisher(lin).to_dense(),
        lin.log_likelihood(),
        lin.likelihood.likelihoods["value"].noise,
        at.predict()["value"].variance,
        at.probabilities()["kind"],
        post.log_evidence().value,
    ]


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor and number in a result, with its place there."""
    if isinstance(value, (Tensor, bool, int, float, str)) or value is None:
        yield path, value
    elif isinstance(value, linalg.Operator):
        yield path, value.to_dense()
    elif isinstance(value, torch.distributions.Distribution):
        yield path + ".mean", value.mean
        yield path + ".covariance", value.covariance_matrix
        yield path + ".variance", value.variance
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                yield from tensors(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from tensors(item, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors(item, f"{path}[{i}]")


def ours(value: Any) -> Iterator[Any]:
    """Every object of a class of curvops in a result."""
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from ours(item)
    if type(value).__module__.startswith("curvops."):
        yield value


def called(names: Iterable[str], owner: Any) -> Iterator[str]:
    """Those that are functions or classes to be called: no exceptions, enumerations and results."""
    for name in names:
        thing = getattr(owner, name)
        if inspect.isclass(thing) and (issubclass(thing, (Exception, enum.Enum)) or dataclasses.is_dataclass(thing)):
            continue
        if callable(thing) or isinstance(thing, property):
            yield name


def test_the_walk_leaves_nothing_out() -> None:
    source = Path(__file__).read_text("utf-8")
    faces = (co, co.operators, co.posterior, linalg, likelihoods, co.evidence, co.sampling, co.sampling.diagnostics)
    wanted = {name for face in faces for name in called(face.__all__, face)}
    for owner in (co.posterior.Laplace, co.sampling.Reprior):
        wanted |= set(called([name for name in vars(owner) if not name.startswith("_")], owner))
    # Made by other names of the walk, abstract, or called by them.
    wanted -= {"FactoredPreconditioner", "Grid", "Likelihood", "Linearization", "Minibatches", "SampledNormal"}
    wanted -= {"progress"}  # what a posterior passes on: it computes nothing
    wanted -= {"ShardedLinearization"}  # needs fully_shard, and this streams: tests/ranks asks it, on CPUs
    assert sorted(name for name in wanted if not re.search(rf"\b{name}\b", source)) == []


ADDRESS = re.compile("0x[0-9a-f]{4}|object at")

ON_THE_HOST = {
    "losses",
    "converged",
    "history",
    "alphas",
    "betas",
    "error_estimates",
    "normal_residuals",
    "residual_norm",
    "relative_residuals",
    "backward_errors",
}
"""What is looked at there, column by column or step by step."""


@functools.cache
def world(device: str) -> World:
    return World(device)


@pytest.mark.parametrize("name", FACE)
def test_results_are_on_the_device_and_equal_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_name() == "stand-in":  # whose numbers are the CPU's, if that, too, draws vector by vector
        monkeypatch.setattr(vectors, "DRAWN_AT_ONCE", ())
    found = {}
    for device in ("cpu", "cuda"):
        world(device).drew = False
        torch.manual_seed(0)
        result = FACE[name](world(device))
        assert not any(ADDRESS.search(repr(thing)) for thing in ours(result))
        found[device] = dict(tensors(result))
    expected, same_draws = found["cpu"], torch.cuda.get_device_name() == "stand-in" or not world("cuda").drew
    assert expected and found["cuda"].keys() == expected.keys()
    for path, value in found["cuda"].items():
        if isinstance(value, Tensor):
            assert value.device.type == "cuda" or path.rpartition(".")[2] in ON_THE_HOST, path
            assert value.shape == expected[path].shape
            if same_draws:
                torch.testing.assert_close(value.cpu(), expected[path], rtol=1e-10, atol=1e-10, equal_nan=True)
        elif same_draws and isinstance(value, float):
            assert value == pytest.approx(expected[path], rel=1e-10, abs=1e-10, nan_ok=True), path
        else:
            assert value == expected[path] or not same_draws, path
