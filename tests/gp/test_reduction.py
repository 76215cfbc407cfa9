"""Reduced posteriors against the formulas of inducing points and ELLA, and against the exact posterior."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from curvops.gp import reduced_posterior
from tests.memory import peak_of

DOUBLE = torch.float64
N = 15
FEATURES = ("inducing", "leading", "random")
PRIORS: dict[str, Any] = {
    "scalar": 0.7,
    "layers": {"0.*": 0.5, "2.*": 2.0},
    "vector": None,  # of as many numbers as weights
}
PROBLEMS = {
    "regression": (1, lambda y: co.likelihoods.Gaussian(0.3), None),
    "classes": (3, lambda y: "classification", None),
    "weighted classes": (3, lambda y: co.likelihoods.Categorical(weight=torch.tensor([0.5, 1.0, 2.0]).double()), None),
    "counts": (2, lambda y: co.likelihoods.Poisson(), None),
    "a subnetwork": (3, lambda y: "classification", torch.arange(0, 38, 3)),
    "the last layer": (3, lambda y: "classification", "last_layer"),
}
X = torch.linspace(-1.5, 1.5, 12, dtype=DOUBLE).view(4, 3)


@functools.cache
def linearized(problem: str = "regression", n: int = N) -> co.operators.Linearization:
    torch.manual_seed(0)
    outputs, likelihood, parameters = PROBLEMS[problem]
    model = nn.Sequential(nn.Linear(3, 5 if outputs == 3 else 6), nn.Tanh())
    model.append(nn.Linear(model[0].out_features, outputs))
    x, y = torch.randn(n, 3, dtype=DOUBLE), torch.randn(n, outputs, dtype=DOUBLE)
    if "class" in problem or parameters is not None:
        y = torch.randint(outputs, (n,))
    elif problem == "counts":
        y = y.abs().round()
    return co.linearize(model.double(), (x, y), likelihood(y), parameters)


def make(lin: co.operators.Linearization, *args: Any, **options: Any) -> co.gp.ReducedPosterior:
    options = {"check_mode": False, "generator": torch.Generator().manual_seed(1)} | options
    return reduced_posterior(lin, *args, **options)


def precision(lin: co.operators.Linearization, prior: Any) -> Tensor:
    """A as a vector (D,)."""
    found = co.laplace(lin, co.GGN, prior_precision=prior, check_mode=False).prior_precision
    return found.expand_as(lin.theta)


def whitened(lin: co.operators.Linearization, A: Tensor) -> Tensor:
    return A.rsqrt().unsqueeze(1) * co.GGN(lin).to_dense() * A.rsqrt()


def outputs_hessian(lin: co.operators.Linearization) -> Tensor:
    """H over all outputs, (N·C, N·C), by autograd."""
    f, blocks = lin.outputs(), []
    target = next(iter(lin.data)).targets

    def nll(row: Tensor, n: int) -> Tensor:
        batch = next(iter(lin.data))
        return -lin.likelihood.log_prob(row.unsqueeze(0), target[n : n + 1], batch.weights)[0]

    for n, row in enumerate(f):
        blocks.append(torch.autograd.functional.hessian(lambda r, n=n: nll(r, n), row))
    return torch.block_diag(*blocks)


@functools.cache
def exact_answers(problem: str, prior: str) -> tuple[Any, Tensor, Tensor]:
    """The prior that is given, and the covariance and the evidence of the exact posterior under it."""
    lin, given = linearized(problem), PRIORS[prior]
    if prior == "vector":
        given = torch.linspace(0.5, 2, lin.num_parameters, dtype=DOUBLE)
    post = co.laplace(lin, co.GGN, given, check_mode=False)
    return given, covariance(post), post.log_evidence(mode="map").value


def covariance(post: Any, x: Tensor = X) -> Tensor:
    return post.predict(x, joint=True).covariance_matrix


@pytest.mark.parametrize(("prior", "temperature"), [(0.7, 1.0), ("vector", 0.5), ("points", 1.0)])
@pytest.mark.parametrize("problem", ["regression", "classes", "counts", "a subnetwork"])
def test_inducing_points_have_the_covariances_of_their_formulas(problem, prior, temperature):
    lin = linearized(problem)
    J, Jx = lin.jacobian().to_dense(), lin.jacobian(X).to_dense()
    if prior == "points":  # the user's own
        Z, prior = torch.linspace(-1, 1, 6, dtype=DOUBLE).view(2, 3), 0.7
        post, JZ = make(lin, prior_precision=prior, points=Z), lin.jacobian(Z).to_dense()
    else:
        prior = torch.linspace(0.5, 2, lin.num_parameters, dtype=DOUBLE) if prior == "vector" else prior
        post = make(lin, 6, prior, temperature=temperature)
        JZ = J[post.rows[:, 0] * lin.num_outputs + post.rows[:, 1]]
    A = precision(lin, prior)
    K = lambda a, b: (a / A) @ b.mT  # noqa: E731
    inner = torch.linalg.inv(K(JZ, JZ) + K(JZ, J) @ outputs_hessian(lin) @ K(J, JZ))
    of_features = K(Jx, JZ) @ inner @ K(JZ, Jx)
    rest = K(Jx, Jx) - K(Jx, JZ) @ torch.linalg.solve(K(JZ, JZ), K(JZ, Jx))
    torch.testing.assert_close(covariance(post), temperature * (rest + of_features), rtol=0, atol=1e-10)
    torch.testing.assert_close(covariance(post.without_rest()), temperature * of_features, rtol=0, atol=1e-10)
    left = K(J, J) - K(J, JZ) @ torch.linalg.solve(K(JZ, JZ), K(JZ, J))
    remainder = torch.trace(outputs_hessian(lin) @ left)
    torch.testing.assert_close(post.remainder.value, remainder, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        post.error.value, remainder / torch.trace(outputs_hessian(lin) @ K(J, J)), rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("problem", ["regression", "weighted classes"])
def test_random_features_without_the_rest_are_those_of_ella(problem):
    """Deng, Zhou & Zhu 2022: φ(x) = κ(x, Z) E λ^-½ of K leading eigenvectors, Σ = φ (Σ_n φᵀHφ + I)⁻¹ φᵀ."""
    lin, alpha = linearized(problem), 0.7
    chosen = torch.randperm(N * lin.num_outputs, generator=torch.Generator().manual_seed(1))[:10]
    post = make(lin, 4, alpha, features="random", candidates=10)
    J, Jx = lin.jacobian().to_dense(), lin.jacobian(X).to_dense()
    values, vectors = torch.linalg.eigh(J[chosen] @ J[chosen].mT / alpha)
    onto = J[chosen].mT @ vectors[:, -4:] / values[-4:].sqrt() / alpha
    G = (J @ onto).mT @ outputs_hessian(lin) @ (J @ onto)
    expected = Jx @ onto @ torch.linalg.inv(G + torch.eye(4, dtype=DOUBLE)) @ (Jx @ onto).mT
    torch.testing.assert_close(covariance(post.without_rest()), expected, rtol=0, atol=1e-10)
    assert post.rows is None and post.rank == 4


@pytest.mark.parametrize("prior", [0.7, "vector"])
def test_leading_features_are_the_leading_eigenvectors_where_the_sketch_holds_all(prior):
    lin = linearized("the last layer")
    prior = torch.linspace(0.5, 2, lin.num_parameters, dtype=DOUBLE) if prior == "vector" else prior
    post, A = make(lin, 8, prior, features="leading"), precision(lin, prior)
    values, vectors = torch.linalg.eigh(whitened(lin, A))
    W, g = vectors[:, -8:], values[-8:]
    Jx = lin.jacobian(X).to_dense() * A.rsqrt()
    expected = Jx @ Jx.mT - (Jx @ W) * (g / (1 + g)) @ (Jx @ W).mT
    torch.testing.assert_close(covariance(post), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(post.remainder.value, values[:-8].sum(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(
    ("problem", "prior"), [*((each, "scalar") for each in PROBLEMS), ("classes", "layers"), ("a subnetwork", "vector")]
)
def test_with_as_many_features_as_the_rank_it_is_the_exact_posterior(problem, features, prior):
    lin, (given, expected, evidence) = linearized(problem), exact_answers(problem, prior)
    rank = min(lin.num_parameters, N * lin.num_outputs)
    post = make(lin, rank, given, features=features)
    torch.testing.assert_close(covariance(post), expected, rtol=0, atol=1e-10)
    assert float(post.error.value) <= float(post.error.bias_bound) < 1e-12
    assert 1 <= post.factor < 1 + 1e-4
    torch.testing.assert_close(post.log_evidence(mode="map").value, evidence, rtol=1e-10, atol=0)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("problem", ["regression", "classes"])
def test_what_is_left_out_bounds_the_distance_from_the_exact_posterior(problem, features):
    lin = linearized(problem)
    exact = co.laplace(lin, co.GGN, 0.7, check_mode=False)
    P, evidence = exact.precision.to_dense(), float(exact.log_evidence(mode="map"))
    for rank in (2, 14):
        post = make(lin, rank, 0.7, features=features)
        t, S = float(post.remainder), torch.linalg.inv(post.precision.to_dense())
        assert 0 < t < float(make(lin, rank - 1, 0.7, features=features).remainder)
        divergence = (torch.trace(P @ S) - len(S) - torch.logdet(P @ S)) / 2
        assert 0 < float(divergence) <= t / 2
        found = float(post.log_evidence(mode="map"))
        assert found - t / 2 <= evidence <= found
        assert float(post.log_evidence_bound()) == pytest.approx(found - t / 2, rel=1e-12)
        ratios = torch.linalg.eigvals(torch.linalg.inv(P) @ torch.linalg.inv(S)).real
        assert 1 / post.factor <= float(ratios.min()) and float(ratios.max()) <= post.factor
        below = torch.linalg.eigvalsh(torch.linalg.inv(P) - post.without_rest().covariance.to_dense())
        assert float(below.min()) > -1e-10


@pytest.mark.parametrize("features", FEATURES)
def test_a_multiple_of_the_prior_keeps_the_features_and_their_error(features):
    lin = linearized("classes")
    post = make(lin, 6, 0.7, features=features)
    moved = post.with_prior(2.1)
    P = whitened(lin, torch.full_like(lin.theta, 2.1))
    left = torch.trace(P) - post.reduction.values.sum() / 3
    torch.testing.assert_close(moved.remainder.value, left, rtol=1e-10, atol=0)
    torch.testing.assert_close(moved.error.value, post.error.value, rtol=1e-10, atol=0)
    if features == "inducing":
        again = make(lin, 6, 2.1)
        torch.testing.assert_close(covariance(moved), covariance(again), rtol=0, atol=1e-10)
        torch.testing.assert_close(
            covariance(moved.without_rest()), covariance(again.without_rest()), rtol=0, atol=1e-10
        )
    best = co.evidence.maximize(post)
    assert isinstance(best, co.gp.ReducedPosterior) and float(best.error) == pytest.approx(float(post.error), rel=1e-9)


def test_another_prior_or_further_data_have_no_error_that_is_known():
    lin = linearized("classes")
    post = make(lin, 6, 0.7)
    others = [
        post.with_prior(torch.linspace(0.5, 2, lin.num_parameters, dtype=DOUBLE)),
        post.with_prior(co.linalg.Diagonal(torch.ones_like(lin.theta))),
        post.update(linearized("classes", 8), co.GGN, check_mode=False),
    ]
    for other in others:
        for read in (lambda p: p.error, lambda p: p.factor, lambda p: p.without_rest()):
            with pytest.raises(ValueError, match="only for multiples of the prior"):
                read(other)


def test_repeated_points_and_small_ranks_leave_fewer_features():
    lin, Z = linearized(), torch.linspace(-1, 1, 12, dtype=DOUBLE).view(4, 3)
    once, twice = make(lin, points=Z), make(lin, points=torch.cat([Z, Z, Z[:1]]))
    assert once.rank == twice.rank == 4
    torch.testing.assert_close(covariance(once), covariance(twice), rtol=0, atol=1e-10)
    x = torch.randn(4, 3, dtype=DOUBLE).repeat(6, 1)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    repeated = co.linearize(model, (x, x[:, :1]), co.likelihoods.Gaussian(0.3))
    for features in FEATURES:
        post = make(repeated, 20, features=features)
        assert float(post.error.value) <= float(post.error.bias_bound)
        exact = co.laplace(repeated, co.GGN, 1.0, check_mode=False)
        torch.testing.assert_close(covariance(post), covariance(exact), rtol=0, atol=1e-10)


@pytest.mark.parametrize("features", FEATURES)
def test_batches_and_single_precision_change_rounding_alone(features):
    lin = linearized("classes")
    x, y = next(iter(lin.data)).inputs, next(iter(lin.data)).targets
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    torch.manual_seed(0)
    whole = make(co.linearize(model, (x, y), "classification"), 6, features=features)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    parts = make(co.linearize(model, loader, "classification"), 6, features=features)
    torch.testing.assert_close(covariance(parts), covariance(whole), rtol=0, atol=1e-10)
    single = make(co.linearize(model.float(), (x.float(), y), "classification"), 6, features=features)
    assert single.predict(X.float()).variance.dtype == torch.float32
    if features == "inducing":
        torch.testing.assert_close(single.rows, whole.rows)
        torch.testing.assert_close(covariance(single, X.float()).double(), covariance(whole), rtol=1e-3, atol=1e-4)


def test_it_is_saved_and_goes_into_a_botorch_model(tmp_path):
    lin = linearized()
    post = make(lin, 6, 0.7)
    post.save(tmp_path / "post")
    x, y = next(iter(lin.data)).inputs, next(iter(lin.data)).targets
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    again = co.load(tmp_path / "post", model, (x, y))
    torch.testing.assert_close(covariance(again), covariance(post), rtol=0, atol=1e-12)
    variance = co.gp.LaplaceModel(post).posterior(X.unsqueeze(1)).variance.flatten()
    torch.testing.assert_close(variance, post.predict(X).variance.flatten(), rtol=1e-10, atol=0)


def test_a_gaussian_of_few_features_has_draws_and_no_density():
    rest = make(linearized(), 6, 0.7).without_rest()
    draws = rest.deviations(4000, torch.Generator().manual_seed(0))
    expected = rest.covariance.to_dense()
    # Each entry deviates by √2 Σ/√k at most; five standard errors of 1,521 entries: one seed in 1,000 fails.
    assert float((draws.mT @ draws / 4000 - expected).abs().max()) < 5 * (2 / 4000) ** 0.5 * float(
        expected.diagonal().max()
    )
    with pytest.raises(ValueError, match="rank 6 has no density over 31 weights"):
        rest.log_prob(rest.mean)


@pytest.mark.parametrize("features", FEATURES)
def test_nothing_of_size_n_times_d_is_formed(features):
    """2,000 points and 5,501 weights: J itself would take 84 MiB in float64."""
    model = nn.Sequential(nn.Linear(10, 100), nn.Tanh(), nn.Linear(100, 43), nn.Tanh(), nn.Linear(43, 1)).double()
    x = torch.randn(2000, 10, dtype=DOUBLE)
    budget = 12 * 2**20
    lin = co.linearize(model, (x, x[:, :1].sin()), co.likelihoods.Gaussian(0.1), memory_budget=budget)
    peak, post = peak_of(lambda: make(lin, 24, features=features))
    assert 0 < float(post.error) < 1 and post.rank == 24
    J = lin.num_data * lin.num_parameters * 8
    assert peak < min(4 * budget, J / 2)


def test_rows_of_chosen_outputs_are_those_of_the_dense_jacobian():
    lin = linearized("classes")
    J, index = lin.jacobian().to_dense(), torch.tensor([31, 0, 1, 44, 31, 7])
    torch.testing.assert_close(lin.jacobian().rows_at(index), J[index].mT, rtol=0, atol=1e-12)
    with lin.memory.holding(lin.memory.room()):
        torch.testing.assert_close(lin.jacobian().rows_at(index), J[index].mT, rtol=0, atol=1e-12)
    kernel = co.TangentKernel(lin, 0.7, X)
    dense = co.TangentKernel(lin, 0.7, X, next(iter(lin.data)).inputs)
    torch.testing.assert_close(dense._columns(index), dense.to_dense()[:, index], rtol=0, atol=1e-12)
    found = co.linalg.cholesky(kernel, 5)
    torch.testing.assert_close(
        found.F @ found.F.mT, co.linalg.cholesky(kernel.to_dense(), 5) @ torch.eye(12, dtype=DOUBLE)
    )
