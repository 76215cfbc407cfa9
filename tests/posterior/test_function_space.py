"""Where points are few and weights many, the posterior solved for in function space is the same one.

Tests `function_space.py`, `precision.py`, `tangent_kernel.py`.
"""

import functools
import gc

import pytest
import torch
from torch import nn

import curvops as co
from curvops.linalg.core import solve_routes as routes
from tests.linalg.interrupted import killed_after

pytestmark = pytest.mark.filterwarnings("ignore::curvops.errors.ManyProductsWarning")
DOUBLE = torch.float64


WIDE = 1143
ALPHA = 0.7


def wide(likelihood):
    """Twenty points, three outputs, and more weights than are decomposed: many more than outputs in all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    x = torch.randn(20, 3, dtype=DOUBLE)
    y = torch.arange(20) % 3 if likelihood == "classification" else 3 * (2 * x).sin()
    batches = [(x[:12], y[:12]), (x[12:], y[12:])]
    return co.linearize(model, batches, co.likelihoods.Gaussian(0.05) if likelihood == "gaussian" else likelihood)


@functools.cache
def ggn_of(likelihood):
    """The matrix of the GGN of `wide`, in float64."""
    return co.GGN(wide(likelihood)).to_dense()


def may_be_formed(post):
    """Whether J Jᵀ is a possible route to determinants."""
    return any(route.name == "formed kernel" and route.possible for route in post.plan().tables["determinants"])


def dense_covariance(lin, G, x, alpha, temperature=1.0):
    """T J P⁻¹ Jᵀ from the matrix of the GGN in float64."""
    J = lin.jacobian(x).to_dense()
    P = G + alpha * torch.eye(lin.num_parameters, dtype=DOUBLE)
    return temperature * J @ torch.linalg.solve(P, J.mT)


def blocks_of(matrix, size):
    n = len(matrix) // size
    return matrix.reshape(n, size, n, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def test_the_mode_under_a_loss_in_single_precision():
    """Its sums are in float64, and torch's Huber loss takes outputs and targets of one dtype alone."""
    posts = [co.laplace(wide(nn.HuberLoss()).cast(dtype), prior_precision=ALPHA) for dtype in (torch.float32, DOUBLE)]
    single, double = (post.linear_mode().theta.double() for post in posts)
    torch.testing.assert_close(single, double, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("likelihood", ["classification", "gaussian"])
def test_predictions_at_a_few_points_are_exact_by_the_kernel(likelihood):
    """For each form of a covariance × two priors and temperatures; a gradient in the prior takes solves."""
    lin, G, x = wide(likelihood), ggn_of(likelihood), torch.linspace(-2, 2, 12, dtype=DOUBLE).view(4, 3)
    for alpha, temperature in ((ALPHA, 1.0), (3.0, 0.5)):
        post = co.laplace(lin, co.GGN, alpha, temperature=temperature, check_mode=False)
        assert post.plan(12).chosen["predictions"] == "formed kernel"
        expected = dense_covariance(lin, G, x, alpha, temperature)
        same = {"rtol": 1e-9, "atol": 1e-11}
        torch.testing.assert_close(post.predict(x).variance.flatten(), expected.diagonal(), **same)
        torch.testing.assert_close(post.predict(x).lazy_covariance_matrix.to_dense(), blocks_of(expected, 3), **same)
        torch.testing.assert_close(post.predict(x, groups=2).covariance_matrix, blocks_of(expected, 6), **same)
        torch.testing.assert_close(post.predict(x, joint=True, rtol=1e-12).covariance_matrix, expected, **same)
    noise = torch.tensor(ALPHA, dtype=DOUBLE, requires_grad=True)
    learned = co.laplace(lin, co.GGN, noise, check_mode=False)
    assert learned.plan(12).chosen["predictions"] != "formed kernel"
    (slope,) = torch.autograd.grad(learned.predict(x, rtol=1e-12).variance.sum(), noise)
    step = 1e-5
    sums = [dense_covariance(lin, G, x, ALPHA + sign * step).trace() for sign in (1, -1)]
    torch.testing.assert_close(slope, (sums[0] - sums[1]) / (2 * step), rtol=1e-6, atol=1e-8)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(co.laplace(lin, co.GGN, ALPHA, check_mode=False).predict(leaf).variance.sum(), leaf)
    shift = torch.zeros_like(x)
    shift[1, 2] = step
    sums = [dense_covariance(lin, G, at, ALPHA).trace() for at in (x + shift, x - shift)]
    torch.testing.assert_close(slope[1, 2], (sums[0] - sums[1]) / (2 * step), rtol=1e-4, atol=1e-7)


def test_single_precision_adds_up_in_float64():
    """The determinant lies in its bound, and zᵀP z of draws is χ², where λ/α in units of rounding is far above 1."""
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    x, at = torch.randn(20, 3), torch.randn(3, 3)
    lin = co.linearize(model, (x, x[:, :1]), co.likelihoods.Gaussian(1e-3))
    wide_lin = lin.cast(torch.float64)
    G = co.GGN(wide_lin).to_dense()
    unit, generator = torch.eye(len(G), dtype=DOUBLE), torch.Generator().manual_seed(0)
    for alpha in (1e-5, 1e-3, 1e3):
        post = co.laplace(lin, co.GGN, alpha, check_mode=False)
        assert post.plan(3).chosen["predictions"] == "formed kernel"
        expected = dense_covariance(wide_lin, G, at.double(), alpha).diagonal()
        torch.testing.assert_close(post.predict(at).variance.flatten().double(), expected, rtol=1e-4, atol=0)
        evidence, z = post.log_evidence(mode="linear"), post.deviations(4, generator=generator).draws
        ratio = evidence.log_determinant_ratio
        assert ratio.reason.name == "CONVERGED"
        assert abs(float(ratio.value - torch.logdet(G / alpha + unit))) <= float(ratio.bias_bound) < 0.5
        square = float((z.double() @ (G + alpha * unit) * z.double()).sum())
        assert square == pytest.approx(z.numel(), abs=5 * (2 * z.numel()) ** 0.5)
        exact = co.laplace(wide_lin, co.GGN, alpha, check_mode=False).log_evidence(mode="linear")
        assert float(evidence.value) == pytest.approx(float(exact.value), abs=0.02)


@pytest.fixture(scope="module", params=["classification", "gaussian"])
def formed(request):
    """A posterior that function space serves, its GGN as a matrix, and P."""
    lin = wide(request.param)
    post = co.laplace(lin, co.GGN, prior_precision=ALPHA, prior_mean=0.1, check_mode=False)
    assert may_be_formed(post)
    G = ggn_of(request.param)
    return post, G, G + ALPHA * torch.eye(WIDE, dtype=DOUBLE)


def test_the_evidence_is_exact(formed):
    """log det(I + SᵀS/α) and tr G P⁻¹, for this prior and, from the same decomposition, for another."""
    post, G, P = formed
    unit = torch.eye(WIDE, dtype=DOUBLE)
    ratio = post.log_evidence(1e-9).log_determinant_ratio
    assert ratio.reason.name == "CONVERGED" and ratio.stderr == 0
    assert float(ratio.value) == pytest.approx(float(torch.logdet(G / ALPHA + unit)), rel=1e-10)
    assert float(post.effective_parameters(1e-9).value) == pytest.approx(
        float(torch.linalg.solve(P, G).trace()), rel=1e-10
    )
    other = post.with_prior(20.0)
    expected = torch.logdet(G / 20.0 + unit)
    assert float(other.log_evidence(1e-9).log_determinant_ratio.value) == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("likelihood", ["classification", "gaussian"])
def test_an_evidence_decomposes_nothing(likelihood, monkeypatch):
    """Cholesky serves every prior, whatever was asked before, unless rounding may matter; a grid takes the spectrum."""
    lin, decomposed = wide(likelihood), []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda *args, **options: decomposed.append(1) or eigh(*args, **options))
    post = co.laplace(lin, co.GGN, prior_precision=ALPHA, check_mode=False)
    first = post.log_evidence(mode="map").log_determinant_ratio
    post.with_prior(2 * ALPHA).log_evidence(mode="map")
    assert not decomposed and first.reason.name == "CONVERGED" and float(first.bias_bound) <= 1e-9
    of_grid = co.evidence.grid(post, [ALPHA, 2 * ALPHA], mode="map")[0].log_determinant_ratio
    again = post.log_evidence(mode="map").log_determinant_ratio
    assert len(decomposed) == 1 and float(first.value) == float(again.value)
    assert float(of_grid.value) == pytest.approx(float(again.value), rel=1e-12) and of_grid.matvecs == again.matvecs
    expected = torch.logdet(ggn_of(likelihood) / ALPHA + torch.eye(WIDE, dtype=DOUBLE))
    assert float(first.value) == pytest.approx(float(expected), rel=1e-10)
    tiny = co.laplace(wide(likelihood), co.GGN, prior_precision=1e-14, check_mode=False)
    assert float(tiny.log_evidence(mode="map").log_determinant_ratio.bias_bound) > 0 and len(decomposed) == 2


def test_draws_are_those_of_weight_space(formed):
    post, *_ = formed
    found = post.deviations(3, generator=torch.Generator().manual_seed(0), rtol=1e-9)
    expected = post.deviations(3, noise=found.noise, method="cg", rtol=1e-12)
    assert found.method == "dual" and found.matvecs <= 18  # what setting up takes, and two iterations with a check
    torch.testing.assert_close(found.draws, expected.draws, rtol=1e-8, atol=1e-8)


def test_the_mode_is_that_of_weight_space(formed):
    """A precision for each weight has no formed kernel."""
    post, *_ = formed
    found = post.linear_mode(rtol=1e-9)
    assert found.converged and found.steps == 0
    expected = post.with_prior(torch.full_like(post.mean, float(post.prior_precision))).linear_mode(rtol=1e-11)
    assert expected.steps > 0
    torch.testing.assert_close(found.theta, expected.theta, rtol=1e-8, atol=1e-8)


FORMING = {
    "draws": lambda post, place: post.deviations(2, generator=torch.Generator().manual_seed(0), checkpoint=place).draws,
    "mode": lambda post, place: post.linear_mode(checkpoint=place).theta,
    "mackay": lambda post, place: co.evidence.mackay(post, samples=None, steps=2, checkpoint=place).prior_precision,
}


@pytest.mark.parametrize("what", FORMING)
def test_a_kernel_that_was_half_formed_goes_on(what, tmp_path, after, saved_at_each_step):
    """Ended within a panel of it, and in what follows; each run is that of a new process."""

    def run(folder):
        lin = wide("classification")
        lin.memory.keep(lin, lin.memory.room() - 2**15)
        return FORMING[what](co.laplace(lin, co.GGN, prior_precision=ALPHA, check_mode=False), folder)

    whole, work = run(tmp_path / "whole"), after["made"]
    assert not [path for path in (tmp_path / "whole").iterdir() if path.is_dir()]
    for killed in (6, work // 2, work - 1) if what == "mackay" else (6, work - 1):
        found = killed_after(killed, lambda killed=killed: run(tmp_path / str(killed)), after)
        assert torch.equal(found, whole)
        assert killed < 7 or after["made"] < work


def test_its_memory_is_counted(tmp_path):
    """K once, and for each posterior its eigenvectors and what it works in; given back with them."""
    lin = wide("gaussian")
    room = lin.memory.room()
    post = co.laplace(lin, co.GGN, prior_precision=ALPHA, check_mode=False)
    post.effective_parameters()
    once = room - lin.memory.room()
    other = post.with_noise(0.3)
    other.effective_parameters()
    size = 8 * 60**2
    assert once == routes.KERNEL_COPIES * size
    assert room - lin.memory.room() == (2 * routes.KERNEL_COPIES - 1) * size
    del post, other
    gc.collect()
    assert lin.memory.room() == room


def test_the_noise_may_change():
    """What was formed is forgotten where a likelihood's hyperparameter changes in place."""
    lin = wide("gaussian")
    post = co.laplace(lin, co.GGN, prior_precision=ALPHA, check_mode=False)
    before = float(post.log_evidence(1e-9).log_determinant_ratio.value)
    lin.likelihood.noise.fill_(0.1)
    G, unit = ggn_of("gaussian") * (0.05 / 0.1), torch.eye(WIDE, dtype=DOUBLE)
    after = float(post.log_evidence(1e-9).log_determinant_ratio.value)
    assert after == pytest.approx(float(torch.logdet(G / ALPHA + unit)), rel=1e-9) and after < 0.95 * before


@pytest.mark.parametrize(
    "curvature",
    [
        co.EmpiricalFisher,
        lambda lin: co.GGN(lin, mc_samples=1, generator=torch.Generator().manual_seed(0)),
        lambda lin: 0.5 * co.GGN(lin),
        lambda lin: co.GGN(lin) + co.GGN(wide("classification")),
    ],
)
def test_other_curvatures_are_not_taken_for_the_ggn(curvature):
    lin = wide("classification")
    post = co.laplace(lin, curvature(lin), prior_precision=ALPHA, check_mode=False)
    assert not may_be_formed(post)
