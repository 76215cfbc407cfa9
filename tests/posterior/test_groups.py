"""Predictions joint within groups of points are blocks of the joint covariance, for every structure."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import curvops as co

DOUBLE = torch.float64
STRUCTURES: dict[str, Any] = {
    "GGN": co.GGN,
    "KFAC": co.KFAC,
    "EKFAC": co.EKFAC,
    "DiagonalGGN": co.DiagonalGGN,
    "BlockDiagonal": co.BlockDiagonal,
    "LowRank": lambda lin: co.low_rank(co.GGN(lin), 5),
}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (3,)),
    "images": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)), (1, 3, 3)),
    "sequences": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (2, 3)),
}


@functools.cache
def posterior(network: str, structure: str, parameters: Any = None) -> tuple[co.posterior.Laplace, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[network]
    x = torch.randn(5, *shape, dtype=DOUBLE)
    y = torch.randn(5, *shape[:-1], 2, dtype=DOUBLE) if network == "sequences" else torch.randn(5, 2, dtype=DOUBLE)
    lin = co.linearize(make().double(), (x, y), co.likelihoods.Gaussian(0.3), parameters=parameters)
    return co.laplace(lin, STRUCTURES[structure](lin), prior_precision=0.7, check_mode=False), torch.randn(
        6, *shape, dtype=DOUBLE
    )


def blocks_of(joint: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.stack([joint[i : i + rows, i : i + rows] for i in range(0, len(joint), rows)])


CASES = [
    *((network, structure, None, False, False) for network in NETWORKS for structure in STRUCTURES),
    *(("mlp", structure, "last_layer", False, True) for structure in STRUCTURES),
    *((network, "KFAC", "last_layer", False, True) for network in NETWORKS if network != "mlp"),
    *((network, "GGN", None, True, True) for network in NETWORKS),
]
"""Each network and structure; the last layer of each structure, and of each network; draws, which are of none."""


@pytest.mark.parametrize(("network", "structure", "parameters", "draws", "noise"), CASES)
def test_groups_are_blocks_of_the_joint_prediction(
    network: str, structure: str, parameters: Any, draws: bool, noise: bool
) -> None:
    post, x = posterior(network, structure, parameters)
    samples = post.sample(3, torch.Generator().manual_seed(0)) if draws else None
    joint = post.predict(x, joint=True, samples=samples, noise=noise)
    for groups in (1, 2, 6):
        found = post.predict(x, groups=groups, samples=samples, noise=noise)
        points = joint.mean.shape[0]
        assert found.batch_shape == (points // groups,) and found.event_shape == (groups, 2)
        torch.testing.assert_close(found.mean, joint.mean.unflatten(0, (-1, groups)), rtol=1e-10, atol=1e-12)
        expected = blocks_of(joint.covariance_matrix, 2 * groups)
        torch.testing.assert_close(found.covariance_matrix, expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found.variance, joint.variance.unflatten(0, (-1, groups)), rtol=1e-8, atol=1e-10)


def test_gradients_in_the_inputs() -> None:
    """Of the structures, `test_input_gradients.py`: groups join the same products."""
    post, x = posterior("mlp", "GGN")
    x = x[:4].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: post.predict(x, groups=2, rtol=1e-12).covariance_matrix, (x,), rtol=1e-4, fast_mode=True
    )


def test_groups_of_chains() -> None:
    post, x = posterior("mlp", "GGN")
    empirical = co.sampling.empirical(post.lin, post.sample(6, torch.Generator().manual_seed(0))[None])
    joint = empirical.predict(x, joint=True).covariance_matrix
    torch.testing.assert_close(empirical.predict(x, groups=3).covariance_matrix, blocks_of(joint, 6))


@pytest.mark.parametrize(
    ("network", "groups", "words"),
    [
        ("mlp", 5, "groups=5 must divide the 6 points"),
        ("mlp", 0, "groups must be at least 1"),
        ("sequences", 3, "sequences of 2 positions"),
    ],
)
def test_groups_that_cannot_be(network: str, groups: int, words: str) -> None:
    post, x = posterior(network, "KFAC")
    with pytest.raises(ValueError, match=words):
        post.predict(x, groups=groups)
