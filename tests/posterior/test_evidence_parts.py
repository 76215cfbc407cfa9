"""The parts of the log evidence against dense references, and that it ranks models as exact evidence does."""

import dataclasses

import pytest
import torch

import curvops as co
from tests.posterior.trained import Counted, problem

DOUBLE = torch.float64
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(scope="module")
def network():
    return problem()


def whole(network, parameters=None):
    model, x, y = network
    return co.linearize(model, (x, y), "classification", parameters)


def last_layer(network):
    return whole(network, "last_layer")


def subnetwork(network):
    return whole(network, torch.arange(0, 51, 3))


def subsample(network):
    return co.subsample(whole(network), 10, generator=torch.Generator().manual_seed(0))


def layers(lin):
    return {name: 1.0 + i for i, name in enumerate(lin.model.selection.names)}


PRIORS = {
    "scalar": lambda lin: 0.7,
    "layerwise": layers,
    "weight-wise": lambda lin: torch.linspace(0.5, 3, lin.num_parameters, dtype=DOUBLE),
    "operator": lambda lin: co.linalg.Dense(co.GGN(lin).to_dense() / 3, psd=True).add_diagonal(0.4),
}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("select", [whole, last_layer, subnetwork, subsample])
def test_the_parts_are_those_of_dense_matrices_and_add_up(network, select, prior):
    lin = select(network)
    post = co.laplace(lin, co.GGN, prior_precision=PRIORS[prior](lin), prior_mean=0.1, check_mode=False)
    found, G, P = post.log_evidence(), co.GGN(lin).to_dense(), post.precision.to_dense()
    A, gap = P - G, lin.theta - 0.1
    torch.testing.assert_close(found.log_likelihood, lin.log_likelihood(), **TIGHT)
    torch.testing.assert_close(found.scatter, gap @ A @ gap, **TIGHT)
    torch.testing.assert_close(found.log_determinant_ratio.value, P.logdet() - A.logdet(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.effective_parameters.value, torch.linalg.solve(P, G).trace(), rtol=1e-9, atol=1e-9)
    total = found.log_likelihood - 0.5 * (found.scatter + found.log_determinant_ratio.value)
    torch.testing.assert_close(found.value, total, rtol=1e-14, atol=0)
    assert found.effective_parameters is found.effective_parameters  # counted once
    assert found.mode == "map" and "scatter=" in repr(found) and repr(found).startswith("Evidence(")
    assert found.power == 1 and "power" not in repr(found)
    pull = lin.gradient() + A @ gap
    assert post.mode_gap == pytest.approx(float(pull.norm() / (A @ gap).norm()), rel=1e-8)


def test_a_sum_or_a_multiple_is_a_plain_estimate_without_parts(network):
    found = co.laplace(whole(network), co.GGN, 1.0, check_mode=False).log_evidence()
    for other in (found + 1.0, 1.0 + found, found * 2.0, 2.0 * found):
        assert type(other) is co.linalg.Estimate
    assert (found + 1.0).value == found.value + 1 and (2.0 * found).value == 2 * found.value
    assert dataclasses.is_dataclass(found) and float(found) == found.value


def test_all_vector_priors_share_the_products_of_one_curvature(network):
    lin = whole(network)
    curvature = Counted(co.GGN(lin).to_dense())
    post = co.laplace(lin, curvature, 1.0, check_mode=False)
    post.log_evidence()
    curvature.products = 0
    wide = torch.logspace(-5, 8, 51, dtype=DOUBLE)  # of scales that differ by more than float32 has digits
    found = post.with_prior(wide)
    assert 0 < found.effective_parameters().value < 51 and found.log_evidence().stderr == 0
    assert curvature.products == 0
