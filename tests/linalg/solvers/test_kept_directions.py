"""Directions that a solve keeps for its own later steps; a solve depends on A, B and its options alone."""

from functools import partial

import pytest
import torch

import curvops as co
from tests.linalg.systems import right_hand_sides
from tests.threads import run_in_threads


def precision(shift=1e-4):
    """That of a network of 482 weights and 120 outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 60), torch.nn.Tanh(), torch.nn.Linear(60, 2)).double()
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lin = co.linearize(model, (x, torch.arange(60) % 2), "classification")
    return co.GGN(lin).add_diagonal(shift)


@pytest.mark.parametrize("columns", [4, 130])
def test_a_solve_does_not_depend_on_what_was_solved_before(columns):
    P, parts = precision(1e-2), right_hand_sides(482, 3 * columns).split(columns, 1)
    first = co.linalg.solve(precision(1e-2), parts[2], rtol=1e-10)
    for part in parts[:2]:
        _ = co.linalg.solve(P, part, rtol=1e-10)
    x, dense = co.linalg.solve(P, parts[2], rtol=1e-10), P.to_dense()
    assert ((parts[2] - dense @ x).norm(dim=0) <= 1.01e-10 * parts[2].norm(dim=0)).all()
    torch.testing.assert_close(x, first, rtol=1e-7, atol=1e-8 * float(x.abs().max()))


def test_directions_are_kept_within_a_quarter_of_the_bytes_left():
    P, B = precision(1e-5), right_hand_sides(482, 2)
    _ = P @ (P @ B)  # from the second product on, the linearisation is kept
    cg = co.linalg.cg
    usual, every, none = cg(P, B), cg(P, B, keep_directions=1024), cg(P, B, keep_directions=0)
    assert torch.equal(usual.x, every.x) and usual.matvecs < none.matvecs
    assert torch.equal(cg(P, B, memory_budget=12 * 2 * 8 * 482).x, none.x)


def test_two_threads_share_an_operator():
    P, B = precision(), right_hand_sides(482, 8)
    x = torch.cat(run_in_threads(*(partial(P.solve, columns) for columns in B.split(2, 1))), 1)
    assert ((B - P @ x).norm(dim=0) <= 1.5e-8 * B.norm(dim=0)).all()


def test_no_right_hand_sides_have_no_solutions():
    P = precision()
    for B in (right_hand_sides(482, 2)[:, :0], right_hand_sides(482, 2), right_hand_sides(482, 2)[:, :0]):
        assert P.solve(B).shape == B.shape
