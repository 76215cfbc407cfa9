"""Algorithms take their blocks and bases from what the networks behind an operator have left.

Tests `algorithm.py`.
"""

import warnings

import pytest
import torch
from torch import nn

import curvops as co
from curvops import ambient
from curvops.ambient import is_out_of_memory
from curvops.errors import BlockSizeWarning, MemoryBudgetWarning
from curvops.linalg import Reason, draw
from curvops.linalg.core import solve_routes
from tests.linalg.faulty import without_room_beyond
from tests.linalg.matrices import generator, symmetric

D, N, C = 303, 6, 3
VECTOR = 8 * D
SOLVE_VECTORS = solve_routes.SOLVE_VECTORS


def linearized(vectors):
    """A network of 303 weights that keeps no engines, with room for so many vectors."""
    x, y = torch.randn(N, 100, generator=generator()).double() / 3, torch.arange(N) % C
    model = nn.Sequential(nn.Linear(100, C)).double()
    nn.init.normal_(model[0].weight, generator=generator(1), std=0.1)
    nn.init.zeros_(model[0].bias)
    lin = co.linearize(model, (x, y), "classification", memory_budget=vectors * VECTOR, engine="streamed")
    lin.memory.keep(lin, lin.memory.room() - vectors * VECTOR)  # a budget leaves more than this network would fill
    assert lin.memory.room() == vectors * VECTOR
    return lin


def test_operators_know_the_networks_in_them():
    lin, other = linearized(10), linearized(20)
    G, J = co.GGN(lin), lin.jacobian()
    P = G.add_diagonal(0.5)
    for operator in (G, J, P, P.inverse(), J @ P.inverse() @ J.mT, 2 * G, G + co.Hessian(lin), co.TangentKernel(lin)):
        assert operator.memories == {lin.memory}
    both = G.detached_from_weights() + co.GGN(other).detached_from_weights()
    assert both.memories == {lin.memory, other.memory}
    assert co.linalg.Diagonal(torch.ones(2)).memories == frozenset()
    with ambient.running("solve", both) as run:
        assert run.room() == 10 * VECTOR  # the smallest decides


def test_what_is_given_comes_before_what_a_network_has_left():
    """An algorithm without a budget of its own takes what the network has left, but for the vectors of a product."""
    G, left = co.GGN(lin := linearized(100)), []

    def look(*_):
        left.append(lin.memory.room())

    for given, low, high in ((5 * VECTOR, 100, 101), (None, 0, 30)):
        co.linalg.lanczos(G, 3, generator=generator(), memory_budget=given, progress=look)
        assert all(low * VECTOR <= room < high * VECTOR for room in left) and lin.memory.room() == 100 * VECTOR
        left.clear()


@pytest.mark.parametrize("solver", [co.linalg.cg, co.linalg.minres, co.linalg.lsmr])
def test_solvers_take_columns_in_groups_and_say_so(solver):
    P = co.GGN(lin := linearized(40)).add_diagonal(0.5)
    B = torch.randn(D, 7, generator=generator()).double()
    solution = solver(P, B, rtol=1e-11)
    assert solution.groups > 1 and solver(P, B, rtol=1e-3, memory_budget=10**9).groups == 1
    torch.testing.assert_close(solution.x, torch.linalg.solve(P.to_dense(), B), rtol=1e-9, atol=1e-9)
    assert lin.memory.room() == 40 * VECTOR


def test_a_preconditioner_leaves_room_for_a_column_and_counts_while_it_lives():
    P = co.GGN(lin := linearized(SOLVE_VECTORS + 12)).add_diagonal(1e-3)
    made = P.preconditioner(100, generator())
    assert 1 <= made.U.shape[1] <= 4
    assert lin.memory.room() == (SOLVE_VECTORS + 12) * VECTOR - made.U.nbytes
    assert co.GGN(linearized(SOLVE_VECTORS)).add_diagonal(1e-3).preconditioner(100, generator()).U.shape[1] == 0


def test_draws_are_the_same_whatever_memory_there_is():
    roomy, narrow = (linearized(vectors) for vectors in (10**6, 2 * SOLVE_VECTORS))
    for make in (co.GGN, lambda lin: co.GGN(lin).add_diagonal(0.5), lambda lin: 0.3 * co.GGN(lin) + co.KFAC(lin)):
        torch.testing.assert_close(
            draw(make(narrow), 5, generator()), draw(make(roomy), 5, generator()), rtol=1e-10, atol=1e-12
        )
    posts = [co.laplace(lin, co.DiagonalGGN, prior_precision=0.5, check_mode=False) for lin in (roomy, narrow)]
    one, other = (post.deviations(5, generator=generator()).draws for post in posts)  # its operators know no network
    torch.testing.assert_close(other, one, rtol=1e-14, atol=0)


CAPPED = {
    "nystrom": lambda G: co.linalg.nystrom(G, 40, generator=generator()).reason,
    "lanczos": lambda G: co.linalg.lanczos(G, 100, generator=generator()).reason,
    "trace": lambda G: co.linalg.trace(G, method="xtrace", max_matvecs=60, generator=generator()).reason,
    "diagonal": lambda G: co.linalg.diagonal(G, method="xdiag", max_matvecs=60, generator=generator()).reason,
    "frobenius": lambda G: co.linalg.frobenius_norm(G, max_matvecs=60, generator=generator()).reason,
    "spectral_density": lambda G: co.linalg.spectral_density(G, steps=100, generator=generator()).reason,
}


@pytest.mark.parametrize("name", CAPPED)
def test_results_say_where_memory_capped_them(name):
    noise = co.linalg.Dense(symmetric(torch.linspace(1, 3, D).double()), psd=True)  # no basis ends by itself
    assert CAPPED[name](co.GGN(linearized(14)) + noise) is Reason.RANK_CAPPED


LARGE = 360_003
"""So many weights that six vectors are more than the 16 MiB beyond which something is said."""


def large(vectors):
    x, y = torch.randn(2, LARGE // 3 - 1, generator=generator()).double() / 600, torch.arange(2)
    lin = co.linearize(
        nn.Linear(LARGE // 3 - 1, 3).double(), (x, y), "classification", memory_budget=8 * LARGE * vectors
    )
    return co.GGN(lin).add_diagonal(0.5)


NEEDED = {
    "cg": (12, lambda P: co.linalg.cg(P, torch.ones(LARGE).double())),
    "minres": (16, lambda P: co.linalg.minres(P, torch.ones(LARGE).double())),
    "given to lsmr": (14, lambda P: co.linalg.lsmr(P, torch.ones(LARGE).double(), memory_budget=40 * LARGE)),
    "lanczos": (6, lambda P: co.linalg.lanczos(P, 10, generator=generator())),
    "trace": (12, lambda P: co.linalg.trace(P, method="xtrace", max_matvecs=8, generator=generator())),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_budget_below_what_an_algorithm_needs_at_least_is_named(name):
    needed, call = NEEDED[name]
    message = f"budget is {40 * LARGE:,} bytes, but the working vectors take at least {needed * 8 * LARGE:,},"
    with pytest.warns(MemoryBudgetWarning, match=message):
        call(large(5))
    if "given" not in name:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(large(needed))


CPU_ERROR = RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried")


@pytest.mark.parametrize(
    ("solver", "error"),
    [
        (co.linalg.cg, None),
        (co.linalg.cg, CPU_ERROR),
        (co.linalg.cg, MemoryError()),
        (co.linalg.minres, None),
        (co.linalg.lsmr, None),
    ],
)
def test_a_block_without_memory_is_halved_and_says_so_once(solver, error):
    matrix = symmetric(torch.linspace(1, 3, 40).double())
    B = torch.randn(40, 11, generator=generator(), dtype=torch.float64)
    A = without_room_beyond(3, matrix, error)
    with pytest.warns(BlockSizeWarning, match="out of memory with 11 columns at once: 5 ") as caught:
        found = solver(A, B, rtol=1e-10)
    assert len(caught) == 1 and found.groups == 6 and found.accepted
    torch.testing.assert_close(found.x, torch.linalg.solve(matrix, B), rtol=1e-8, atol=1e-8)
    assert A.widths[:3] == [11, 5, 2]


@pytest.mark.parametrize("budget", [None, 2**20])
def test_a_product_without_memory_is_made_in_parts_and_says_so_once(budget):
    """In sketches, and in whatever else multiplies blocks of its own."""
    matrix = symmetric(torch.linspace(1, 3, 40).double())
    A, whole = without_room_beyond(3, matrix), without_room_beyond(40, matrix)
    with pytest.warns(BlockSizeWarning, match="out of memory with 8 columns at once: 4 are multiplied") as caught:
        found = co.linalg.nystrom(A, 8, generator=generator(), memory_budget=budget)
    assert len(caught) == 1 and A.widths == [8, 4, 2, 2, 2, 2]
    expected = co.linalg.nystrom(whole, 8, generator=generator(), memory_budget=budget)
    torch.testing.assert_close(found.eigenvalues, expected.eigenvalues, rtol=1e-10, atol=1e-10)
    with pytest.warns(BlockSizeWarning):
        rough = co.low_rank(without_room_beyond(3, matrix), rank=40, generator=generator())
    torch.testing.assert_close(rough.to_dense(), matrix, rtol=1e-8, atol=1e-8)


def test_an_allocation_that_fails_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    with pytest.raises(RuntimeError, match="no room"):
        co.linalg.cg(without_room_beyond(3, torch.eye(5), RuntimeError("no room")), torch.ones(5, 4))


def test_without_memory_for_a_column_the_error_says_what_to_do():
    with (
        pytest.warns(BlockSizeWarning),
        pytest.raises(torch.OutOfMemoryError, match="Not even one column fits: pass"),
    ):
        co.linalg.cg(without_room_beyond(0, torch.eye(5)), torch.ones(5, 4))


def test_an_algorithm_inside_another_keeps_to_the_bytes_given_to_that():
    matrix, B = symmetric(torch.linspace(1, 3, 300).double()), torch.randn(300, 7, generator=generator()).double()
    A = without_room_beyond(3, matrix)
    x = co.linalg.solve(A, B, method="cg", memory_budget=3 * 12 * 8 * 300)
    assert max(A.widths) == 3
    torch.testing.assert_close(x, torch.linalg.solve(matrix, B), rtol=1e-6, atol=1e-6)
