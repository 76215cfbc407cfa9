"""What public calls cost, in counts: reads of the data, forward and backward passes, and products.

Times cannot be asserted, but these numbers are determined: a call that passes over the data once more than its
docstring says, or multiplies once more, fails here. Passes count points, in units of all data, so that a pass over a
part counts as that part. Where a solver decides, the count lies between bounds.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.operators import Jacobian
from curvops.operators.curvatures import Curvature, CurvatureRoot
from tests.randomness import seeded

N, C, BATCH = 24, 3, 8
FORWARDS = Counter[str]()


class Counting(nn.Module):
    """A classifier whose forward passes count their points."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 40), nn.Linear(40, C)

    def forward(self, x: Tensor) -> Tensor:
        FORWARDS["forward"] += len(x)
        found: Tensor = self.head(self.first(x).tanh())
        return found


class Data:
    """Batches that count how often they are read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(N, 6, generator=generator, dtype=torch.float64)
        self.y = torch.arange(N) % C

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        FORWARDS["read"] += 1
        return iter(list(zip(self.x.split(BATCH), self.y.split(BATCH), strict=True)))


class Scaled(Counting):
    """The same with a weight that has no layer rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def linearized(network: type[Counting] = Counting, **options: Any) -> co.operators.Linearization:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network().double()
    return co.linearize(model, Data(), "classification", **options)


class Counts(NamedTuple):
    """Reads of all batches; forward and backward passes over all data; products with a curvature, and with J or Jᵀ."""

    reads: Any = 0
    forward: Any = 0
    backward: Any = 0
    products: Any = 0
    of_J: Any = 0


def counted(call: Callable[[co.operators.Linearization], object], options: dict[str, Any] | None = None) -> Counts:
    """Return what a call costs beyond the linearisation itself and the checks of its derivatives."""
    lin, found = linearized(**options or {}), defaultdict[str, float](float)
    _ = lin.plan  # tries whether a pass may be kept
    lin.passes.engines.checked_others(Data().x, whole=True)
    gradient = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **given: Any) -> Any:
        tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
        columns = len(grad_outputs) if given.get("is_grads_batched") else 1
        found["backward"] += columns * (len(tensor) if tensor.ndim else 0)
        return gradient(outputs, inputs, grad_outputs, **given)

    def noting(name: str, method: Callable[..., Tensor], share: float = 1.0) -> Callable[..., Tensor]:
        def multiply(self: Any, block: Tensor) -> Tensor:
            found[name] += share * block.shape[1]
            return method(self, block)

        return multiply

    FORWARDS.clear()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch.autograd, "grad", grad)
        patch.setattr(Curvature, "_product", noting("products", Curvature._product))
        for half in ("_product", "_transposed_product"):
            patch.setattr(CurvatureRoot, half, noting("products", getattr(CurvatureRoot, half), 0.5))
        patch.setattr(Jacobian, "_product", noting("J", Jacobian._product))
        patch.setattr(Jacobian, "_transposed_product", noting("J", Jacobian._transposed_product))
        call(lin)
    passes = FORWARDS["forward"] / N, found["backward"] / N
    return Counts(FORWARDS["read"], *passes, found["products"], found["J"])


class Row(NamedTuple):
    """A call, the options of the linearisation, and what the call costs."""

    call: Callable[[co.operators.Linearization], object]
    expected: Counts
    options: dict[str, Any] | None = None


def ones(A: Any, columns: int = 1) -> Tensor:
    return torch.ones(A.shape[-1], columns, dtype=A.dtype)


def times(A: Any, columns: int = 1, repeats: int = 1) -> None:
    for _ in range(repeats):
        _ = A @ ones(A, columns)


def damped(lin: co.operators.Linearization) -> Any:
    return co.GGN(lin).add_diagonal(1.0)


def posterior(lin: co.operators.Linearization) -> Any:
    return co.laplace(lin, co.GGN, 1.0, check_mode=False)


def answers_at(lin: co.operators.Linearization, curvature: Any, count: int, draws: int | None = None) -> None:
    """Ask the first `count` of five questions at four points."""
    post = co.laplace(lin, curvature(lin), 1.0, check_mode=False)
    at = post.at(X, None if draws is None else post.mean + torch.ones(draws, 1))
    questions = (
        lambda: at.predict().covariance_matrix,
        lambda: at.probabilities(),
        lambda: at.uncertainty(seeded()),
        lambda: at.log_likelihood(torch.tensor([0, 1, 2, 0]), generator=seeded()),
        lambda: at.probabilities("mc", seeded()),
    )
    for ask in questions[:count]:
        ask()


def everything_of(post: Any) -> object:
    return post.log_evidence(), post.sample(5), post.predict(X).covariance_matrix


STREAMED, LAYERWISE, AUTODIFF = ({"engine": name} for name in ("streamed", "layerwise", "autodiff"))
X = torch.ones(4, 6, dtype=torch.float64)
INTO_ONE_BATCH = BATCH / N
SLOPES = 1
"""The backward passes behind products by layer rules: this network's only hidden layer keeps slopes, whatever C."""
SUMMED = Counts(1, 1, C - 1)
"""A pass forward and one backward for each column of a softmax's curvature, whose rank is C − 1."""
TABLE = {
    "log_likelihood": Row(lambda lin: lin.log_likelihood(), Counts(1, 1)),
    "outputs": Row(lambda lin: lin.outputs(), Counts(1, 1)),
    "gradient": Row(lambda lin: lin.gradient(), Counts(1, 1, 1)),
    "predict": Row(lambda lin: lin.predict(X), Counts(0, len(X) / N)),
    "J product, streamed": Row(lambda lin: times(lin.jacobian()), Counts(1, 1, 0, 0, 1), STREAMED),
    "J transposed product, streamed": Row(lambda lin: times(lin.jacobian().mT), Counts(1, 1, 1, 0, 1), STREAMED),
    # A push and a pull of one vector share a pass; of several, each push has its own, and the pulls share one.
    "GGN product, streamed": Row(lambda lin: times(co.GGN(lin)), Counts(1, 2, 1, 1), STREAMED),
    "GGN products of 5 vectors, streamed": Row(lambda lin: times(co.GGN(lin), 5), Counts(1, 6, 5, 5), STREAMED),
    "GGN product, layerwise": Row(lambda lin: times(co.GGN(lin)), Counts(1, 1, SLOPES, 1), LAYERWISE),
    # The first streams; the second records a pass and another of tangents, checked on one batch; each pulls once.
    "four GGN products, autodiff": Row(
        lambda lin: times(co.GGN(lin), 1, 4), Counts(2, 4, (4, 4 + INTO_ONE_BATCH), 4), AUTODIFF
    ),
    "four GGN products, auto": Row(lambda lin: times(co.GGN(lin), 1, 4), Counts(2, 2 + 1, 1 + SLOPES, 4)),
    "20 products of a last layer": Row(
        lambda lin: times(co.GGN(lin), 1, 20), Counts(1, 1, 0, 20), {"parameters": "last_layer"}
    ),
    "products of an empirical Fisher": Row(
        lambda lin: times(co.EmpiricalFisher(lin), 1, 4), Counts(1, 1, 1, 4), LAYERWISE
    ),
    "Monte-Carlo GGN": Row(lambda lin: co.GGN(lin, mc_samples=2, generator=seeded()), Counts(1, 1)),
    # With layer rules forced, the outputs from which targets are drawn come with the rules' slopes.
    "four products of a Monte-Carlo GGN": Row(
        lambda lin: times(co.GGN(lin, mc_samples=2, generator=seeded()), 1, 4), Counts(2, 2, SLOPES + 2, 4), LAYERWISE
    ),
    "five draws of N(0, G)": Row(lambda lin: co.linalg.draw(co.GGN(lin), 5, seeded()), Counts(1, 1, SLOPES)),
    "diagonal of the GGN": Row(lambda lin: co.DiagonalGGN(lin), SUMMED),
    "diagonal of one drawn target": Row(
        lambda lin: co.DiagonalGGN(lin, fisher="mc", generator=seeded()), Counts(2, 2, 1)
    ),
    "diagonal of the empirical Fisher": Row(lambda lin: co.DiagonalGGN(lin, fisher="empirical"), Counts(1, 1, 1)),
    "KFAC": Row(lambda lin: co.KFAC(lin), SUMMED),
    "KFAC, evidence, draws, predictions of its posterior": Row(
        lambda lin: everything_of(co.laplace(lin, co.KFAC(lin), 1.0, check_mode=False)),
        Counts(1, 1 + 2 * len(X) / N, C - 1 + C * len(X) / N),
    ),
    "the check that weights are a mode": Row(lambda lin: co.laplace(lin, co.KFAC(lin), 1.0), Counts(2, 2, C)),
    "EKFAC": Row(lambda lin: co.EKFAC(lin), Counts(2, 2, 2 * (C - 1))),
    "block of ten weights": Row(lambda lin: co.Subnetwork(co.GGN(lin), torch.arange(10)), SUMMED),
    "block of each layer": Row(lambda lin: co.BlockDiagonal(lin), SUMMED),
    "J, formed": Row(lambda lin: lin.jacobian().to_dense(), Counts(1, 1, C)),
    "tangent kernel, formed": Row(lambda lin: co.TangentKernel(lin).to_dense(), Counts((1, 2), 1, C)),
    # Blocks of vectors: the cost rule takes layer rules at once, and every product is one of those asked for.
    "nystrom of rank 20": Row(
        lambda lin: co.linalg.nystrom(co.GGN(lin), rank=20, generator=seeded()), Counts(1, 1, SLOPES, 20)
    ),
    "low_rank of rank 20, and 16 that measure its error": Row(
        lambda lin: co.low_rank(co.GGN(lin), rank=20, generator=seeded()), Counts(1, 1, SLOPES, 20 + 16)
    ),
    "trace of 30 products": Row(
        lambda lin: co.linalg.trace(co.GGN(lin), method="xtrace", max_matvecs=30, generator=seeded()),
        Counts(1, 1, SLOPES, 30),
    ),
    "logdet of at most 100 products": Row(
        lambda lin: co.linalg.logdet(damped(lin), max_matvecs=100, generator=seeded()), Counts(1, 1, SLOPES, (20, 100))
    ),
    "cg": Row(lambda lin: co.linalg.cg(damped(lin), ones(damped(lin))), Counts(1, 1, SLOPES, (5, 40))),
    "three eigenpairs": Row(
        lambda lin: co.linalg.eigsh(co.GGN(lin), 3, generator=seeded()),
        Counts((1, 2), (1, 4), (SLOPES, 2 + SLOPES), (9, 60)),
    ),
    "posterior of the GGN": Row(posterior, Counts()),
    "its evidence, from the formed matrix": Row(lambda lin: posterior(lin).log_evidence(), Counts(2, 2, C - 1)),
    "its predictions at four points": Row(
        lambda lin: posterior(lin).predict(X).covariance_matrix,
        Counts((1, 3), (1, 3 + 3 * len(X) / N), (SLOPES, 3 * C), (0, 12 * 12)),
    ),
    "Hessian product, after a check at two points": Row(
        lambda lin: times(co.Hessian(lin)), Counts(2, 1 + 2 / N, (0, float("inf")))
    ),
}


@pytest.mark.parametrize("draws", [None, 3])
@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC, co.DiagonalGGN])
def test_further_answers_at_the_same_inputs_cost_no_products_and_no_passes(curvature: Any, draws: int | None) -> None:
    first, all_five = (counted(lambda lin, n=n: answers_at(lin, curvature, n, draws)) for n in (1, 5))
    assert first == all_five
    assert first.of_J + first.backward > 0


def test_variances_need_no_products_with_J_if_a_weight_has_no_layer_rule() -> None:
    """A product for each output of each point, and as many back, took ten times as long in a U-Net with PReLUs."""

    def variances(lin: co.operators.Linearization) -> None:
        curvature = co.linalg.Diagonal(torch.ones_like(lin.theta))
        _ = co.laplace(lin, curvature, 1.0, check_mode=False).predict(X).variance

    cost = counted(variances, {"network": Scaled})
    of_rules_of_the_rest_and_to_check_it = C + C + 1
    assert cost.of_J == 0
    assert cost.backward * N == of_rules_of_the_rest_and_to_check_it * len(X)


@pytest.mark.parametrize("name", TABLE)
def test_a_call_costs_what_is_counted(name: str) -> None:
    row = TABLE[name]
    for what, found, expected in zip(Counts._fields, counted(row.call, row.options), row.expected, strict=True):
        low, high = expected if isinstance(expected, tuple) else (expected, expected)
        assert low - 1e-9 <= found <= high + 1e-9, f"{name}: {what} {found:g}, expected {expected}"
