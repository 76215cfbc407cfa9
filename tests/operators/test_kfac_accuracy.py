"""KFAC, EKFAC and dense blocks of single-precision data: small eigenvalues right, or a warning that they may not be.

Tests `kfac.py`, `kfac_factors.py`, `kronecker_factors.py`, and targets that are drawn.
"""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import curvops as co
from curvops.errors import NotPositiveSemidefiniteError, PrecisionWarning
from curvops.linalg import Dense, Kronecker, Reason
from curvops.linalg.operators import Details
from tests.threads import using_threads

PRIORS = (1e-6, 1e-4, 1e-2)
CURVATURES: dict[str, Callable[[Any], Any]] = {
    "KFAC": co.KFAC,
    "KFAC, empirical": lambda lin: co.KFAC(lin, fisher="empirical"),
    "KFAC, separate": lambda lin: co.KFAC(lin, bias="separate"),
    "EKFAC": co.EKFAC,
    "BlockDiagonal": co.BlockDiagonal,
    "Subnetwork": lambda lin: co.Subnetwork(co.GGN(lin), torch.arange(0, lin.num_parameters, 3)),
    "DiagonalGGN": co.DiagonalGGN,
}


@functools.cache
def digits(outputs: int = 10, hidden: int = 8, points: int = 300) -> tuple[Any, Any, Tensor]:
    """A small network on raw pixels, 0 to 16, in float32 and in float64, and test points."""
    data = load_digits()
    x, y = torch.tensor(data.data)[:points].float(), torch.tensor(data.target)[:points]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
    single = co.linearize(model, (x, y), "classification")
    double = co.linearize(copy.deepcopy(model).double(), (x.double(), y), "classification")
    return single, double, x[:5]


@pytest.mark.parametrize("name", CURVATURES)
def test_single_precision_has_the_answers_of_double_precision(name: str) -> None:
    """Factors summed in single precision filled the null space of the softmax: variances off by a factor of 2."""
    single, double, x = digits()
    sides = []
    for lin in (single, double):
        A = CURVATURES[name](lin)
        J = lin.jacobian(x.to(lin.theta.dtype)).to_dense()
        J = J[:, A.indices] if isinstance(A, co.Subnetwork) else J
        with warnings.catch_warnings():
            warnings.simplefilter("error", PrecisionWarning)
            for prior in PRIORS:
                P = A.add_diagonal(prior)
                variances = (J * P.solve(J.mT).mT).sum(1)
                sides.append([variances.double(), P.inverse().diagonal().double(), P.logdet().double()])
    for found, expected in zip(sides[: len(PRIORS)], sides[len(PRIORS) :]):
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=0.0)


def test_a_wide_factor_of_few_rows_is_decomposed_from_them() -> None:
    """The same eigenvalues as of a thousand copies of the rows, an orthogonal basis, exact zeros in the null space."""
    model, x, y = nn.Linear(600, 3).double(), torch.randn(7, 600).double(), torch.arange(7) % 3
    thin = co.KFAC(co.linearize(model, (x, y), "classification"))
    whole = co.KFAC(co.linearize(model, (x.repeat(1000, 1), y.repeat(1000)), "classification"))
    eigen = thin.blocks[0].eigen()
    U = eigen.right_vectors[0]
    torch.testing.assert_close(U.mT @ U, torch.eye(601).double(), rtol=1e-10, atol=1e-12)
    assert int((eigen.values.amax((0, 1)) == 0).sum()) == 601 - 7
    v = torch.randn(1803, 2).double()
    torch.testing.assert_close(thin @ v, whole @ v / 1000, rtol=1e-10, atol=1e-10)
    for k in (1e-6, 1.0):
        found, expected = thin.add_diagonal(k).solve(v), whole.add_diagonal(1000 * k).solve(1000 * v)
        condition = 1 + float(eigen.values.max()) / k
        assert (found - expected).norm() < 10 * torch.finfo(v.dtype).eps * condition * expected.norm()


def test_few_rows_are_kept_and_decomposed_in_double_precision() -> None:
    """Twice as many rows as columns, of sizes 1 to 1e-4; beyond, and in double precision, the sum is in float64."""
    rows = torch.randn(8, 4) * torch.tensor([1.0, 1e-1, 1e-2, 1e-4])
    exact = rows.double().mT @ rows.double()
    model = nn.Linear(4, 1, bias=False)
    for count, x in ((1, rows), (2, rows), (1, rows.double())):
        batches = [(x, torch.zeros(8, 1).to(x))] * count
        K = co.KFAC(co.linearize(model.to(x.dtype), batches, co.likelihoods.Gaussian(1.0))).blocks[0]
        assert isinstance(K, Kronecker)
        (kept,) = [detail.root for detail, factor in zip(K.details, (K.left, K.right)) if factor.shape[1] == 4]
        assert (kept is not None) is (count == 1 and x.dtype == torch.float32)
        torch.testing.assert_close(K.to_dense().double(), count * exact, rtol=1e-5, atol=1e-12)
        expected = torch.linalg.eigvalsh(count * exact)
        torch.testing.assert_close(K.eigen().values.flatten().double(), expected, rtol=1e-5, atol=0.0)
        shift = 1e-12
        left = float(K.left)
        pi = float(K.right.double().diagonal(dim1=1, dim2=2).mean() / left) ** 0.5
        damped = K.heuristic_damping(shift).eigen().values.flatten().double()
        found = damped / (left + shift**0.5 / pi) - pi * shift**0.5
        torch.testing.assert_close(found, expected / left, rtol=1e-3, atol=1e-3 * pi * shift**0.5)


def test_a_root_of_repeated_and_zero_rows() -> None:
    row = torch.randn(1, 1, 6, dtype=torch.float64)
    root = torch.cat([row, row, torch.zeros_like(row), 1e-6 * torch.randn_like(row)], 1)
    A = Kronecker(torch.ones(1, 1, 1).double(), root.mT @ root, details=(Details(), Details(root=root)))
    U, values = A.eigen().right_vectors[0], A.eigen().values.flatten()
    torch.testing.assert_close(U.mT @ U, torch.eye(6).double(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(U @ torch.diag(values) @ U.mT, (root.mT @ root)[0], rtol=1e-12, atol=1e-15)
    assert int((values > 0).sum()) == 2


def test_wide_sums_in_single_precision_warn_below_what_they_tell() -> None:
    single, double, _ = digits(hidden=520, points=600)
    A = co.KFAC(single)
    with pytest.warns(PrecisionWarning, match=r"rounding of torch.float32 .* larger prior precision"):
        found = A.add_diagonal(1e-4).logdet()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        A.add_diagonal(1e4).logdet()
        co.KFAC(double).add_diagonal(1e-4).logdet()
        held_out = torch.rand(20, 64) * 16, torch.arange(20) % 10
        co.evidence.validate(co.laplace(single, A, 1.0, check_mode=False), *held_out)  # has tried 1e-4, too
    with pytest.warns(PrecisionWarning):
        post = co.laplace(single, A, 1e-4, check_mode=False)
        evidence = post.log_evidence(rtol=1e-9)
        effective = post.effective_parameters(rtol=1e-9)
    assert evidence.reason is Reason.PRECISION_LIMIT
    assert effective.reason is Reason.PRECISION_LIMIT
    exact = co.KFAC(double).add_diagonal(1e-4).logdet()
    assert (found.double() - exact).abs() <= A.add_diagonal(1e-4)._closed_form().logdet_error()


def test_a_wide_sum_of_many_rows_in_single_precision_loses_few_units() -> None:
    """Products that were added to a large sum in its own precision left a diagonal wrong by 3.5 units, not by 1.4."""
    x = torch.randn(20000, 514)
    data = [(x, torch.zeros(20000, 1))] * 10
    K = co.KFAC(co.linearize(nn.Linear(514, 1, bias=False), data, co.likelihoods.Gaussian(1.0))).blocks[0]
    assert isinstance(K, Kronecker)
    diagonal = (K.left.double() * K.right.double())[0].diagonal()
    gaps = diagonal / (10 * x.double().square().sum(0)) - 1
    assert gaps.square().mean().sqrt() < 2.2 * torch.finfo(torch.float32).eps


def test_a_large_dense_matrix_in_single_precision_warns() -> None:
    A = Dense(torch.diag(torch.cat([torch.ones(2048), torch.tensor([1e6, 0.0])])), psd=True)
    with pytest.warns(PrecisionWarning, match="Dense"):
        A.add_diagonal(1e-3).solve(torch.ones(2050))


def test_what_a_dtype_does_not_hold_survives_conversions_and_scaling() -> None:
    single, double, x = digits()
    A, exact = co.KFAC(single), co.KFAC(double)
    v = double.jacobian(x.double()).to_dense().mT
    expected = (v * (2 * exact).add_diagonal(1e-6).solve(v)).sum(0)
    for converted in (2 * A.to(dtype=torch.float64), (2 * A).to(dtype=torch.float64)):
        found = (v * converted.add_diagonal(1e-6).solve(v)).sum(0)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("kind", [co.KFAC, co.EKFAC])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_biases_in_blocks_of_their_own(kind: Any, sharing: str) -> None:
    """The joint blocks without what weight and bias share; EKFAC with each block's own second moments."""
    body = [nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)]
    model = nn.Sequential(*body).double()
    x = torch.randn(5, 2, 4, 4).double()
    lin = co.linearize(model, (x, torch.arange(5) % 3), "classification")
    apart, joint = kind(lin, sharing=sharing, bias="separate"), kind(lin, sharing=sharing)
    assert sorted(apart.names) == [("0.bias",), ("0.weight",), ("2.bias", "2.weight"), ("4.bias",), ("4.weight",)]
    if kind is co.KFAC:
        within = torch.zeros(lin.num_parameters, lin.num_parameters).double()
        for part in apart.partition.parts:
            index = torch.as_tensor(part)
            within[index[:, None], index] = 1
        torch.testing.assert_close(apart.to_dense(), joint.to_dense() * within, rtol=1e-10, atol=1e-12)
    elif sharing == "expand":  # exact second moments: the trace of the GGN
        torch.testing.assert_close(apart.diagonal().sum(), co.GGN(lin).to_dense().trace(), rtol=1e-10, atol=1e-12)
    prior = lin.flatten(
        {name: torch.full_like(p, 0.1 if "bias" in name else 2.0) for name, p in lin.unflatten(lin.theta).items()}
    )
    for curvature in (apart, joint):
        P = curvature.add_diagonal(prior)
        solution = torch.linalg.solve(P.to_dense(), lin.theta)
        torch.testing.assert_close(P.solve(lin.theta), solution, rtol=1e-9, atol=1e-12)


def test_sampled_targets_do_not_depend_on_the_batches() -> None:
    """Drawn in the walk's own pass from one batch, in a pass of their own from several."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(7, 4).double(), torch.arange(7) % 3
    for kind in (co.KFAC, co.EKFAC, co.DiagonalGGN, co.GGN):
        found, options = [], {} if kind is co.GGN else {"fisher": "mc"}
        for data in ((x, y), [(x[:3], y[:3]), (x[3:], y[3:])]):
            lin, generator = co.linearize(model, data, "classification"), torch.Generator().manual_seed(4)
            found.append(kind(lin, mc_samples=2, generator=generator, **options).to_dense())
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_eigendecompositions_run_side_by_side_and_are_shown():
    """They were made one after the other in silence: two threads that share one had taken eight times as long."""
    model = nn.Sequential(nn.Linear(30, 420), nn.Tanh(), nn.Linear(420, 3)).double()
    x, y = torch.randn(500, 30).double(), torch.arange(500) % 3
    seen, answers = [], []
    lin = co.linearize(model, (x, y), "classification", progress=lambda *step: seen.append(step))
    v = torch.linspace(-1, 1, lin.num_parameters).double()
    for count in (1, 3):
        with using_threads(count):
            answers.append([co.EKFAC(lin) @ v, co.KFAC(lin).add_diagonal(0.3).solve(v)])
            assert torch.get_num_threads() == count
        torch.testing.assert_close(answers[-1], answers[0], rtol=1e-10, atol=1e-12)
        assert seen.count(("eigendecompositions", 4, 4)) == 2
        seen.clear()
    wrong = co.linalg.Kronecker(torch.eye(3)[None], -torch.eye(4)[None])
    with pytest.raises(NotPositiveSemidefiniteError, match="right factor"):
        wrong.eigen()


def sequences() -> tuple[Any, Tensor, Tensor]:
    """A network with an output for each token, tokens and labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, torch.randint(7, (6, 5)), torch.randint(3, (6, 5))


@pytest.mark.parametrize("kind", [co.KFAC, co.EKFAC])
@pytest.mark.parametrize("options", [{}, {"fisher": "empirical"}, {"sharing": "reduce"}, {"bias": "separate"}])
def test_a_sample_of_weight_two_counts_as_two(kind: Any, options: dict[str, str]) -> None:
    """Weights multiplied the sensitivities alone, and inputs were averaged as if all points counted alike."""
    weights = torch.tensor([1, 2, 0, 3, 1, 2])
    repeated = torch.arange(6).repeat_interleave(weights)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    networks = (model, torch.randn(6, 3).double(), torch.arange(6) % 3), sequences()
    for net, x, y in networks if options != {"fisher": "empirical"} else networks[:1]:
        weighted = kind(co.linearize(net, (x, y, weights), "classification", weights=True), **options)
        expected = kind(co.linearize(net, (x[repeated], y[repeated]), "classification"), **options)
        torch.testing.assert_close(weighted.to_dense(), expected.to_dense(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "sharing"), [(co.KFAC, "expand"), (co.KFAC, "reduce"), (co.EKFAC, "expand")])
@pytest.mark.parametrize("left_out", ["target", "weight"])
def test_positions_that_do_not_count_are_as_if_they_were_not_there(kind: Any, sharing: str, left_out: str) -> None:
    """sharing="reduce" averaged inputs over all positions. Under "expand", positions count as points do."""
    net, x, y = sequences()
    masked, weights = y.clone(), torch.ones(6, 5)
    if left_out == "target":
        masked[:, 3:] = -100
    else:
        weights[:, 3:] = 0
    found = kind(co.linearize(net, (x, masked, weights), "classification", weights=True), sharing=sharing)
    x, y = x[:, :3], y[:, :3]
    if kind is co.KFAC and sharing == "expand":
        x, y = x.reshape(-1, 1), y.reshape(-1, 1)
    expected = kind(co.linearize(net, (x, y), "classification"), sharing=sharing)
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-10, atol=1e-12)
