"""Every kind of prior, and tempered posteriors, against the dense definition.

Tests `maximize.py`, `parameters.py`.
"""

import pytest
import torch

import curvops as co
from tests.posterior.trained import problem
from tests.randomness import seeded

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def test_kfac_has_a_closed_form_under_one_precision_a_layer_and_separate_ones_for_biases(lin):
    """The values: `test_combinations.py`."""
    by_tensor = {"0.*": 0.7, "2.weight": 2.0, "2.bias": torch.tensor(5.0)}
    for curvature, prior in (
        (co.KFAC(lin), {"0.*": 0.7, "2.*": 2.0}),
        (co.KFAC(lin, bias="separate"), by_tensor),
    ):
        found = co.laplace(lin, curvature, prior, check_mode=False).log_evidence()
        assert found.matvecs == 0 and found.stderr == 0


def test_a_mean_by_name_is_the_vector(lin):
    start = {name: normal(*shape, seed=3) for name, shape in zip(*layout(lin))}
    post = co.laplace(lin, co.GGN, 1.0, prior_mean=start, check_mode=False)
    torch.testing.assert_close(post.prior_mean, lin.flatten(start), rtol=0, atol=0)
    some = co.laplace(lin, co.GGN, 1.0, prior_mean={"0.*": 1.0, "2.*": 0.0}, check_mode=False)
    assert float(some.prior_mean.sum()) == 30


def layout(lin):
    parts = lin.unflatten_weights(lin.theta)
    return list(parts), [part.shape for part in parts.values()]


def test_another_prior_keeps_the_mean_unless_told(lin):
    mean = normal(lin.num_parameters)
    post = co.laplace(lin, co.GGN, 1.0, prior_mean=mean, temperature=2.0, check_mode=False)
    moved = post.with_prior({"0.*": 2.0, "2.*": 3.0})
    assert moved.prior_mean is post.prior_mean and moved.temperature == 2.0
    assert float(post.with_prior(2.0, 0.0).prior_mean) == 0.0
    grid = co.evidence.grid(post, [0.5, 2.0])
    torch.testing.assert_close(grid[1].value, post.with_prior(2.0).log_evidence().value, **TIGHT)


def test_gradients_in_the_prior_mean_and_the_precisions_of_layers(lin):
    values = torch.tensor([0.7, 2.0], dtype=torch.float64, requires_grad=True)
    mean, curvature = normal(lin.num_parameters).requires_grad_(), co.KFAC(lin)

    def evidence(values, mean):
        prior = {"0.*": values[0], "2.*": values[1]}
        return co.laplace(lin, curvature, prior, mean, check_mode=False).log_evidence().value

    assert torch.autograd.gradcheck(evidence, (values, mean))


def test_an_operator_at_other_weights_is_refused_until_it_is_detached(lin):
    other = co.GGN(co.linearize(*_other(), "classification")).add_diagonal(1.0)
    with pytest.raises(ValueError, match="detached_from_weights"):
        co.laplace(lin, co.GGN, prior_precision=other, check_mode=False)
    post = co.laplace(lin, co.GGN, prior_precision=other.detached_from_weights(), check_mode=False)
    torch.testing.assert_close(post.precision.to_dense(), post.curvature.to_dense() + other.to_dense(), **TIGHT)


def _other():
    model, x, y = problem(n=20)
    return model, (x, y)


def test_a_singular_prior_has_no_evidence_and_says_so(lin):
    post = co.laplace(lin, co.GGN(lin).add_diagonal(1.0), co.low_rank(co.GGN(lin), rank=4), check_mode=False)
    assert post.sample(2).isfinite().all()
    with pytest.raises(ValueError, match="singular"):
        post.log_evidence()
