"""Predictions of every structure as gpytorch's distributions: what gpytorch makes of them against dense normals.

Each operation × kind of prediction × dtype and outputs, and the moments of each posterior structure, with all
iterations of linear_operator raising and its settings such that it would iterate whatever it can.
"""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor, nn

import curvops as co
from curvops.posterior.predictions import MultitaskNormal, Normal

POINTS = 4
NOISE = 0.3
STRUCTURES: dict[str, Callable[[co.operators.Linearization, float], Any]] = {
    "GGN": lambda lin, prior: co.laplace(lin, co.GGN, prior, check_mode=False),
    "KFAC": lambda lin, prior: co.laplace(lin, co.KFAC, prior, check_mode=False),
    "diagonal": lambda lin, prior: co.laplace(lin, co.DiagonalGGN, prior, check_mode=False),
    "low rank": lambda lin, prior: co.laplace(
        lin, co.low_rank(co.GGN(lin), rank=5, generator=torch.Generator().manual_seed(0)), prior, check_mode=False
    ),
    "last layer": lambda lin, prior: co.laplace(lin, co.GGN, prior, check_mode=False),
    "function space": lambda lin, prior: co.gp.laplace_gp(lin, prior),
}
KINDS: dict[str, dict[str, Any]] = {"independent": {}, "joint": {"joint": True}, "groups": {"groups": 2}}


class Case(NamedTuple):
    """A prediction, and its moments as (batch, rows) and (batch, rows, rows)."""

    found: Any
    mean: Tensor
    covariance: Tensor
    kind: str
    outputs: int
    tight: dict[str, float]

    @property
    def joint(self) -> bool:
        return self.kind != "independent"


@functools.cache
def predicted(structure: str, dtype: torch.dtype, outputs: int, kind: str) -> Case:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)
    x, new = torch.randn(10, 3, dtype=dtype), torch.randn(POINTS, 3, dtype=dtype)
    parameters = "last_layer" if structure == "last layer" else None
    lin = co.linearize(network, (x, x[:, :outputs].sin()), co.likelihoods.Gaussian(0.1), parameters)
    post = STRUCTURES[structure](lin, 2.0)
    J = lin.jacobian(new).to_dense().double()
    P = post.precision.to_dense().double()
    mean = lin.predict(new).double() + (J @ (post.mean - lin.theta).double()).view(POINTS, outputs)
    covariance = J @ torch.linalg.solve(P, J.mT)
    rows = {"independent": outputs, "joint": POINTS * outputs, "groups": 2 * outputs}[kind]
    blocks = covariance.view(-1, rows, covariance.shape[0] // rows, rows).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    tight = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-4}
    return Case(post.predict(new, **KINDS[kind]), mean.reshape(-1, rows), blocks, kind, outputs, tight)


def agree(found: Any, mean: Tensor, covariance: Tensor, tight: dict[str, float]) -> None:
    """Compare a distribution's moments with these of (batch, rows), and that it is of a class of ours."""
    assert isinstance(found, Normal)
    shape = found.mean.shape
    torch.testing.assert_close(found.mean.double(), mean.reshape(shape), **tight)
    torch.testing.assert_close(found.covariance_matrix.double().reshape(covariance.shape), covariance, **tight)
    variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(shape)
    torch.testing.assert_close(found.variance.double(), variance, **tight)
    torch.testing.assert_close(found.stddev.double(), variance.sqrt(), **tight)
    low, high = found.confidence_region()
    torch.testing.assert_close((high - low).double(), 4 * variance.sqrt(), **tight)


def squeezed(case: Case) -> tuple[Tensor, Tensor]:
    """The moments without a batch of one, which joint predictions have not."""
    return (case.mean[0], case.covariance[0]) if case.kind == "joint" else (case.mean, case.covariance)


def noisy(case: Case, task_noise: bool = True) -> tuple[Any, Tensor]:
    """The marginal under gpytorch's likelihood, and the covariance that it should have."""
    dtype, C = case.found.mean.dtype, case.outputs
    if case.joint:
        likelihood: Any = gpytorch.likelihoods.MultitaskGaussianLikelihood(C, has_task_noise=task_noise).to(dtype)
        each = likelihood.noise.detach() + (likelihood.task_noises.detach() if task_noise else torch.zeros(C))
        diagonal = each.expand(C).repeat(case.mean.shape[-1] // C)
    else:
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(dtype)
        likelihood.noise = torch.tensor(NOISE, dtype=dtype)
        diagonal = torch.full((C,), NOISE)
    return likelihood(case.found), squeezed(case)[1] + diagonal.double().diag()


def check_moments(case: Case) -> None:
    agree(case.found, *squeezed(case), case.tight)
    assert isinstance(case.found, MultitaskNormal) == case.joint
    shapes = {"independent": ((POINTS,), (case.outputs,)), "joint": ((), (POINTS, case.outputs))}
    shapes["groups"] = (POINTS // 2,), (2, case.outputs)
    assert (case.found.batch_shape, case.found.event_shape) == shapes[case.kind]


def check_likelihood(case: Case) -> None:
    for task_noise in (False, True):
        found, covariance = noisy(case, task_noise)
        agree(found, squeezed(case)[0], covariance, case.tight)


def check_log_prob(case: Case) -> None:
    found, covariance = noisy(case)
    value = found.mean.detach() + 0.1
    exact = torch.distributions.MultivariateNormal(squeezed(case)[0], covariance)
    expected = exact.log_prob(value.double().reshape(exact.mean.shape))
    torch.testing.assert_close(found.log_prob(value).double(), expected, **case.tight)
    several = torch.stack([value, value - 0.3])
    expected = exact.log_prob(several.double().reshape(2, *exact.mean.shape))
    torch.testing.assert_close(found.log_prob(several).double(), expected, **case.tight)


def check_base_samples(case: Case) -> None:
    """As a matrix: unit base samples give the columns of a root of the covariance."""
    rows, shape = case.mean.shape[-1], case.found.mean.shape
    units = torch.eye(rows, dtype=case.found.mean.dtype)
    base = units.view(rows, *[1] * len(case.found.batch_shape), *case.found.event_shape).expand(rows, *shape)
    drawn = case.found.rsample(torch.Size([rows]), base_samples=base) - case.found.mean
    root = drawn.double().reshape(rows, -1, rows).permute(1, 2, 0)
    torch.testing.assert_close(root @ root.mT, case.covariance, **case.tight)
    noise = case.found.get_base_samples(torch.Size([3]))
    again = [case.found.rsample(torch.Size([3]), base_samples=noise) for _ in range(2)]
    assert torch.equal(*again) and again[0].shape == (3, *shape)


def check_samples(case: Case) -> None:
    torch.manual_seed(1)
    drawn = case.found.rsample(torch.Size([4000])).double().flatten(1)
    mean, variance = case.mean.flatten(), case.covariance.diagonal(dim1=-2, dim2=-1).flatten()
    # Seven standard errors of 4 to 8 means and variances in 6 cases: a false alarm in 1e9.
    assert bool(((drawn.mean(0) - mean).abs() <= 7 * (variance / 4000).sqrt() + 1e-6).all())
    assert bool(((drawn.var(0) - variance).abs() <= 7 * variance * (2 / 4000) ** 0.5 + 1e-6).all())


def check_indexing(case: Case) -> None:
    mean, covariance = squeezed(case)
    if case.kind == "independent":
        agree(case.found[1:3], mean[1:3], covariance[1:3], case.tight)
        agree(case.found[2], mean[2], covariance[2], case.tight)
        agree(case.found[..., :1], mean[:, :1], covariance[:, :1, :1], case.tight)
        return
    C = case.outputs
    if case.kind == "groups":
        agree(case.found[1], mean[1], covariance[1], case.tight)
    every = torch.arange(mean.shape[-1]).view(-1, C)
    for index, rows in (
        ((..., slice(0, 1), slice(None)), every[:1].flatten()),
        ((..., slice(None), slice(C - 1, C)), every[:, C - 1 :].flatten()),
        ((..., slice(None), C - 1), every[:, C - 1]),
        ((..., 1, slice(None)), every[1]),
    ):
        agree(case.found[index], mean[..., rows], covariance[..., rows, :][..., rows], case.tight)


def check_sums(case: Case) -> None:
    (mean, covariance), found = squeezed(case), case.found
    agree(found + found, 2 * mean, 2 * covariance, case.tight)
    agree(sum([found, found]), 2 * mean, 2 * covariance, case.tight)
    agree(found + 1.5, mean + 1.5, covariance, case.tight)
    agree(found * 3, 3 * mean, 9 * covariance, case.tight)
    agree(found / 2, mean / 2, covariance / 4, case.tight)
    theirs = MultitaskMultivariateNormal if case.joint else gpytorch.distributions.MultivariateNormal
    plain = theirs(found.mean, found.lazy_covariance_matrix)
    for total in (found + plain, plain + found):
        agree(total, 2 * mean, 2 * covariance, case.tight)


def check_independent(case: Case) -> None:
    if case.kind == "independent":
        plain = case.found.to_data_independent_dist()
        variance = case.covariance.diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(plain.variance.double(), variance, **case.tight)
        return
    own = case.covariance.view(-1, case.mean.shape[-1] // case.outputs, case.outputs, *case.covariance.shape[-1:])
    own = own.unflatten(-1, (-1, case.outputs)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
    found = case.found.to_data_independent_dist()
    mean = case.mean.view(*own.shape[:3])
    agree(found, *((mean[0], own[0]) if case.kind == "joint" else (mean, own)), case.tight)


def check_copies(case: Case) -> None:
    mean, covariance = squeezed(case)
    agree(copy.deepcopy(case.found), mean, covariance, case.tight)
    agree(pickle.loads(pickle.dumps(case.found)), mean, covariance, case.tight)
    expanded = case.found.expand(torch.Size([3, *case.found.batch_shape]))
    assert expanded.batch_shape == (3, *case.found.batch_shape)
    agree(expanded, mean.expand(3, *mean.shape), covariance.expand(3, *covariance.shape), case.tight)


CHECKS = {
    "moments": check_moments,
    "likelihood": check_likelihood,
    "log_prob": check_log_prob,
    "base samples": check_base_samples,
    "samples": check_samples,
    "indexing": check_indexing,
    "sums": check_sums,
    "independent": check_independent,
    "copies": check_copies,
}


CASES = [
    *((structure, kind, "moments") for structure in STRUCTURES for kind in KINDS),
    *(("GGN", kind, check) for kind in KINDS for check in CHECKS if check != "moments"),
]
"""Operations see a covariance; what it is made of shows in its moments."""


@pytest.mark.usefixtures("no_foreign_solvers", "iterating")
@pytest.mark.parametrize(("structure", "kind", "check"), CASES)
def test_predictions_are_citizens_of_gpytorch(structure: str, kind: str, check: str) -> None:
    for dtype, outputs in ((torch.float64, 2), (torch.float32, 1)):
        CHECKS[check](predicted(structure, dtype, outputs, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_density_of_values_of_another_shape_is_refused(kind: str) -> None:
    found = noisy(predicted("GGN", torch.float64, 2, kind))[0]
    values = [found.mean[..., :1], found.mean.flatten()[:3], found.mean.unsqueeze(-1)]
    for value in values if kind == "groups" else [*values, found.mean.mT]:
        with pytest.raises(ValueError, match=r"values must end with"):
            found.log_prob(value)
    assert isinstance(found, MultitaskMultivariateNormal) == (kind != "independent")
