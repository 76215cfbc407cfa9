"""Closed forms of the likelihoods against torch's losses, distributions and autograd, and by definition, in float64.

Tests `categorical.py`, `gaussian.py`, `independent.py`, `likelihood.py`.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvops.network.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    as_likelihood,
)
from tests.network.definitions import (
    TIGHT,
    autograd_gradient,
    autograd_hessians,
    binary_outcomes,
    class_outcomes,
    enumerated_moment,
    normal,
    require_consistent_products,
    require_sampled_moment,
)

N, C = 7, 4
W = torch.tensor([1.0, 0.0, 2.5, 1.0, 0.3, 4.0, 1.0], dtype=torch.float64)
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.3], dtype=torch.float64)
POSITIVE = torch.tensor([3.0, 0.0, 1.0, 0.2], dtype=torch.float64)
NOISE = torch.linspace(0.5, 2.0, C, dtype=torch.float64)

LABELS = torch.tensor([0, 3, 1, 1, 2, 2, 0])
SOME_IGNORED = torch.tensor([0, 3, 1, -100, 2, 2, 0])
ONE_HOT = F.one_hot(LABELS, C).double()
SHARES = normal(N, C, seed=1).softmax(-1)
REALS = normal(N, C, seed=1, scale=2.0)
HARD = (normal(N, C, seed=1) > 0).double()
SOFT = torch.rand(N, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
COUNTS = torch.randint(0, 6, (N, C), generator=torch.Generator().manual_seed(2))

CATEGORICALS: dict[str, dict] = {
    "plain": {},
    "weight": {"weight": WEIGHT},
    "smoothing": {"label_smoothing": 0.2},
    "both": {"weight": WEIGHT, "label_smoothing": 0.3},
}
BERNOULLIS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "weight": {"weight": WEIGHT},
    "pos_weight": {"pos_weight": POSITIVE},
    "both": {"weight": WEIGHT, "pos_weight": POSITIVE},
    "0-d": {"weight": WEIGHT[3], "pos_weight": POSITIVE[0]},
}
CASES: dict[str, tuple[Likelihood, Tensor]] = {
    **{f"categorical, {name}": (Categorical(**options), SOME_IGNORED) for name, options in CATEGORICALS.items()},
    **{f"categorical, {name}, soft": (Categorical(**options), SHARES) for name, options in CATEGORICALS.items()},
    "categorical, ignoring class 2": (Categorical(ignore_index=2), LABELS),
    "gaussian": (Gaussian(0.7), REALS),
    "gaussian per output": (Gaussian(NOISE), REALS),
    **{f"bernoulli, {name}": (Bernoulli(**options), HARD) for name, options in BERNOULLIS.items()},
    "bernoulli, both, soft": (Bernoulli(**BERNOULLIS["both"]), SOFT),
    "bernoulli, integers": (Bernoulli(pos_weight=POSITIVE), HARD.long()),
    "bernoulli, boolean": (Bernoulli(), HARD.bool()),
    "bernoulli, one output": (Bernoulli(pos_weight=POSITIVE[:1]), HARD[:, :1]),
    "poisson": (Poisson(), COUNTS),
    "poisson, floating": (Poisson(), COUNTS.double()),
    "poisson, one output": (Poisson(), COUNTS[:, :1]),
    "heteroscedastic": (HeteroscedasticGaussian(), normal(N, C // 2, seed=1)),
    "heteroscedastic, one mean": (HeteroscedasticGaussian(), normal(N, 1, seed=1)),
}
EVERY = pytest.mark.parametrize("name", CASES)
WEIGHTS = pytest.mark.parametrize("w", [None, W], ids=["unweighted", "weighted"])


def case(name: str, scale: float = 1.0) -> tuple[Likelihood, Tensor, Tensor]:
    """The likelihood, outputs and targets."""
    likelihood, y = CASES[name]
    columns = y.shape[1] if y.ndim == 2 else C
    f = normal(N, 2 * columns if isinstance(likelihood, HeteroscedasticGaussian) else columns, scale=scale)
    return likelihood, f, y


def fisher(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
    if not isinstance(likelihood, HeteroscedasticGaussian):
        return autograd_hessians(likelihood, f, y, w)
    m = y.shape[1]
    H = torch.diag_embed(torch.cat([1 / f[:, m:].exp(), torch.full_like(y, 0.5)], 1))
    return H if w is None else w[:, None, None] * H


@WEIGHTS
@EVERY
def test_residuals_and_products_are_the_gradient_and_the_dense_fisher(name: str, w: Tensor | None) -> None:
    likelihood, f, y = case(name, scale=2.0)
    torch.testing.assert_close(likelihood.residual(f, y, w), autograd_gradient(likelihood, f, y, w), **TIGHT)
    require_consistent_products(likelihood, f, y, w, fisher(likelihood, f, y, w))


@WEIGHTS
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("categorical", "bernoulli"))])
def test_monte_carlo_residuals_average_to_the_fisher(name: str, w: Tensor | None) -> None:
    likelihood, f, y = case(name)
    outcomes = class_outcomes(f) if isinstance(likelihood, Categorical) else binary_outcomes(f)
    moment = enumerated_moment(likelihood, f, y, w, outcomes)
    torch.testing.assert_close(moment, fisher(likelihood, f, y, w), **TIGHT)


@pytest.mark.parametrize("name", ["gaussian per output", "poisson", "heteroscedastic"])
def test_monte_carlo_residuals_have_the_fisher_as_second_moment(name: str) -> None:
    """4 standard errors, some 100 different entries a case: a false alarm below 2 % in all at a random seed."""
    likelihood, f, y = case(name)
    require_sampled_moment(likelihood, f, y, W, fisher(likelihood, f, y, W))


@pytest.mark.parametrize("name", ["categorical, plain", "gaussian", "bernoulli, plain", "poisson", "heteroscedastic"])
def test_samples_have_the_mean_and_suit_the_likelihood(name: str) -> None:
    """Mean of 10,000 draws within 4 standard errors, 28 entries a case."""
    likelihood, f, _ = case(name)
    repeated = f.repeat_interleave(10_000, 0)
    drawn = likelihood.sample(repeated, torch.Generator().manual_seed(1))
    likelihood.check_targets(drawn, f.shape[1])
    assert torch.equal(drawn, likelihood.sample(repeated, torch.Generator().manual_seed(1)))
    drawn = (F.one_hot(drawn, C).double() if isinstance(likelihood, Categorical) else drawn).unflatten(0, (N, 10_000))
    error = (drawn.mean(1) - likelihood.mean(f)).abs()
    assert (error <= 4 * drawn.std(1) / 100).all()


def products(likelihood: Likelihood, f: Tensor, u: Tensor, y: Tensor, w: Tensor | None = None) -> tuple[Tensor, ...]:
    return (
        likelihood.log_prob(f, y, w),
        likelihood.residual(f, y, w),
        likelihood.hessian_product(f, u, y, w),
        likelihood.root_product(f, u, y, w),
        likelihood.root_transpose_product(f, u, y, w),
    )


@pytest.mark.parametrize(
    "name", ["categorical, both", "categorical, both, soft", "bernoulli, both, soft", "poisson", "heteroscedastic"]
)
def test_gradients_through_outputs_and_vectors(name: str) -> None:
    likelihood, f, y = case(name)
    inputs = f.requires_grad_(), normal(N, C, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda f, u: products(likelihood, f, u, y, W), inputs, fast_mode=True)


@pytest.mark.parametrize("shape", [(), (1,), (C,)], ids=str)
def test_gradients_with_respect_to_the_noise(shape: tuple[int, ...]) -> None:
    noise = (torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5).requires_grad_()

    def at(s: Tensor, f: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return products(Gaussian().with_hyperparameters((s,)), f, u, REALS, W)

    inputs = noise, normal(N, C).requires_grad_(), normal(N, C, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(at, inputs)


@pytest.mark.parametrize("kind", [Categorical, Bernoulli])
def test_gradients_at_extreme_logits_are_finite(kind: type[Likelihood]) -> None:
    """The derivative of sqrt(p) is infinite where the smallest probability underflows."""
    f = (1e4 * torch.eye(2).double()).requires_grad_()
    y = torch.tensor([0, 1]) if kind is Categorical else torch.tensor([[0.0, 1.0]] * 2)
    (gradient,) = torch.autograd.grad(sum(t.sum() for t in products(kind(), f, torch.ones(2, 2).double(), y)), f)
    assert gradient.isfinite().all()


SIGNS = torch.tensor([[1.0], [-1.0]]).repeat(4, C)[:N]
EXTREMES: dict[str, tuple[Likelihood, Tensor, Tensor]] = {
    "categorical": (Categorical(), 10 * torch.eye(C), torch.arange(C)),
    "categorical, surer": (Categorical(), 1e4 * torch.eye(C), torch.arange(C)),
    "categorical, wrong": (Categorical(), 1e4 * torch.eye(C), torch.arange(C).roll(1)),
    "categorical, soft": (Categorical(), 100 * torch.eye(C), SHARES[:C].float()),
    "categorical, one-hot": (Categorical(), 100 * torch.eye(C), torch.eye(C)),
    "categorical, another one-hot": (Categorical(), 100 * torch.eye(C), torch.eye(C).roll(1, 0)),
    "bernoulli": (Bernoulli(), 100 * SIGNS, HARD.float()),
    "poisson": (Poisson(), 80 * SIGNS, COUNTS),
    "heteroscedastic": (HeteroscedasticGaussian(), 80 * SIGNS * (torch.arange(C) >= 2), REALS[:, :2].float()),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_outputs_in_float32(name: str) -> None:
    """Finite, and accurate: 1 - p from p itself would be 0 already at a logit of 17."""
    likelihood, f, y = EXTREMES[name]
    u = normal(*f.shape, seed=2, dtype=torch.float32)
    known = products(likelihood, f.double(), u.double(), y.double() if y.is_floating_point() else y)
    for i, (single, double) in enumerate(zip(products(likelihood, f, u, y), known)):
        assert single.dtype == torch.float32 and single.isfinite().all()
        atol = 1e-7 if i == 0 else 1e-37  # log p of a sure class is a difference
        torch.testing.assert_close(single.double(), double, rtol=2e-5, atol=atol)


def narrow_columns(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None = None, step: int = 9) -> Tensor:
    """The columns of the narrow root, some at a time."""
    M = likelihood.narrow_columns(f.shape[1])
    return torch.cat([likelihood.narrow_root(f, y, w, i, min(M, i + step)) for i in range(0, M, step)])


@pytest.mark.parametrize("step", [1, 2, 9])
@WEIGHTS
@pytest.mark.parametrize("name", ["categorical, both", "categorical, plain, soft", "gaussian per output", "poisson"])
def test_the_narrow_root_is_a_root_with_as_many_columns_as_the_hessian_has_rank(
    name: str, w: Tensor | None, step: int
) -> None:
    likelihood, f, y = case(name)
    hessians, columns = autograd_hessians(likelihood, f, y, w), narrow_columns(likelihood, f, y, w, step)
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


@pytest.mark.parametrize("options", CATEGORICALS.values(), ids=CATEGORICALS)
def test_points_count_where_their_curvature_is_not_zero(options: dict) -> None:
    expected = torch.ones(N, dtype=torch.bool)
    if options == CATEGORICALS["weight"]:
        expected[LABELS == 2] = False
    for y in (ONE_HOT, LABELS):
        assert torch.equal(Categorical(**options).counted(y), expected)
        assert torch.equal(Categorical(**options).counted(y, W), expected & (W != 0))


def test_products_work_under_functional_transforms() -> None:
    likelihood, f, u = Categorical(), normal(N, C), normal(N, C, seed=2)
    _, tangent = torch.func.jvp(lambda g: likelihood.residual(g, LABELS), (f,), (u,))
    torch.testing.assert_close(tangent, likelihood.hessian_product(f, u, LABELS), **TIGHT)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("classification", Categorical()),
        ("regression", Gaussian()),
        (Gaussian(3.0), Gaussian(3.0)),
        (nn.MSELoss(reduction="sum"), Gaussian(0.5)),
        (
            nn.CrossEntropyLoss(WEIGHT, ignore_index=1, label_smoothing=0.1, reduction="none"),
            Categorical(WEIGHT, ignore_index=1, label_smoothing=0.1),
        ),
        (nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=POSITIVE, reduction="mean"), Bernoulli(WEIGHT, POSITIVE)),
        (nn.PoissonNLLLoss(), Poisson()),
    ],
    ids=str,
)
def test_as_likelihood(spec: object, expected: Likelihood) -> None:
    assert repr(as_likelihood(spec)) == repr(expected)


def test_targets_are_checked_as_far_as_possible_without_c() -> None:
    Categorical().check_targets(torch.tensor([0, 1000, -100], dtype=torch.int32))
    Categorical().check_targets(torch.tensor([-100, -100]), C)
    Categorical().check_targets(SHARES, C)
    Categorical(WEIGHT).check_targets(SHARES.bfloat16())
    Bernoulli(WEIGHT).check_targets(HARD[:, :2])
    Poisson().check_targets(COUNTS)
    HeteroscedasticGaussian().check_targets(normal(N, 3))
    Gaussian(torch.ones(1)).check_targets(torch.zeros(3, C), C)


REFUSED: dict[str, Callable[[], object]] = {
    "needs 2 outputs or more": lambda: Categorical().check_targets(torch.tensor([0]), 1),
    "4 class weights were given, but": lambda: Categorical(WEIGHT).check_targets(torch.tensor([0]), 3),
    "the model's 3 outputs": lambda: HeteroscedasticGaussian().check_targets(normal(N, 3), 3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_to_moves_tensors_and_keeps_gradients() -> None:
    given = np.array([0.5, 2.0], dtype=np.float32)
    assert np.array_equal(Gaussian(given).noise.numpy(), given)
    noise = torch.tensor(2.0, requires_grad=True)
    moved = Gaussian(noise).to("cpu", torch.float64)
    assert moved.hyperparameters[0].dtype == torch.float64
    moved.noise.backward()
    assert noise.grad == 1.0
    likelihood = Bernoulli(WEIGHT, POSITIVE)
    narrow = likelihood.to("cpu", torch.float32)
    assert narrow.weight.dtype == narrow.pos_weight.dtype == torch.float32 and likelihood.weight is WEIGHT
    assert narrow.hessian_product(torch.zeros(N, C), torch.ones(N, C), HARD).dtype == torch.float32
