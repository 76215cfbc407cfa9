"""Directions that solves keep for later ones: the same answers, fewer products, and no use where they do not fit."""

import importlib
import threading

import pytest
import torch

import curvops as co
from curvops.errors import ConvergenceError, NotPositiveDefiniteError
from curvops.linalg.core.results import Reason
from curvops.linalg.solvers.cg import recycling_cg
from curvops.linalg.solvers.kept_directions import KeptDirections
from tests.linalg.matrices import log_spaced, symmetric
from tests.linalg.systems import right_hand_sides

solving = importlib.import_module("curvops.linalg.solvers.solve")
DOUBLE = torch.float64


def linearized(dtype=DOUBLE, budget=None):
    """A network of 482 weights and 120 outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 60), torch.nn.Tanh(), torch.nn.Linear(60, 2)).to(dtype)
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0), dtype=DOUBLE).to(dtype)
    return co.linearize(model, (x, torch.arange(60) % 2), "classification", memory_budget=budget)


def precision(shift=1e-4, **options):
    P = co.GGN(linearized(**options)).add_diagonal(shift)
    _ = P @ (P @ right_hand_sides(P.shape[0], 2, P.dtype))  # from the second product on, the linearisation is kept
    return P


def products(P, B, **options):
    """The solution, and the products it took."""
    spent = [0]
    x = co.linalg.solve(P, B, progress=lambda name, done, total: spent.append(done), **options)
    return x, spent[-1]


@pytest.mark.parametrize("shift", ["number", "vector"])
@pytest.mark.parametrize("columns", [1, 4, 130])
def test_further_solves_are_right_and_take_fewer_products(columns, shift):
    n = 482
    d = 1e-2 if shift == "number" else 1e-2 * torch.logspace(0, 2, n, dtype=DOUBLE)
    P = precision(d)
    dense, taken = P.to_dense(), []
    for part in right_hand_sides(n, 3 * columns).split(columns, 1):
        x, count = products(P, part, rtol=1e-10)
        torch.testing.assert_close(x, torch.linalg.solve(dense, part), rtol=1e-7, atol=1e-8 * float(x.abs().max()))
        assert ((part - dense @ x).norm(dim=0) <= 1.01e-10 * part.norm(dim=0)).all()
        taken.append(count)
    assert max(taken[1:]) < taken[0]
    again, count = products(P, part, rtol=1e-10)
    assert count < taken[0]
    torch.testing.assert_close(again, x, rtol=1e-7, atol=1e-8 * float(x.abs().max()))


def test_the_operator_of_other_tensors_starts_afresh():
    P = precision()
    B = right_hand_sides(482, 3)
    _, first = products(P, B, rtol=1e-10)
    P.shift.data.mul_(0.5)  # leaves the version unchanged
    x, changed = products(P, B, rtol=1e-10)
    assert changed >= first  # nothing of the first solve is used
    torch.testing.assert_close(x, torch.linalg.solve(P.to_dense(), B), rtol=1e-6, atol=1e-8 * float(x.abs().max()))


def test_the_gradient_of_a_solve_uses_the_directions():
    P = precision(torch.full((482,), 1e-3, dtype=DOUBLE))
    b = right_hand_sides(482, 2).requires_grad_()
    x = P.solve(b)
    x.sum().backward()
    torch.testing.assert_close(b.grad, torch.linalg.solve(P.to_dense(), torch.ones_like(b)), rtol=1e-5, atol=1e-4)


def test_bytes_are_counted_while_the_operator_lives_and_stay_within_a_quarter():
    P = precision(1e-2)
    (memory,) = P.memories
    before = memory.room()
    for _ in range(3):
        _ = products(P, right_hand_sides(482, 5))
    past = P.directions(5)
    assert 0 < past.nbytes == before - memory.room() <= before / 4
    assert past.count <= 241 and past.nbytes <= 1.1 * 2 * 8 * 482 * past.count  # little room is left in panels
    del past, P
    assert memory.room() >= before


def test_without_room_float64_or_a_network_a_sketch_is_taken_and_says_why(monkeypatch):
    vector = 8 * 482
    P, least = precision(), vector * (4 * 12 + 8 * 241)
    assert P.plan(4).chosen["solve"] == "cg with kept directions" and P.directions(4) is not None
    assert P.directions(4, memory_budget=least) is not None and P.directions(4, memory_budget=least - 1) is None
    (memory,) = P.memories
    monkeypatch.setattr(type(memory), "room", lambda memory: least - 1)
    for A, why in ((P, "room for 240"), (precision(dtype=torch.float32), "float32")):
        taken = A.plan(4)
        assert taken.chosen["solve"] == "cg with a sketch" and A.directions(4) is None
        assert why in next(route.why_not for route in taken.tables["solve"] if route.name == "cg with kept directions")
    foreign = co.linalg.Dense(symmetric(log_spaced(300, 10)), psd=True).add_diagonal(0.1)
    assert foreign.directions(4) is None


def test_where_directions_do_not_suffice_a_sketch_is_taken_from_then_on(monkeypatch):
    P, B = precision(), right_hand_sides(482, 2)
    plain = solving.recycling_cg
    monkeypatch.setattr(solving, "recycling_cg", lambda *args, **options: plain(*args, **{**options, "maxiter": 3}))
    x = P.solve(B)
    assert ((B - P @ x).norm(dim=0) <= 1.5e-8 * B.norm(dim=0)).all()
    assert P.directions(2) is None and P.plan(2).chosen["solve"] == "cg with a sketch"
    with pytest.raises(ConvergenceError, match="ITERATION_LIMIT"):
        co.linalg.solve(precision(), B, maxiter=3)  # a user's limit stays one


def test_an_indefinite_operator_is_refused_each_time():
    P = (-1.0 * co.GGN(linearized())).add_diagonal(1e-3)
    for _ in range(2):
        with pytest.raises(NotPositiveDefiniteError):
            P.solve(right_hand_sides(482, 2))


def test_two_threads_share_an_operator():
    P, found = precision(), {}
    B = right_hand_sides(482, 8)

    def work(j):
        found[j] = P.solve(B[:, 2 * j : 2 * j + 2])

    threads = [threading.Thread(target=work, args=(j,)) for j in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x = torch.cat([found[j] for j in range(4)], 1)
    assert ((B - P @ x).norm(dim=0) <= 1.5e-8 * B.norm(dim=0)).all()


def test_copies_of_an_operator_keep_no_directions():
    P = precision()
    _ = P.solve(right_hand_sides(482, 2))
    assert P.directions().count and not P.to(DOUBLE).clone().directions().count


def test_no_right_hand_sides_have_no_solutions():
    P = precision()
    for B in (right_hand_sides(482, 2)[:, :0], right_hand_sides(482, 2), right_hand_sides(482, 2)[:, :0]):
        assert P.solve(B).shape == B.shape


@pytest.mark.parametrize("kind", ["zero", "dependent", "not finite"])
def test_special_columns_of_a_further_solve(kind):
    P, B = precision(), right_hand_sides(482, 4)
    past = KeptDirections()
    assert recycling_cg(P, B.flip(0), past).accepted
    B[:, 2] = {"zero": 0 * B[:, 0], "dependent": B[:, 0] - B[:, 1], "not finite": B[:, 0] / 0}[kind]
    s = recycling_cg(P, B, past)
    reason = {"zero": Reason.ZERO_RIGHT_HAND_SIDE, "dependent": Reason.CONVERGED, "not finite": Reason.NON_FINITE}
    assert s.reasons == (*2 * (Reason.CONVERGED,), reason[kind], Reason.CONVERGED)
