"""Rows of J layer by layer: those of the dense Jacobian, whole, in pieces of few bytes, and as a map."""

import pytest
import torch

from curvops.network import Passes
from tests.network.products import PLENTY, agree, walk
from tests.zoo import reference

NETWORKS = [
    "mlp",
    "cnn",
    "shared_parameter",
    "dead_branch",
    "own_parameters",
    "function_pair",
    "flattened_positions",
    "embedding_padding",
]


@pytest.fixture(params=NETWORKS)
def passes(request: pytest.FixtureRequest) -> Passes:
    return walk(request.param, "auto")


def test_the_groups_hold_each_row_once(passes: Passes, request: pytest.FixtureRequest) -> None:
    positions, expected = passes.model.selection.positions(), reference(request.node.callspec.params["passes"])
    found, seen = torch.zeros_like(expected), 0
    for first, count, groups in passes.jacobian_rows():
        assert first == seen
        for group in groups:
            start = first + group.first_row
            for name, rows in group.rows().items():
                found[start : start + group.num_rows, positions[name].flatten()] += rows.reshape(group.num_rows, -1)
        seen += count
    assert seen == len(expected)
    assert agree(found, expected)


def test_a_group_in_pieces_and_as_a_map_is_its_rows(passes: Passes) -> None:
    """A piece has at most the bytes asked for, or a single point."""
    generator = torch.Generator().manual_seed(0)
    for _, _, groups in passes.jacobian_rows():
        for group in groups:
            whole = group.rows()
            point = sum(rows[0].nbytes for rows in whole.values())
            for most in (0, 2 * point, PLENTY):
                pieces = list(group.pieces(most))
                assert len(pieces) == -(-group.num_points // max(1, most // point))
                assert all(torch.equal(torch.cat([p[name] for p in pieces]), rows) for name, rows in whole.items())
            for columns in (1, 40):  # by way of rows, or of factors
                tangents = {
                    name: torch.randn(columns, *rows.shape[2:], dtype=rows.dtype, generator=generator)
                    for name, rows in whole.items()
                }
                pushed = sum(
                    torch.einsum("nrp,kp->knr", rows.reshape(*rows.shape[:2], -1), tangents[name].reshape(columns, -1))
                    for name, rows in whole.items()
                )
                assert agree(group.push(tangents), pushed)
