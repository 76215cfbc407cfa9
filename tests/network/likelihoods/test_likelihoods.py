"""Closed forms of the likelihoods against torch's losses, autograd and dense references in float64.

Tests `categorical.py`, `gaussian.py`, `likelihood.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from curvops.network.likelihoods import Categorical, Gaussian, Likelihood, as_likelihood
from tests.network.definitions import TIGHT, autograd_hessians, dense_root

N, C, K = 7, 4, 3


def outputs(seed: int = 0, scale: float = 2.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return scale * torch.randn(N, C, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels() -> Tensor:
    return torch.tensor([0, 3, 1, -100, 2, 2, 0])


CLASS_WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.3], dtype=torch.float64)
SAMPLE_WEIGHT = torch.tensor([1.0, 0.0, 2.5, 1.0, 0.3, 4.0, 1.0], dtype=torch.float64)

CATEGORICALS = {
    "plain": {},
    "class weights": {"weight": CLASS_WEIGHT},
    "smoothing": {"label_smoothing": 0.2},
    "ignoring class 2": {"ignore_index": 2},
    "all": {"weight": CLASS_WEIGHT, "label_smoothing": 0.3, "ignore_index": -100},
}

LIKELIHOODS: dict[str, tuple[Likelihood, Tensor]] = {
    **{f"categorical, {name}": (Categorical(**options), labels()) for name, options in CATEGORICALS.items()},
    "gaussian": (Gaussian(0.7), outputs(1)),
    "gaussian per output": (Gaussian(torch.linspace(0.5, 2.0, C, dtype=torch.float64)), outputs(1)),
}
LIKELIHOODS["categorical, ignoring class 2"] = (Categorical(ignore_index=2), labels().clamp(min=0))


@pytest.fixture(params=LIKELIHOODS, name="case")
def likelihood_and_targets(request: pytest.FixtureRequest) -> tuple[Likelihood, Tensor]:
    return LIKELIHOODS[request.param]


@pytest.fixture(params=[None, SAMPLE_WEIGHT], ids=["unweighted", "weighted"], name="w")
def sample_weights(request: pytest.FixtureRequest) -> Tensor | None:
    return request.param


@pytest.mark.parametrize("options", CATEGORICALS.values(), ids=CATEGORICALS)
def test_categorical_is_torchs_cross_entropy(options: dict) -> None:
    f, y = outputs(), labels()
    y = y.clamp(min=0) if options.get("ignore_index") == 2 else y
    likelihood = Categorical(**options)
    each = cross_entropy(f, y, reduction="none", **options)
    torch.testing.assert_close(-likelihood.log_prob(f, y), each, **TIGHT)

    def loss(g: Tensor) -> Tensor:
        return cross_entropy(g, y, reduction="sum", **options)

    torch.testing.assert_close(likelihood.residual(f, y), torch.autograd.functional.jacobian(loss, f), **TIGHT)
    hessian = torch.autograd.functional.hessian(loss, f)
    u = outputs(2)
    expected = torch.einsum("ncmd,md->nc", hessian, u)
    torch.testing.assert_close(likelihood.hessian_product(f, u, y), expected, **TIGHT)


def test_gaussian_is_torchs_normal() -> None:
    f, y = outputs(), outputs(1)
    noise = torch.linspace(0.5, 2.0, C, dtype=torch.float64)
    expected = torch.distributions.Normal(f, noise.sqrt()).log_prob(y).sum(-1)
    torch.testing.assert_close(Gaussian(noise).log_prob(f, y), expected, **TIGHT)


def test_residual_is_the_gradient(case: tuple[Likelihood, Tensor], w: Tensor | None) -> None:
    likelihood, y = case
    f = outputs().requires_grad_()
    (gradient,) = torch.autograd.grad(-likelihood.log_prob(f, y, w).sum(), f)
    torch.testing.assert_close(likelihood.residual(f.detach(), y, w), gradient, **TIGHT)


def test_products_match_dense_hessian(case: tuple[Likelihood, Tensor], w: Tensor | None) -> None:
    likelihood, y = case
    f = outputs()
    hessians = autograd_hessians(likelihood, f, y, w)
    block = torch.stack([outputs(seed) for seed in range(3, 3 + K)])
    expected = torch.einsum("ncd,knd->knc", hessians, block)
    torch.testing.assert_close(likelihood.hessian_product(f, block, y, w), expected, **TIGHT)
    torch.testing.assert_close(likelihood.hessian_product(f, block[0], y, w), expected[0], **TIGHT)
    root = dense_root(likelihood, f, y, w)
    torch.testing.assert_close(root @ root.mT, hessians, **TIGHT)
    transposed = likelihood.root_transpose_product(f, block, y, w)
    torch.testing.assert_close(transposed, torch.einsum("ncr,knc->knr", root, block), **TIGHT)


def narrow_columns(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None = None, step: int = 9) -> Tensor:
    """The columns of the narrow root, some at a time."""
    M = likelihood.narrow_columns(f.shape[1])
    return torch.cat([likelihood.narrow_root(f, y, w, i, min(M, i + step)) for i in range(0, M, step)])


@pytest.mark.parametrize("step", [1, 2, 9])
def test_the_narrow_root_is_a_root_with_as_many_columns_as_the_hessian_has_rank(
    case: tuple[Likelihood, Tensor], w: Tensor | None, step: int
) -> None:
    likelihood, y = case
    f = outputs()
    hessians = autograd_hessians(likelihood, f, y, w)
    columns = narrow_columns(likelihood, f, y, w, step)
    assert len(columns) == int(torch.linalg.matrix_rank(hessians).max())
    torch.testing.assert_close(torch.einsum("mnc,mnd->ncd", columns, columns), hessians, **TIGHT)


@pytest.mark.parametrize("scale", [10.0, 100.0, 1e4, math.inf])
def test_the_narrow_root_keeps_its_digits_at_extreme_logits(scale: float) -> None:
    """Entries and sums of columns, which are zero; a logit of minus infinity excludes a class."""
    f = torch.zeros(C, C).fill_diagonal_(-scale) if scale == math.inf else scale * torch.eye(C)
    f[-1] = torch.tensor([0.0, -scale, -scale, 0.5])
    y = torch.arange(C)
    single, double = narrow_columns(Categorical(), f, y), narrow_columns(Categorical(), f.double(), y)
    torch.testing.assert_close(single.double(), double, rtol=2e-5, atol=1e-37)
    sums = double.sum(-1).abs()
    assert (sums <= 1e-12 * double.abs().sum(-1)).all()
    p = f.double().softmax(-1)
    H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    torch.testing.assert_close(torch.einsum("mnc,mnd->ncd", double, double), H, **TIGHT)


def test_monte_carlo_residual_has_the_hessian_as_second_moment(
    case: tuple[Likelihood, Tensor], w: Tensor | None
) -> None:
    """Second moments of 10,000 draws, every entry within 5 standard errors: false alarm below 1e-3 in all."""
    likelihood, y = case
    generator = torch.Generator().manual_seed(0)
    draws = 10_000
    f = outputs(scale=1.0)

    def repeat(t: Tensor) -> Tensor:
        return t.repeat_interleave(draws, 0)

    r = likelihood.mc_residual(repeat(f), repeat(y), None if w is None else repeat(w), generator)
    squares = torch.einsum("nc,nd->ncd", r, r).view(N, draws, C, C)
    error = (squares.mean(1) - autograd_hessians(likelihood, f, y, w)).abs()
    assert (error <= 5 * squares.std(1) / math.sqrt(draws) + 1e-12).all()


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.3)], ids=repr)
def test_samples_have_the_mean(likelihood: Likelihood) -> None:
    """Mean of 10,000 draws within 5 standard errors: false alarm below 1e-4."""
    f = outputs(scale=1.0).repeat_interleave(10_000, 0)
    drawn = likelihood.sample(f, torch.Generator().manual_seed(1))
    likelihood.check_targets(drawn, C)
    assert torch.equal(drawn, likelihood.sample(f, torch.Generator().manual_seed(1)))
    if isinstance(likelihood, Categorical):
        drawn = nn.functional.one_hot(drawn, C).double()
    drawn = drawn.view(N, -1, C)
    error = (drawn.mean(1) - likelihood.mean(f[::10_000])).abs()
    assert (error <= 5 * drawn.std(1) / 100).all()


@pytest.mark.parametrize("shape", [(), (1,), (C,)], ids=str)
def test_gradients_with_respect_to_the_noise(shape: tuple[int, ...]) -> None:
    noise = (torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5).requires_grad_()
    f, y, u = outputs().requires_grad_(), outputs(1), outputs(2).requires_grad_()
    likelihood = Gaussian()

    def products(s: Tensor, f: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        rebuilt = likelihood.with_hyperparameters((s,))
        return (
            rebuilt.log_prob(f, y, SAMPLE_WEIGHT),
            rebuilt.residual(f, y, SAMPLE_WEIGHT),
            rebuilt.hessian_product(f, u, y, SAMPLE_WEIGHT),
            rebuilt.root_product(f, u, y, SAMPLE_WEIGHT),
            rebuilt.root_transpose_product(f, u, y, SAMPLE_WEIGHT),
        )

    assert torch.autograd.gradcheck(products, (noise, f, u))


def test_gradients_through_the_categorical() -> None:
    """Also at logits whose smallest probability underflows, where the derivative of sqrt(p) would be infinite."""
    f, u = outputs().requires_grad_(), outputs(2).requires_grad_()
    likelihood, y = LIKELIHOODS["categorical, all"]

    def products(f: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return (
            likelihood.residual(f, y, SAMPLE_WEIGHT),
            likelihood.hessian_product(f, u, y, SAMPLE_WEIGHT),
            likelihood.root_product(f, u, y, SAMPLE_WEIGHT),
            likelihood.root_transpose_product(f, u, y, SAMPLE_WEIGHT),
        )

    assert torch.autograd.gradcheck(products, (f, u), fast_mode=True)
    extreme = (1e4 * torch.eye(N, C, dtype=torch.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(sum(t.sum() for t in products(extreme, u)), extreme)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("scale", [10.0, 1e4])
def test_categorical_at_extreme_logits_in_float32(scale: float) -> None:
    """Confident predictions keep their digits: p(1 - p) from p itself would be off by 0.1 % to 100 %."""
    likelihood, y = Categorical(), torch.arange(C)
    f32 = scale * torch.eye(C)
    u32 = outputs(2, dtype=torch.float32)[:C]
    f, u = f32.double(), u32.double()
    pairs = [
        (likelihood.log_prob(f32, y.roll(1)), likelihood.log_prob(f, y.roll(1))),
        (likelihood.residual(f32, y), likelihood.residual(f, y)),
        (likelihood.hessian_product(f32, u32, y), likelihood.hessian_product(f, u, y)),
        (likelihood.root_product(f32, u32, y), likelihood.root_product(f, u, y)),
        (likelihood.root_transpose_product(f32, u32, y), likelihood.root_transpose_product(f, u, y)),
    ]
    for single, double in pairs:
        assert single.isfinite().all()
        torch.testing.assert_close(single.double(), double, rtol=5e-6, atol=1e-40)


def test_products_work_under_functional_transforms() -> None:
    likelihood, y, f, u = Categorical(), labels(), outputs(), outputs(2)
    _, tangent = torch.func.jvp(lambda g: likelihood.residual(g, y), (f,), (u,))
    torch.testing.assert_close(tangent, likelihood.hessian_product(f, u, y), **TIGHT)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("classification", Categorical()),
        ("regression", Gaussian()),
        (Gaussian(3.0), Gaussian(3.0)),
        (nn.MSELoss(), Gaussian(0.5)),
        (nn.MSELoss(reduction="sum"), Gaussian(0.5)),
        (nn.CrossEntropyLoss(), Categorical()),
        (
            nn.CrossEntropyLoss(CLASS_WEIGHT, ignore_index=1, label_smoothing=0.1, reduction="none"),
            Categorical(CLASS_WEIGHT, ignore_index=1, label_smoothing=0.1),
        ),
    ],
    ids=str,
)
def test_as_likelihood(spec: object, expected: Likelihood) -> None:
    assert repr(as_likelihood(spec)) == repr(expected)


def test_mse_loss_is_a_gaussian_up_to_a_constant() -> None:
    f, y = outputs().requires_grad_(), outputs(1)
    (gradient,) = torch.autograd.grad(nn.MSELoss(reduction="sum")(f, y), f)
    torch.testing.assert_close(as_likelihood(nn.MSELoss()).residual(f.detach(), y), gradient, **TIGHT)


def test_class_labels_are_checked_as_far_as_possible_without_c() -> None:
    Categorical().check_targets(torch.tensor([0, 1000, -100], dtype=torch.int32))
    Categorical().check_targets(torch.tensor([-100, -100]), C)
    with pytest.raises(ValueError, match="0 .. C - 1"):
        Categorical().check_targets(torch.tensor([-7]))
    with pytest.raises(ValueError, match="C >= 2"):
        Categorical().check_targets(torch.tensor([0]), 1)
    with pytest.raises(ValueError, match="4 class weights"):
        Categorical(CLASS_WEIGHT).check_targets(torch.tensor([0]), 3)


def test_noise_must_fit_the_outputs() -> None:
    Gaussian(torch.ones(1)).check_targets(torch.zeros(3, C), C)
    with pytest.raises(ValueError, match=r"noise has shape \(3,\)"):
        Gaussian(torch.ones(3)).check_targets(torch.zeros(3, C), C)


def test_to_moves_tensors_and_keeps_gradients() -> None:
    noise = torch.tensor(2.0, requires_grad=True)
    moved = Gaussian(noise).to("cpu", torch.float64)
    assert moved.hyperparameters[0].dtype == torch.float64
    moved.noise.backward()
    assert noise.grad == 1.0
    weighted = Categorical(CLASS_WEIGHT)
    assert weighted.to(dtype=torch.float32).weight.dtype == torch.float32
    assert weighted.weight is CLASS_WEIGHT


def test_hyperparameters_must_match_in_number() -> None:
    assert Categorical().with_hyperparameters(()).hyperparameters == ()
    with pytest.raises(ValueError, match="0 hyperparameters"):
        Categorical().with_hyperparameters((torch.tensor(1.0),))
