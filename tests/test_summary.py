"""What objects print: one line that says what a thing is, without addresses, products or all of its numbers."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops import linalg
from curvops.linalg.core import solve_routes
from curvops.ranks.process_group import Ranks
from curvops.ranks.sharded_vectors import RowLayout
from curvops.summary import MOST_ROWS, Table, by_columns_of, summary
from tests.operators.test_conformance import RECTANGULAR, SQUARE, ggn, linearized, low_rank

ADDRESS = re.compile(r"0x[0-9a-f]{4}|object at|<function|<class")


def rows_of_a_rank() -> Any:
    """The second of two ranks' rows of a matrix, without the other rank: nothing is sent to print them."""
    ranks = object.__new__(Ranks)
    ranks.rank = 1
    return linalg.BlockRows(torch.ones(3, 5), layout=RowLayout(ranks, (2, 3)))


OPERATORS: dict[str, Callable[[], Any]] = {
    **RECTANGULAR,
    **{f"{name}, square": build for name, build in SQUARE.items()},
    "mc_fisher": lambda: co.GGN(linearized(), mc_samples=2, generator=torch.Generator().manual_seed(0)),
    "block rows": rows_of_a_rank,
    "negative": lambda: -ggn(),
    "many terms": lambda: functools.reduce(lambda a, b: a + b, [linalg.Dense(torch.eye(14))] * 6, ggn()),
    "foreign": lambda: ggn() + ggn().root_decomposition(),
    "direct sum": lambda: linalg.DirectSum(
        *[linalg.Diagonal(torch.ones(1))] * 9, positions=[range(i, i + 1) for i in range(9)]
    ),
    "joint covariance": lambda: posterior().predict(torch.ones(2, 3), joint=True).lazy_covariance_matrix,
    "point covariance": lambda: posterior().predict(torch.ones(2, 3)).lazy_covariance_matrix,
}
"""By name, how each kind of operator is made."""


@functools.cache
def made(name: str) -> Any:
    return OPERATORS[name]()


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_says_its_size_its_parts_its_dtype_and_its_device(name: str) -> None:
    op = made(name)
    size = " × ".join(map(str, op.shape))
    shown = repr(op)
    assert re.fullmatch(rf"{type(op).__name__}\({size}, (.*, )?float32, cpu\)", shown), shown
    assert not ADDRESS.search(shown) and "\n" not in shown and len(shown) < 400
    assert str(op) == f"{op}" == shown


def test_the_table_has_every_public_operator() -> None:
    public = {
        thing
        for face in (co, co.operators, linalg)
        for name in face.__all__
        if is_operator(thing := getattr(face, name))
    }
    shown = {kind for name in OPERATORS for kind in type(made(name)).__mro__}
    assert public - shown == set()


def is_operator(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, linalg.Operator)


EXPECTED = {
    "ggn": "GGN(14 × 14, of Categorical on 6 points, float32, cpu)",
    "mc_fisher": "GGN(14 × 14, of Categorical on 6 points, 2 draws per point, float32, cpu)",
    "ekfac": "EKFAC(14 × 14, 2 blocks, on 6 points, fisher='mc', float32, cpu)",
    "scaled": "Scaled(14 × 14, 2 · GGN(of Categorical on 6 points), float32, cpu)",
    "kronecker, square": "Kronecker(12 × 12, 2 groups of 2 × 2 ⊗ 3 × 3, float32, cpu)",
    "tangent_kernel": "TangentKernel(12 × 12, Jacobian(of 6 points), prior 1, float32, cpu)",
    "damped_low_rank_vector, square": "Damped(7 × 7, LowRank(of rank 3) + diag(d), float32, cpu)",
    "many terms": "Sum(14 × 14, GGN(of Categorical on 6 points) + Dense + Dense + Dense + … (7 in all), float32, cpu)",
    "block rows": "BlockRows(5 × 5, shared by 2 ranks, float32, cpu)",
    "foreign": "Sum(14 × 14, GGN(of Categorical on 6 points) + CholLinearOperator, float32, cpu)",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_formula_shows_the_parts(name: str) -> None:
    assert repr(made(name)) == EXPECTED[name]


def test_operators_that_are_linearised_again_print_as_before() -> None:
    converted = co.EmpiricalFisher(linearized(), per_token=True).to(torch.float64)
    assert repr(converted) == "EmpiricalFisher(14 × 14, of Categorical on 6 points, per_token, float64, cpu)"


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.huber_loss(outputs, targets, reduction="none").sum(-1)


class Squares:
    """A loss without a name of its own."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum(-1)


def test_a_likelihood_names_its_function_without_an_address() -> None:
    assert repr(co.likelihoods.FromLoss(huber)) == "FromLoss(huber)"
    assert repr(co.likelihoods.FromLoss(Squares())) == "FromLoss(Squares)"
    assert repr(co.likelihoods.FromDistribution(functools.partial(huber))) == "FromDistribution(huber)"
    assert repr(co.likelihoods.Gaussian(0.1)) == "Gaussian(noise=0.1)"
    assert "[1, 1, 1, 1, 1, … 20 in all]" in repr(co.likelihoods.Gaussian(torch.ones(20)))
    model = nn.Linear(3, 2)
    lin = co.linearize(model, (torch.randn(5, 3), torch.randn(5, 2)), huber)
    assert repr(co.GGN(lin)) == "GGN(8 × 8, of FromLoss(huber) on 5 points, float32, cpu)"


def test_tensors_without_numbers_print_their_size() -> None:
    seen = []

    def inside(shift: Tensor) -> Tensor:
        seen.append(repr(linalg.Dense(torch.eye(3), psd=True).add_diagonal(shift)))
        return shift

    torch.func.vmap(inside)(torch.ones(2))
    assert seen == ["Damped(3 × 3, Dense + float32 () · I, float32, cpu)"]
    assert summary(torch.empty(3, device="meta")) == "float32 (3,)"


def things() -> Iterator[tuple[str, Any, str]]:
    """Yield what else is public and printed: its name, the object, and words of it."""
    lin = linearized()
    post = co.laplace(lin, co.KFAC(lin), prior_precision=2.0, check_mode=False)
    log_posterior = co.sampling.log_posterior(nn.Linear(3, 2), "classification", data_size=6)
    yield "lin", lin, "Linearization(14 weights, 6 points, 2 outputs, Categorical, float32, cpu)"
    yield "posterior", post, "Laplace(14 weights, KFAC(2 blocks, on 6 points), prior precision 2, float32, cpu)"
    vector = co.laplace(lin, co.GGN, prior_precision=torch.ones(14), temperature=0.5, check_mode=False)
    yield "vector", vector, "prior precision float32 (14,), temperature 0.5"
    yield "operator prior", post.with_prior(linalg.Dense(torch.eye(14), psd=True)), "prior precision Dense"
    gaussian = co.posterior.GaussianPosterior.of(lin, linalg.Diagonal(torch.ones(14)))
    yield "Gaussian", gaussian, "GaussianPosterior(14 weights, covariance Diagonal, float32, cpu)"
    draws = {
        name: value.unsqueeze(0).unsqueeze(0).repeat(2, 3, *[1] * value.ndim)
        for name, value in lin.unflatten(lin.theta).items()
    }
    yield "draws", co.sampling.empirical(lin, draws), "6 draws of 2 chains"
    yield "log posterior", log_posterior, "LogPosterior(8 weights, 6 points, prior 1)"
    sgld = co.sampling.sgld(log_posterior, 0.1)
    yield "sgld", sgld, "LogPosterior(8 weights, 6 points, prior 1), step_size=Constant(value=0.1)"
    yield "chains", co.sampling.chains(sgld, 4), "chains=4"
    yield "ekf", co.sampling.ekf(log_posterior), "ExtendedKalmanFilter("
    yield "vi", co.sampling.vi(log_posterior), "Variational("
    yield "closed form", linalg.as_preconditioner(low_rank().add_diagonal(1.0)), "operator=Damped(7 × 7"
    yield "evidence", post.log_evidence(), "Evidence("
    yield "mean", co.gp.LinearizedMean(lin), "LinearizedMean(Linearization(14 weights"
    yield "model", co.gp.LaplaceModel(post), "LaplaceModel(Laplace(14 weights, KFAC"
    matrix = co.gp.LinearizedKernel(lin)(torch.ones(3, 3))
    yield "kernel matrix", matrix, "LazyOperatorKernel(6 × 6, of LinearizedKernel, float32, cpu)"
    yield "deviations", post.deviations(3), "Deviations("


def test_everything_else_says_what_it_is_on_one_line() -> None:
    for name, thing, words in things():
        shown = repr(thing)
        assert words in shown, (name, shown)
        assert not ADDRESS.search(shown) and "\n" not in shown and len(shown) < 600, (name, shown)


@functools.cache
def posterior() -> Any:
    return co.laplace(linearized(), co.GGN, prior_precision=2.0, check_mode=False)


TABLES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "lin.plan": (lambda: linearized().plan, ("gradients per product", "layerwise:")),
    "post.plan": (lambda: posterior().plan(8), ("draws", "predictions", "determinants", "taken")),
    "P.plan": (lambda: posterior().precision.plan(8), ("solve", "taken")),
    "solution": (lambda: posterior().precision.cg(torch.ones(14, 2)), ("relative residual", "CONVERGED")),
    "eigenpairs": (lambda: ggn().eigsh(2), ("residual", "value")),
    "evidence": (lambda: posterior().log_evidence(), ("log determinant ratio", "nats", "mode=")),
    "grid": (lambda: co.evidence.grid(posterior(), [0.1, 1.0]), ("log evidence", "0.1", "CONVERGED")),
    "tuning": (
        lambda: co.evidence.maximize(posterior(), "layers").tuning,
        ("prior precision", "effective parameters"),
    ),
}
"""By name, what a notebook shows as a table, and words of it."""


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_shown_in_notebooks(name: str) -> None:
    make, words = TABLES[name]
    thing = make()
    html = thing._repr_html_()
    assert all(word in html for word in words), html
    assert html.count("<table>") == html.count("</table>") >= 1 and not ADDRESS.search(html)
    assert len(set(re.findall(r"<tr>(.*?)</tr>", html))) > 1
    assert not ADDRESS.search(repr(thing))


def test_results_print_values_not_shapes() -> None:
    A = torch.diag(torch.arange(30.0, 0.0, -1.0).double())
    pairs = linalg.eigsh(A, 12, generator=torch.Generator().manual_seed(0))
    assert "values=[30, 29, 28, 27, 26, … 12 in all]" in repr(pairs) and "residuals=[" in repr(pairs)
    assert repr(linalg.cg(torch.eye(9).double(), torch.arange(9.0).double())).startswith("Solution(x=[0, 1, 2, 3, 4, …")
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
    table = repr(co.metrics.reliability_bins(p, torch.tensor([0, 1, 0]), bins=4))
    assert table.splitlines()[1].split() == ["0.5", "to", "0.75", "1", "0.7", "0"] and len(table.splitlines()) == 3
    post = posterior()
    printed = repr(post.predict(torch.ones(6, 3)))
    assert re.fullmatch(r"Normal\((-?[\d.]+ ± [\d.]+, -?[\d.]+ ± [\d.]+; ){5}… 6 points\)", printed)
    assert "Tuning" not in repr(co.evidence.maximize(post, steps=30).tuning)


def test_an_exact_number_has_no_error_bar() -> None:
    for found in (linalg.trace(torch.eye(4)), linalg.diagonal(torch.eye(4)), posterior().log_evidence()):
        assert found.samples == 0 and "±" not in repr(found) and "stderr" not in repr(found), found
    assert (
        "±" not in repr(co.evidence.grid(posterior(), [0.1, 1.0])) and "±" not in posterior().log_evidence().as_text()
    )
    assert re.search(r"Estimate\(1 ± 0.1, 95 % in", repr(linalg.Estimate(torch.tensor(1.0), torch.tensor(0.1), 5, 5)))


def test_plans_and_grids_print_their_tables_as_text() -> None:
    for thing in (linearized().plan, posterior().plan(8), co.evidence.grid(posterior(), [0.1, 1.0])):
        assert repr(thing) == str(thing) and "\n" in repr(thing)
    grid = co.evidence.grid(posterior(), [0.1, 1.0])
    assert isinstance(grid, list) and len(grid) == 2 and grid.prior_precisions == (0.1, 1.0)


def test_text_and_html_are_one_table_and_html_is_escaped() -> None:
    table = Table(("a <b>", ""), [("x & y", "<script>"), ("long cell", "")], ['say "no"'])
    assert str(table) == 'a <b>\nx & y      <script>\nlong cell\nsay "no"'
    html = table.html()
    assert "<script>" not in html and "&lt;script&gt;" in html and "x &amp; y" in html and "a &lt;b&gt;" in html
    plan = solve_routes.SolvePlan({"<q>": (solve_routes.Route("r & s", 1, 1, "no <way>"),)})
    assert "no &lt;way&gt;" in plan._repr_html_() and "<way>" not in plan._repr_html_() and "no <way>" in str(plan)


def test_long_tables_and_long_values_are_cut() -> None:
    cut = by_columns_of({"n": [str(i) for i in range(MOST_ROWS + 5)]})
    assert len(cut.rows) == MOST_ROWS and cut.remarks == [f"… {MOST_ROWS + 5} in all."]
    assert summary(tuple(range(30))) == "(0, 1, 2, 3, 4, 5, 6, 7, … 30 in all)"
    assert summary({"a": 0.123456789, "b": [torch.ones(9)]}) == "{'a': 0.123457, 'b': [[1, 1, 1, 1, 1, … 9 in all]]}"
    assert summary(nn.Sequential(nn.Linear(2, 2))) == "Sequential" and summary(torch.Generator()) == "Generator"
    assert (
        summary(functools.partial(huber, targets=1)) == "huber" and summary(torch.nn.functional.mse_loss) == "mse_loss"
    )
