"""The table of routes, by numbers alone: what is taken, what else is open, and why the rest is not."""

import math
from dataclasses import replace

import pytest

from curvops.linalg.core import solve_routes as routes

LARGE = routes.System(rows=100_000, columns=8)
NETWORK = routes.PosteriorFacts(name="GGN", root_columns=40_000, outputs=40_000, gram_cost=50.0, budget=2**40)
FEW = replace(NETWORK, root_columns=1000, outputs=1000)
HALF = replace(NETWORK, outputs=2 * 8192 - 1)


def posterior(facts=NETWORK, **system):
    return replace(LARGE, posterior=facts, **system)


TAKEN = {
    "rectangular": (routes.System(rows=10, square=False, symmetric=False, definite=False), "lsmr"),
    "closed form": (replace(LARGE, closed_form=True), "closed form"),
    "its gradient": (routes.System(rows=10, closed_form=True, recorded=True), "dense"),
    "a large one's gradient": (replace(LARGE, closed_form=True, recorded=True), "closed form"),
    "256 rows": (routes.System(rows=256), "dense"),
    "257 rows": (routes.System(rows=257), "cg with a sketch"),
    "at hand": (routes.System(rows=2048, at_hand=True, definite=False), "dense"),
    "at hand and large": (routes.System(rows=2049, at_hand=True, definite=False), "minres"),
    "definite": (LARGE, "cg with a sketch"),
    "definite without a shift": (replace(LARGE, sketch=False), "cg"),
    "symmetric": (replace(LARGE, definite=False), "minres"),
    "nothing known": (replace(LARGE, definite=False, symmetric=False), "lsmr"),
    "network": (posterior(), "cg with a sketch"),
    "KFAC": (posterior(routes.PosteriorFacts(), closed_form=True), "closed form"),
    "small network": (posterior(rows=256), "dense"),
    "columns enough to form it": (posterior(rows=2048, columns=256), "formed matrix"),
    "a column fewer": (posterior(rows=2048, columns=255), "cg with a sketch"),
    "a row more": (posterior(rows=2049, columns=2048), "cg with a sketch"),
    "rows enough to form it": (posterior(rows=8192, columns=128, rows_of_J=True), "formed matrix"),
    "a row of J fewer": (posterior(rows=8192, columns=127, rows_of_J=True), "cg with a sketch"),
    "with fewer than twice as many outputs": (
        posterior(rows=8192, columns=1023, rows_of_J=True, facts=HALF),
        "cg with a sketch",
    ),
    "more of these": (posterior(rows=8192, columns=1024, rows_of_J=True, facts=HALF), "formed matrix"),
    "a single one, formed before": (
        posterior(replace(NETWORK, formed=True), rows=4096, columns=1, rows_of_J=True),
        "formed matrix",
    ),
    "a single one of fewer weights": (posterior(rows=1024, columns=1, rows_of_J=True), "formed matrix"),
    "more rows than that": (posterior(rows=8193, columns=8193, rows_of_J=True), "cg with a sketch"),
    "covariances of a small network": (posterior(rows=256, columns=1, rows_of_J=True), "formed matrix"),
    "their gradient in the prior": (posterior(rows=256, columns=32, rows_of_J=True, recorded=True), "dense"),
    "covariances with few outputs": (posterior(FEW, rows_of_J=True), "formed kernel"),
    "a single one of these": (posterior(replace(FEW, gram_cost=200.0), columns=1, rows_of_J=True), "formed kernel"),
    "their gradient in the points": (
        posterior(FEW, rows=4096, columns=512, rows_of_J=True, moved=True),
        "formed matrix",
    ),
    "covariances within rounding": (posterior(replace(FEW, resolved=False), rows_of_J=True), "cg with a sketch"),
    "draws of a small network": (posterior(rows=256, columns=256), "dense"),
    "no room to form it": (posterior(rows=2048, columns=256, room=2**20), "cg with a sketch"),
    "formed before": (posterior(replace(NETWORK, formed=True), rows=2048, columns=256, room=2**20), "formed matrix"),
    "not semidefinite": (posterior(replace(NETWORK, psd=False), rows=2048, columns=256), "cg with a sketch"),
    "its gradient in the prior": (posterior(FEW, rows=2048, columns=256, recorded=True), "cg with a sketch"),
    "few outputs": (posterior(FEW), "formed kernel"),
    "a costly kernel": (posterior(replace(FEW, gram_cost=129.0)), "cg with a sketch"),
    "a vector of precisions": (posterior(replace(FEW, scalar=False)), "cg with a sketch"),
    "within rounding": (posterior(replace(FEW, resolved=False)), "cg with a sketch"),
    "no room for the kernel": (posterior(replace(FEW, budget=79_999_999)), "cg with a sketch"),
    "little memory": (posterior(replace(FEW, gram_cost=math.inf), room=102_399_999), "dual"),
    "one column in little memory": (posterior(replace(FEW, gram_cost=math.inf), room=0, columns=1), "cg with a sketch"),
    "a costly kernel in little memory": (posterior(replace(FEW, gram_cost=200.0), room=0), "formed kernel"),
    "asked for the dual": (posterior(requested="dual"), "dual"),
    "asked for the dual of few outputs": (posterior(replace(FEW, gram_cost=200.0), requested="dual"), "formed kernel"),
    "asked for cg": (posterior(FEW, requested="cg"), "cg with a sketch"),
    "asked for cg on a closed form": (posterior(closed_form=True, requested="cg"), "closed form"),
    "asked for descent": (posterior(FEW, requested="sgd"), "sgd"),
    "asked for a closed form": (posterior(rows=2048, columns=256, requested="closed form"), "formed matrix"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_route_taken(name):
    system, expected = TAKEN[name]
    first = routes.chosen(routes.routes(system))
    assert first is not None and first.name == expected


REFUSED = {
    "closed form": (posterior(), "no closed form is known"),
    "dual": (posterior(routes.PosteriorFacts(name="KFAC")), "square root by points, which KFAC does not have"),
    "sgd": (posterior(recorded=True), "no gradient"),
}


@pytest.mark.parametrize("asked", REFUSED)
def test_a_method_that_is_not_open_says_why(asked):
    system, why = REFUSED[asked]
    found = routes.routes(replace(system, requested=asked))
    assert routes.chosen(found) is None
    assert why in next(route.why_not for route in found if route.name == asked)
    operator = posterior(replace(NETWORK, diagonal=False, scalar=False), requested="dual")
    assert "number or a vector" in routes.routes(operator)[-1].why_not


def test_products_and_bytes():
    """8 products a column at least; a block solve of 16 vectors a column, 4 matrices of a formed one, 5 of a kernel."""
    found = {route.name: route for route in routes.routes(posterior(FEW))}
    assert (found["cg"].products, found["cg"].nbytes) == (64, 16 * 8 * 100_000 * 8)
    assert (found["dual"].products, found["dual"].nbytes) == (64, 16 * 8 * 1000 * 8)
    assert (found["formed matrix"].products, found["formed matrix"].nbytes) == (100_000, 4 * 8 * 100_000**2)
    assert (found["formed kernel"].products, found["formed kernel"].nbytes) == (50.0, 5 * 8 * 1000**2)
    assert routes.routes(posterior(longest=300_000))[4].nbytes == 3 * found["cg"].nbytes
    assert routes.routes(posterior(replace(NETWORK, formed=True)))[1].products == 0
    assert routes.routes(routes.System(rows=10, at_hand=True))[1].products == 0


DETERMINANTS = {
    "closed form": (posterior(closed_form=True), "closed form"),
    "1024 rows": (posterior(rows=1024), "spectrum"),
    "1025 rows": (posterior(rows=1025), "probes"),
    "no room for all eigenvalues": (posterior(replace(NETWORK, budget=2**24 - 1), rows=1024), "probes"),
    "all eigenvalues known": (posterior(replace(NETWORK, decomposed=True), rows=4000), "spectrum"),
    "known, for another diagonal": (
        posterior(replace(NETWORK, decomposed=True, scalar=False), rows=4000),
        "probes",
    ),
    "few outputs": (posterior(replace(FEW, gram_cost=200.0)), "formed kernel"),
    "a costly kernel": (posterior(replace(FEW, gram_cost=201.0)), "probes"),
    "within rounding": (posterior(replace(FEW, resolved=False)), "formed kernel"),
    "prepared": (posterior(replace(NETWORK, prepared=True)), "quadrature"),
    "a gradient": (posterior(replace(FEW, prepared=True), recorded=True), "probes"),
}


@pytest.mark.parametrize("name", DETERMINANTS)
def test_determinants(name):
    system, expected = DETERMINANTS[name]
    first = routes.chosen(routes.determinants(system))
    assert first is not None and first.name == expected


def test_probes_that_fail_give_way_to_all_eigenvalues():
    """Where half as many products as rows have not reached the tolerance, as many as rows are exact."""
    assert [routes.products_of_probes(rows) for rows in (6, 4000, 4001)] == [4, 2000, 4000]
    assert routes.decomposes(posterior(rows=4000)) and not routes.decomposes(posterior(rows=4001))
    assert not routes.decomposes(posterior(replace(NETWORK, scalar=False), rows=4000))
    assert not routes.decomposes(posterior(replace(NETWORK, budget=16 * 4000**2 - 1), rows=4000))


def test_a_plan_prints_what_is_taken_what_is_open_and_why_not():
    shown = str(routes.SolvePlan({"draws": routes.routes(posterior(FEW)), "determinants": ()}))
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert lines["formed kernel"].endswith("taken") and lines["sgd"].endswith("possible")
    assert lines["closed form"].endswith("no closed form is known") and "64" in lines["dual"]
    assert shown.startswith("draws ") and "\n\ndeterminants  products" in shown
    unknown = routes.SolvePlan({"draws": routes.routes(posterior(routes.PosteriorFacts()))})
    assert "unknown" in str(unknown) and unknown.chosen == {"draws": "cg with a sketch"}


@pytest.mark.parametrize(
    ("condition", "rtol", "pays"),
    [(8.0, 1e-3, False), (40.0, 1e-3, False), (44.0, 1e-3, True), (8.0, 1e-12, True), (math.inf, 1e-3, True)],
)
def test_directions_are_kept_where_they_pay(condition, rtol, pays):
    """From 25 iterations on; nothing known of the condition counts as many."""
    assert routes.directions_pay(condition, rtol) is pays
