"""Numbers of points belong to (seed, draw, point, output): no batch and no order changes them.

Tests `randomness.py`.
"""

import pytest
import torch

from curvops.network import PointNormals

LIKE = torch.zeros((), dtype=torch.float64)
DRAWS, POINTS, OUTPUTS = range(3), slice(0, 50), 3


@pytest.mark.parametrize("outputs", [1, 3, 4])
def test_parts_are_those_of_the_whole(outputs):
    normals = PointNormals(5)
    whole = normals.block(DRAWS, POINTS, outputs, LIKE)
    assert whole.shape == (3, 50, outputs)
    for first in range(9):
        assert normals.block(range(1, 3), slice(first, 50), outputs, LIKE).equal(whole[1:, first:])
        assert normals.block(range(2, 3), slice(first, first + 1), outputs, LIKE).equal(whole[2:, first : first + 1])
    assert normals.block(DRAWS, slice(7, 7), outputs, LIKE).shape == (3, 0, outputs)


def test_long_rows_are_made_in_parts():
    n, chunk = 2 * 2**15 + 5, 2**15
    whole = PointNormals(5).block(range(1), slice(0, n), 1, LIKE)
    assert PointNormals(5).block(range(1), slice(chunk - 3, n), 1, LIKE).equal(whole[:, chunk - 3 :])


def test_single_precision_has_the_same_numbers():
    whole = PointNormals(5).block(DRAWS, POINTS, OUTPUTS, LIKE)
    assert PointNormals(5).block(DRAWS, POINTS, OUTPUTS, LIKE.float()).equal(whole.float())


def test_moments_and_independence():
    """Each of 31 standardised means is beyond 4.5 with probability 7e-6: 2e-4 in all, of another seed."""
    n = 40_000
    found = PointNormals(3).block(range(3), slice(0, n), 2, LIKE)
    rows = found.mT.flatten(0, 1)  # of all points, for each draw and output
    z = rows.flatten()
    moments = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}  # with their variances
    for power, (mean, variance) in moments.items():
        assert abs((z.pow(power).mean() - mean) * (len(z) / variance) ** 0.5) < 4.5
    assert z.isfinite().all() and 4 < z.abs().max() < 6.5
    correlations = rows @ rows.mT / n**0.5
    assert correlations.fill_diagonal_(0).abs().max() < 4.5  # draws and outputs
    for powers in (1, 2):
        centred = rows.pow(powers) - rows.pow(powers).mean(1, keepdim=True)
        of_neighbours = (centred[:, 1:] * centred[:, :-1]).mean(1) / centred.var(1) * n**0.5
        assert of_neighbours.abs().max() < 4.5


def test_other_seeds_have_other_numbers():
    generator = torch.Generator().manual_seed(0)
    blocks = [PointNormals.drawn(generator).block(DRAWS, POINTS, OUTPUTS, LIKE) for _ in range(3)]
    assert len({float(block[0, 0, 0]) for block in blocks}) == 3
