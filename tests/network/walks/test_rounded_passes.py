"""Curvatures multiplied from tensors in a lower precision: one symmetric psd matrix, as far away as it says."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from curvops.network.walks.rounded_passes import RoundedPasses
from tests.network.definitions import normal
from tests.zoo import ZOO, call, parameters_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::curvops.errors.LowerPrecisionWarning", "ignore::curvops.errors.NoCurvatureWarning"
)

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
N, C = 40, 3
X, LABELS = normal(N, 2, 8, seed=1), torch.arange(N) % C
PAIRS = {"float32 of float64": (F64, F32), "bfloat16 of float64": (F64, BF16), "bfloat16 of float32": (F32, BF16)}


class Mixed(nn.Module):
    """Layers kept as inputs and sensitivities, as rows, as features, and a parameter without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 2), nn.LayerNorm(7)
        self.wide, self.scale = nn.Linear(28, 5), nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.head = nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.conv(x).tanh()).flatten(1)
        found: Tensor = self.head(self.wide(hidden).tanh() * self.scale)
        return found


def mixed(dtype: torch.dtype = F64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Mixed().to(dtype)


def linearized(dtype: torch.dtype = F64, lower: torch.dtype | None = BF16, **options: Any) -> co.Linearization:
    options = {"data": (X.to(dtype), LABELS), "likelihood": "classification"} | options
    return co.linearize(mixed(dtype), compute_dtype=lower, **options)


def dense(operator: Any) -> Tensor:
    return (operator @ torch.eye(operator.shape[-1], dtype=operator.dtype)).double()


def require_close_and_psd(rounded: Any, exact: Any) -> None:
    """Check that the matrix is symmetric psd, and no further away than it says; say whether it differs at all."""
    R, A, eps = dense(rounded), dense(exact), torch.finfo(exact.dtype).eps
    size = float(A.norm())
    assert float((R - R.mT).norm()) <= 20 * eps * size
    assert float(torch.linalg.eigvalsh((R + R.mT) / 2)[0]) >= -100 * eps * size
    assert float((R - A).norm()) <= max(rounded.product_error, 50 * eps) * size


LIKELIHOODS: dict[str, tuple[Any, Tensor]] = {
    "categorical": (co.likelihoods.Categorical(), LABELS),
    "gaussian": (co.likelihoods.Gaussian(noise=0.3), normal(N, C, seed=2)),
    "poisson": (co.likelihoods.Poisson(), normal(N, C, seed=3).abs().round()),
    "bernoulli": (co.likelihoods.Bernoulli(), (normal(N, C, seed=4) > 0).double()),
    "from a loss": (nn.HuberLoss(), normal(N, C, seed=5)),
}
CURVATURES = {
    "GGN": co.GGN,
    "GGN of two draws": lambda lin: co.GGN(lin, mc_samples=2, generator=torch.Generator().manual_seed(0)),
    "EmpiricalFisher": co.EmpiricalFisher,
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("engine", ["auto", "layerwise"])
@pytest.mark.parametrize("named", LIKELIHOODS)
def test_every_curvature_is_symmetric_psd_and_within_its_error(named, engine, pair):
    (likelihood, y), (dtype, lower) = LIKELIHOODS[named], PAIRS[pair]
    data = [(X[:26].to(dtype), y[:26]), (X[26:].to(dtype), y[26:])]
    lins = [linearized(dtype, low, data=data, likelihood=likelihood, engine=engine) for low in (lower, None)]
    for name, make in CURVATURES.items():
        if name == "GGN of two draws" and named == "from a loss":
            continue  # a loss has nothing to draw
        rounded, exact = map(make, lins)
        require_close_and_psd(rounded, exact)
        unit = torch.finfo(lower).eps
        assert unit / 100 < rounded.product_error < 10 * unit
        assert exact.product_error == 0


@pytest.mark.parametrize("lower", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_every_layer_is_multiplied_by_one_psd_matrix(name, lower):
    model, inputs = ZOO[name].build()
    outputs = call(model, inputs)
    data = [(inputs, normal(*outputs.shape, seed=7))]
    names = list(parameters_of(model))
    make = lambda low: co.linearize(model, data, co.likelihoods.Gaussian(noise=0.5), compute_dtype=low)  # noqa: E731
    if ZOO[name].served_by_autodiff(names) == set(names):
        with pytest.raises(ValueError, match="no selected parameter has a rule"):
            make(lower)
        return
    require_close_and_psd(co.GGN(make(lower)), co.GGN(make(None)))


def test_tensors_of_sequences_and_of_tokens():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, C)).double()
    ids = torch.arange(12 * 4).view(12, 4) % 9
    data = [(ids, ids % C)]
    lins = [co.linearize(model, data, "classification", compute_dtype=low) for low in (BF16, None)]
    for make in (co.GGN, co.EmpiricalFisher, lambda lin: co.EmpiricalFisher(lin, per_token=True)):
        require_close_and_psd(*map(make, lins))


def test_one_matrix_whatever_is_kept_and_however_the_data_are_batched():
    V = normal(linearized().num_parameters, 4, seed=8)
    found = co.GGN(linearized()) @ V
    assert not torch.allclose(found, co.GGN(linearized(lower=None)) @ V, rtol=1e-6)
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=7)
    lins = [linearized(data=loader)]
    _ = co.GGN(lins[0]) @ V
    budget = 11 * lins[0].products.kept_bytes // 12
    for lin in (*lins, linearized(data=loader, memory_budget=budget)):
        G = co.GGN(lin)
        for _ in range(3):  # engines are kept after some products, within the budget
            torch.testing.assert_close(G @ V, found, rtol=1e-12, atol=1e-12)
        single = torch.cat([G @ v.unsqueeze(1) for v in V.unbind(1)], 1)
        torch.testing.assert_close(single, found, rtol=1e-12, atol=1e-12)
    kept = lin.plan.in_use.get("layerwise", 0)
    assert 0 < kept < 6 and lin.products.kept_bytes <= budget


def test_bytes_of_the_kept_tensors_fall_as_their_dtype():
    rows = torch.arange(N, dtype=F64)[:, None].expand(-1, 30).contiguous() / N
    model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, C)).double()
    kept = {}
    for low in (None, F32, BF16):
        lin = co.linearize(model, (rows, LABELS), "classification", engine="layerwise", compute_dtype=low)
        co.GGN(lin) @ torch.ones(lin.num_parameters, dtype=F64)
        kept[low] = lin.products.kept_bytes
        assert kept[low] == N * lin.plan.layerwise_bytes
    assert kept[None] == 2 * kept[F32] == 4 * kept[BF16]


def test_what_is_no_product_is_computed_as_without():
    low, full = linearized(F32), linearized(F32, None)
    v = torch.ones(low.num_parameters, 2)
    _ = co.GGN(low) @ v, co.EmpiricalFisher(low) @ v
    answers = {
        "gradient": lambda lin: lin.gradient(),
        "log-likelihood": lambda lin: lin.log_likelihood(),
        "J": lambda lin: lin.jacobian() @ v,
        "the points' gradients": lambda lin: lin.gradients() @ v,
        "diagonal": lambda lin: co.DiagonalGGN(lin).entries,
        "the GGN's diagonal": lambda lin: co.GGN(lin).diagonal(),
        "KFAC": lambda lin: co.KFAC(lin) @ v,
        "Hessian": lambda lin: co.Hessian(lin) @ v,
        "block": lambda lin: co.Subnetwork(co.GGN(lin), torch.arange(9)).to_dense(),
        "kernel": lambda lin: co.TangentKernel(lin).to_dense(),
    }
    for name, answer in answers.items():
        torch.testing.assert_close(answer(low), answer(full), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_of_vectors_and_hyperparameters_are_those_of_the_rounded_matrix():
    noise = torch.tensor(0.3, dtype=F64, requires_grad=True)
    lin = linearized(likelihood=co.likelihoods.Gaussian(noise=noise), data=(X, normal(N, C, seed=2)))
    G = co.GGN(lin)
    v = normal(lin.num_parameters, seed=9).requires_grad_()
    value = v @ (G @ v)
    of_v, of_noise = torch.autograd.grad(value, (v, noise))
    torch.testing.assert_close(of_v, 2 * (G @ v).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_noise, -value.detach() / 0.3, rtol=1e-12, atol=1e-12)


SHIFT = 5.0
ASKED = {
    "cg": lambda P, b, rtol: co.linalg.cg(P, b, rtol=rtol),
    "minres": lambda P, b, rtol: co.linalg.minres(P, b, rtol=rtol),
    "lsmr": lambda P, b, rtol: co.linalg.lsmr(P, b, rtol=rtol),
    "solve": lambda P, b, rtol: co.linalg.solve(P, b, method="cg", rtol=rtol),
    "eigsh": lambda P, b, rtol: co.linalg.eigsh(P, 2, rtol=rtol),
    "svds": lambda P, b, rtol: co.linalg.svds(P, 2, rtol=rtol),
    "low_rank": lambda P, b, rtol: co.low_rank(P, rtol=rtol),
    "trace": lambda P, b, rtol: co.linalg.trace(P, rtol=rtol),
    "diagonal": lambda P, b, rtol: co.linalg.diagonal(P, rtol=rtol),
    "logdet": lambda P, b, rtol: co.linalg.logdet(P, rtol=rtol),
    "frobenius_norm": lambda P, b, rtol: co.linalg.frobenius_norm(P, rtol=rtol),
    "apply_function": lambda P, b, rtol: co.linalg.apply_function(P, torch.sqrt, b, rtol=rtol),
    "inverse_sqrt": lambda P, b, rtol: co.linalg.inverse_sqrt(P, b, rtol=rtol),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_tolerance_below_the_error_is_refused_by_name_and_one_above_is_served(name):
    P = co.GGN(linearized()).add_diagonal(SHIFT)
    b, error = normal(P.shape[-1], seed=6), P.product_error
    with pytest.raises(ValueError, match=rf"rtol=.*products with A.*{error:.1e}.*without compute_dtype"):
        ASKED[name](P, b, error / 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ASKED[name](P, b, 0.2)
    ASKED[name](co.GGN(linearized(lower=None)).add_diagonal(SHIFT), b, 0.2)


def test_a_solution_at_the_tolerance_of_the_products_is_within_the_condition_number():
    low, full = (co.GGN(linearized(lower=lower)).add_diagonal(SHIFT) for lower in (BF16, None))
    b, rtol = normal(low.shape[-1], seed=6), low.product_error
    A = full.to_dense()
    exact = torch.linalg.solve(A, b)
    found = co.linalg.cg(low, b, rtol=rtol).x
    condition = float(torch.linalg.cond(A))
    assert float((found - exact).norm() / exact.norm()) <= 2 * rtol * condition


def test_sketches_and_preconditioners_serve_the_exact_matrix():
    G, exact = co.GGN(linearized()), co.GGN(linearized(lower=None))
    b, seed = normal(G.shape[-1], 3, seed=6), torch.Generator().manual_seed(0)
    nystrom = co.linalg.nystrom(G, rank=40, shift=0.1, generator=seed)
    P = exact.add_diagonal(0.1)
    solve = partial(co.linalg.cg, P, b, rtol=1e-10, keep_directions=0)
    plain, better = solve(), solve(preconditioner=nystrom.preconditioner())
    assert better.converged.all() and better.matvecs < plain.matvecs / 2
    approximation, A = co.low_rank(G, rank=60, generator=seed), exact.to_dense()
    off = float((approximation.to_dense() - A).norm() / A.norm())
    assert off < G.product_error + 2 * float(approximation.error.value)
    found, trace = co.linalg.trace(G, rtol=0.05, generator=seed), float(A.trace())
    assert abs(float(found.value) - trace) < 4 * float(found.stderr) + G.product_error * trace
    density = co.linalg.spectral_density(G, generator=seed)
    assert density.integral() + density.zero_mass == pytest.approx(1, abs=1e-6)


GGN_ASKED = {
    "solve": lambda post, P: P.solve(torch.ones(P.shape[-1], dtype=P.dtype)),
    "inverse": lambda post, P: P.inverse() @ torch.ones(P.shape[-1], dtype=P.dtype),
    "variances": lambda post, P: P.inverse().diagonal(),
    "draws": lambda post, P: post.sample(2),
    "predictions": lambda post, P: post.predict(X[:2].to(P.dtype)).covariance_matrix,
    "all eigenvalues": lambda post, P: P.eigsh(2),
    "log-determinant": lambda post, P: P.stochastic_logdet(rtol=1e-4),
}


@pytest.mark.parametrize("name", GGN_ASKED)
def test_what_solves_with_products_refuses_at_its_default_tolerance(name):
    post = co.laplace(linearized(), co.GGN, 1.0, check_mode=False)
    with pytest.raises(ValueError, match="linearise without compute_dtype"):
        GGN_ASKED[name](post, post.precision)


def test_evidence_from_products_is_within_their_error_and_structured_posteriors_do_not_change():
    lin, full = linearized(F32), linearized(F32, None)
    for curvature, rtol in ((co.KFAC, 1e-5), (co.DiagonalGGN, 1e-5), (co.GGN, co.GGN(lin).product_error)):
        posts = (co.laplace(one, curvature, 1.0, check_mode=False) for one in (lin, full))
        found, expected = (post.log_evidence().value for post in posts)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-4)


def test_the_error_is_warned_of_and_shown_by_the_plan():
    with pytest.warns(co.errors.LowerPrecisionWarning, match="relative error on the first points is") as caught:
        lin = co.linearize(mixed(), (X, LABELS), "classification", compute_dtype=BF16)
    assert len([warning for warning in caught if warning.category is co.errors.LowerPrecisionWarning]) == 1
    assert lin.plan.product_error == lin.products.product_error == co.GGN(lin).product_error
    assert (
        f"compute_dtype=torch.bfloat16 for products of curvatures: relative error {lin.products.product_error:.1e}"
        in str(lin.plan)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", co.errors.LowerPrecisionWarning)
        assert linearized(lower=None).plan.product_error is None


def test_casts_subsets_and_records_keep_it(tmp_path):
    lin = linearized(F32)
    assert lin.cast(F64).compute_dtype == BF16 and isinstance(lin.cast(F64).products, RoundedPasses)
    assert linearized(F64, F32).cast(F32).compute_dtype is None
    few = lin.restrict(torch.arange(9), 2.0)
    assert few.compute_dtype == BF16
    require_close_and_psd(co.GGN(few), co.GGN(linearized(F32, None).restrict(torch.arange(9), 2.0)))
    co.laplace(lin, co.KFAC, 1.0, check_mode=False).save(tmp_path / "post")
    again = co.load(tmp_path / "post", mixed(F32), (X.float(), LABELS)).lin
    assert again.compute_dtype == BF16
    torch.testing.assert_close(dense(co.GGN(again)), dense(co.GGN(lin)), rtol=0, atol=0)


class Switching(nn.Module):
    """A layer that runs for batches without a large number only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.stack([self.first(row) for row in x]) if bool(x.amax() > 50) else self.first(x)
        found: Tensor = self.head(hidden.tanh())
        return found


def test_a_batch_in_which_layers_run_differently_is_refused():
    x = normal(6, 4)
    x[5] = 100.0
    data = [(x[:3], LABELS[:3]), (x[3:], LABELS[3:6])]
    lin = co.linearize(Switching().double(), data, "classification", compute_dtype=BF16)
    with pytest.raises(RuntimeError, match="ran differently in this batch.*without compute_dtype"):
        co.GGN(lin) @ torch.ones(lin.num_parameters, dtype=F64)


@pytest.mark.parametrize(("dtype", "lower"), [(F32, BF16), (F64, BF16), (F64, F32)], ids=str)
def test_large_numbers_keep_their_relative_error(dtype, lower):
    lins = [linearized(dtype, low, data=((X * 1e6).to(dtype), LABELS)) for low in (lower, None)]
    require_close_and_psd(*map(co.GGN, lins))
