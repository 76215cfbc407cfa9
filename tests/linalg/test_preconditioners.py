"""Every preconditioner against its dense matrix, in CG, and in the log-determinant."""

from __future__ import annotations

import math

import pytest
import torch
from linear_operator.operators import DenseLinearOperator
from linear_operator.utils.errors import NotPSDError

from curvops.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    FactoredPreconditioner,
    Kronecker,
    LowRank,
    Reason,
    as_preconditioner,
    block_jacobi,
    cg,
    cholesky,
    diagonal_preconditioner,
    logdet,
    nystrom,
)
from curvops.linalg.partition import partition
from tests.linalg.operands import positive, random, uniform
from tests.linalg.spectra import SPECTRA, log_spaced, symmetric

N, MU = 120, 0.01
EYE = torch.eye(N, dtype=torch.float64)
SHUFFLED = torch.randperm(N, generator=torch.Generator().manual_seed(5))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Products(DenseLinearOperator):
    """A linear_operator class that counts the columns it multiplies."""

    count = 0

    def _matmul(self, rhs):
        Products.count += rhs.shape[1]
        return super()._matmul(rhs)


def decaying(dtype=torch.float64):
    return symmetric(SPECTRA["decaying"]).to(dtype)


def blocks_of(A, sets):
    P = torch.zeros_like(A)
    for s in sets:
        P[s[:, None], s] = A[s[:, None], s]
    return P


def nystrom_dense(A):
    approximation = nystrom(A, 10, generator=generator())
    U, values = approximation.U, approximation.eigenvalues
    ratio = (values + MU) / (values[-1] + MU)
    return approximation.preconditioner(MU), (U * ratio) @ U.mT + EYE - U @ U.mT


def cholesky_dense(pivoting):
    def make(A):
        found = cholesky(A, 12, pivoting=pivoting, shift=MU, generator=generator())
        return found.preconditioner(), found.F @ found.F.mT + MU * EYE

    return make


def structured():
    left, right = positive(3, 4), positive(3, 10, seed=1)
    operator = Kronecker(left, right).add_diagonal(MU)
    return as_preconditioner(operator), operator.to_dense()


def by_layers():
    dense = [positive(1, size, seed=size)[0] for size in (50, 40, 30)]
    operator = BlockDiagonal(*(Dense(part, psd=True) for part in dense), positions=SHUFFLED.split([50, 40, 30]))
    return as_preconditioner(operator.add_diagonal(MU)), operator.to_dense() + MU * EYE


def woodbury():
    operator = LowRank(random(N, 6), uniform(6)).add_diagonal(MU)
    return as_preconditioner(operator), operator.to_dense()


MADE = {
    "nystrom": nystrom_dense,
    "cholesky": cholesky_dense("greedy"),
    "rp-cholesky": cholesky_dense("random"),
    "diagonal": lambda A: (diagonal_preconditioner(A, MU), torch.diag(A.diagonal() + MU)),
    "diagonal given": lambda A: (diagonal_preconditioner(A.diagonal(), MU), torch.diag(A.diagonal() + MU)),
    "blocks": lambda A: (block_jacobi(A, 7, MU), blocks_of(A, torch.arange(N).split(7)) + MU * EYE),
    "blocks by sets": lambda A: (
        block_jacobi(A, SHUFFLED.split([20, 60, 20, 20]), MU),
        blocks_of(A, SHUFFLED.split([20, 60, 20, 20])) + MU * EYE,
    ),
    "tensor": lambda A: (as_preconditioner(A + MU * EYE), A + MU * EYE),
    "Dense": lambda A: (as_preconditioner(Dense(A + MU * EYE, psd=True)), A + MU * EYE),
    "Kronecker": lambda A: structured(),
    "BlockDiagonal": lambda A: by_layers(),
    "LowRank": lambda A: woodbury(),
    "Diagonal": lambda A: (as_preconditioner(Diagonal(uniform(N))), uniform(N).diag()),
}


@pytest.mark.parametrize("name", MADE)
def test_identities_against_the_dense_matrix(name):
    P, dense = MADE[name](decaying())
    assert isinstance(P, FactoredPreconditioner)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(P @ dense, EYE, **close)
    torch.testing.assert_close(P @ dense[:, 0], EYE[:, 0], **close)
    torch.testing.assert_close(P.sqrt(P.sqrt(EYE)), dense, **close)
    torch.testing.assert_close(P.sqrt_inverse(P.sqrt(EYE)), EYE, **close)
    torch.testing.assert_close(P.sqrt_inverse(P.sqrt_inverse(dense)), EYE, **close)
    torch.testing.assert_close(P.sqrt(EYE), P.sqrt(EYE).mT, **close)
    torch.testing.assert_close(P.logdet(), torch.logdet(dense), **close)
    values = torch.linalg.eigvalsh(dense)
    low, high = P.bounds()
    assert low <= values[0] * (1 + 1e-10) and values[-1] <= high * (1 + 1e-10)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("level", [1e-4, MU, 3.0])
def test_the_floor_is_a_bound(name, level):
    A = decaying()
    P, _ = MADE[name](A)
    whitened = P.sqrt_inverse(P.sqrt_inverse(A + level * EYE).mT)
    assert 0 < P.floor(level) <= torch.linalg.eigvalsh(whitened)[0] * (1 + 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["nystrom", "cholesky", "rp-cholesky", "blocks", "diagonal", "tensor"])
def test_cg_takes_fewer_iterations(name, dtype):
    scales = torch.logspace(0, 1.5, N, dtype=torch.float64)
    core = SPECTRA["flat"] if name in ("blocks", "diagonal") else SPECTRA["exponential"]
    A = scales[:, None] * symmetric(core) * scales
    make = {
        "nystrom": lambda: nystrom(A.to(dtype), 40, generator=generator()).preconditioner(1.0),
        "cholesky": lambda: cholesky(A.to(dtype), 40, shift=1.0).preconditioner(),
        "rp-cholesky": lambda: cholesky(
            A.to(dtype), 40, shift=1.0, pivoting="random", generator=generator()
        ).preconditioner(),
        "blocks": lambda: block_jacobi(A.to(dtype), 40, 1.0),
        "diagonal": lambda: diagonal_preconditioner(A.to(dtype), 1.0),
        "tensor": lambda: as_preconditioner((A + EYE).to(dtype)),
    }[name]
    P = make()
    system, b = (A + EYE).to(dtype), random(N).to(dtype)
    plain = cg(system, b, rtol=1e-4)
    helped = cg(system, b, rtol=1e-4, preconditioner=P)
    assert helped.accepted and helped.iterations < plain.iterations / 1.5
    assert (P @ b).dtype == dtype


# Pivoted Cholesky.


@pytest.mark.parametrize("wrap", [lambda A: A, DenseLinearOperator, Products, Dense])
@pytest.mark.parametrize("pivoting", ["greedy", "random"])
@pytest.mark.parametrize("name", ["decaying", "step", "kappa 1e6"])
def test_cholesky_is_below_the_matrix_and_exact_at_the_pivots(name, pivoting, wrap):
    A = symmetric(SPECTRA[name])
    found = cholesky(wrap(A), 30, pivoting=pivoting, generator=generator())
    assert found.F.shape == (N, 30) and len(found.pivots.unique()) == 30 and found.reason is Reason.CONVERGED
    left = A - found.F @ found.F.mT
    scale = float(SPECTRA[name].max())
    assert torch.linalg.eigvalsh(left)[0] > -1e-12 * scale
    torch.testing.assert_close(left[found.pivots], torch.zeros(30, N).double(), rtol=0, atol=1e-12 * scale)
    assert found.trace_left == pytest.approx(float(left.trace()), abs=1e-10 * scale)
    torch.testing.assert_close(found @ EYE, found.F @ found.F.mT, rtol=0, atol=1e-12 * scale)


def test_cholesky_counts_its_columns():
    Products.count = 0
    found = cholesky(Products(decaying()), 33, diagonal=decaying().diagonal(), pivoting="random", generator=generator())
    assert found.matvecs == Products.count >= 33
    assert cholesky(Dense(decaying()), 10).matvecs == 10
    assert cholesky(Dense(decaying()) @ Dense(EYE), 10).matvecs == N + 10  # its diagonal has no cheaper way


@pytest.mark.parametrize("pivoting", ["greedy", "random"])
@pytest.mark.parametrize("rank", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cholesky_of_low_rank_stops_there(rank, pivoting, dtype):
    W = random(60, rank).to(dtype)
    found = cholesky(W @ W.mT, 40, pivoting=pivoting, shift=0.1, generator=generator())
    assert found.F.shape == (60, rank) and found.trace_left == 0 and found.reason is Reason.CONVERGED
    torch.testing.assert_close(found.F @ found.F.mT, W @ W.mT, rtol=0, atol=2e3 * torch.finfo(dtype).eps)
    P = found.preconditioner()
    b = random(60).to(dtype)
    solution = cg(W @ W.mT + 0.1 * torch.eye(60, dtype=dtype), b, preconditioner=P, rtol=1e-3)
    assert solution.accepted and solution.iterations <= 4
    with pytest.raises(ValueError, match="positive shift"):
        found.preconditioner(0.0)


def test_random_pivoting_survives_outliers():
    # One heavy row and column each for 30 points, which greedy pivoting takes one by one, and a smooth rest.
    smooth = 0.9 * torch.exp(-2 * (torch.linspace(0, 1, 400).double()[:, None] - torch.linspace(0, 1, 400)).square())
    A = torch.block_diag(torch.eye(30, dtype=torch.float64), smooth)
    greedy = cholesky(A, 30).trace_left
    rows = [cholesky(A, 30, pivoting="random", generator=generator(seed)).trace_left for seed in range(5)]
    assert max(rows) < greedy / 5


def test_random_pivots_follow_the_diagonal():
    # Orthogonal columns: the first draw takes position i with probability a_i / Σ a. False alarms: below 1e-4.
    weights, hits = torch.tensor([1.0, 2.0, 7.0], dtype=torch.float64), torch.zeros(3)
    g = generator()
    for _ in range(500):
        hits[cholesky(weights.diag(), 1, pivoting="random", generator=g).pivots] += 1
    assert (hits / 500 - weights / 10).abs().max() < 4 * 0.5 / math.sqrt(500)


def test_rank_is_grown_until_the_condition_number_is_bounded():
    A, mu = symmetric(SPECTRA["exponential"]), 1e-2
    found = cholesky(A, shift=mu)
    P = found.preconditioner()
    spectrum = torch.linalg.eigvalsh(P.sqrt_inverse(P.sqrt_inverse(A + mu * EYE).mT))
    assert spectrum[-1] / spectrum[0] <= 28 and len(found.pivots) < N and found.trace_left <= 27 * mu
    by_share = cholesky(A, rtol=0.1)
    assert by_share.trace_left <= 0.1 * A.trace() and by_share.reason is Reason.CONVERGED
    capped = cholesky(A, shift=mu, memory_budget=2 * N * 8 * 10)
    assert len(capped.pivots) == 10 and capped.reason is Reason.RANK_CAPPED


def test_without_a_shift_the_mean_left_takes_its_place():
    A = symmetric(log_spaced(N, 1e4))
    found = cholesky(A, 60)
    assert found.preconditioner().level == pytest.approx(found.trace_left / 60)
    assert cg(A, random(N), preconditioner=found.preconditioner()).accepted
    complete = cholesky(A, N).preconditioner()
    torch.testing.assert_close(complete @ A, EYE, rtol=0, atol=1e-8)


def test_more_columns_than_the_first_room():
    A = symmetric(torch.linspace(1, 2, 200, dtype=torch.float64))
    found = cholesky(A, 150)
    assert torch.linalg.eigvalsh(A - found.F @ found.F.mT)[0] > -1e-12
    assert cholesky(A, 500).F.shape == (200, 200)


@pytest.mark.parametrize("pivoting", ["greedy", "random"])
def test_cholesky_of_what_is_not_psd(pivoting):
    with pytest.raises(NotPSDError, match="add_diagonal"):
        cholesky(torch.diag(torch.tensor([1.0, -1.0])), 2, pivoting=pivoting)
    with pytest.raises(NotPSDError, match="Schur complement"):
        cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), 2, pivoting=pivoting, generator=generator())


def test_cholesky_errors():
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN"):
            cholesky(torch.full((4, 4), bad), 2)
    column = torch.eye(3)
    column[2, 0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        cholesky(column, 2)
    with pytest.raises(ValueError, match="exact diagonal"):
        cholesky(decaying(), 5, diagonal=2 * decaying().diagonal())
    with pytest.raises(ValueError, match=r"shape \(120,\)"):
        cholesky(decaying(), 5, diagonal=torch.ones(3).double())
    for options in ({"rank": -1}, {"shift": -1.0}, {"shift": math.nan}, {"rtol": -0.1}):
        with pytest.raises(ValueError, match="not negative"):
            cholesky(torch.eye(4), **options)
    with pytest.raises(ValueError, match="square"):
        cholesky(torch.ones(3, 2), 1)


# Blocks and diagonals.


@pytest.mark.parametrize("wrap", [DenseLinearOperator, Products, Dense])
def test_blocks_of_an_operator_by_its_products(wrap):
    A, sets = decaying(), [3, 50, 50, 17]
    P, expected = block_jacobi(wrap(A), sets, MU), block_jacobi(A, sets, MU)
    torch.testing.assert_close(P @ EYE, expected @ EYE, rtol=1e-10, atol=1e-10)
    assert P.matvecs == N and expected.matvecs == 0
    by_partition = block_jacobi(A, partition(list(SHUFFLED.split(40))), MU)
    torch.testing.assert_close(by_partition @ EYE, block_jacobi(A, SHUFFLED.split(40), MU) @ EYE)


def test_diagonal_of_an_operator():
    A = decaying()
    for operator, matvecs in ((Dense(A), 0), (Dense(A) @ Dense(EYE), N), (Dense(A).add_diagonal(0.0), 0)):
        P = diagonal_preconditioner(operator, MU)
        torch.testing.assert_close(P.entries, A.diagonal() + MU)
        assert P.matvecs == matvecs


def test_block_and_diagonal_errors():
    indefinite = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    with pytest.raises(NotPSDError, match="larger shift"):
        block_jacobi(indefinite, 2)
    with pytest.raises(NotPSDError, match="entry 1"):
        diagonal_preconditioner(torch.diag(torch.tensor([1.0, 0.0])))
    zero = torch.zeros(4, 4)
    with pytest.raises(NotPSDError, match="starts at position 0"):
        block_jacobi(zero, 2)
    with pytest.raises(NotPSDError, match="not positive"):
        diagonal_preconditioner(zero)
    for make in (
        lambda: block_jacobi(torch.full((4, 4), math.nan), 2),
        lambda: diagonal_preconditioner(zero + math.nan),
    ):
        with pytest.raises(ValueError, match="NaN"):
            make()
    for shift in (-1.0, math.nan):
        with pytest.raises(ValueError, match="shift"):
            block_jacobi(zero, 2, shift)
        with pytest.raises(ValueError, match="shift"):
            diagonal_preconditioner(zero, shift)
    for blocks in ([2, 3], 0, [torch.tensor([0, 0, 1, 2])], []):
        with pytest.raises(ValueError, match=r"block|position"):
            block_jacobi(torch.eye(4), blocks)
    with pytest.raises(ValueError, match="memory_budget"):
        block_jacobi(torch.eye(4), 4, memory_budget=10)


# Any operator.


def test_what_has_no_closed_form_is_an_error():
    with pytest.raises(TypeError, match="nystrom"):
        as_preconditioner(Dense(decaying()) @ Dense(EYE))
    with pytest.raises(TypeError, match="nystrom"):
        as_preconditioner(DenseLinearOperator(EYE))
    with pytest.raises(TypeError, match=r"add_diagonal\(shift\)"):
        as_preconditioner(LowRank(random(9, 2), uniform(2)))
    with pytest.raises(TypeError):
        as_preconditioner("kfac")
    with pytest.raises(NotPSDError):
        as_preconditioner(Diagonal(torch.tensor([1.0, -1.0])))
    with pytest.raises(NotPSDError):
        as_preconditioner(torch.diag(torch.tensor([1.0, -1.0])))
    P = diagonal_preconditioner(EYE)
    assert as_preconditioner(P) is P


@pytest.mark.parametrize("n", [1, 2])
def test_smallest_sizes(n):
    A = 4 * torch.eye(n, dtype=torch.float64)
    made = [
        nystrom(A, 5, shift=1.0, generator=generator()).preconditioner(),
        cholesky(A, 5, shift=1.0).preconditioner(),
        cholesky(A, 5, shift=1.0, pivoting="random", generator=generator()).preconditioner(),
        block_jacobi(A, 5, 1.0),
        diagonal_preconditioner(A, 1.0),
        as_preconditioner(A + torch.eye(n)),
    ]
    for P in made:
        x = cg(A + torch.eye(n), torch.ones(n).double(), preconditioner=P)
        assert x.accepted and x.iterations <= 1
        assert 0 < P.floor(1.0) <= 5.0 / P.bounds()[0]


def test_zero_operator():
    zero = torch.zeros(6, 6, dtype=torch.float64)
    for made in (nystrom(zero, 3, shift=2.0), cholesky(zero, 3, shift=2.0)):
        P = made.preconditioner()
        assert len(P.values) == 0
        torch.testing.assert_close(P.sqrt_inverse(P.sqrt_inverse(zero + 1)) * P.level, zero + 1)
        assert float(P.logdet()) == pytest.approx(6 * math.log(P.level))


# The log-determinant with a preconditioner of one's own.


def large(seed=0):
    scales = torch.logspace(0, 1, 300, dtype=torch.float64)
    A = scales[:, None] * symmetric(100 * torch.arange(1, 301, dtype=torch.float64) ** -1.5) * scales
    return (A + A.mT) / 2


OWN = {
    "nystrom": lambda A: nystrom(A, 40, shift=0.5, generator=generator()).preconditioner(),
    "nystrom, another shift": lambda A: nystrom(A, 40, generator=generator()).preconditioner(5.0),
    "cholesky": lambda A: cholesky(A, 40, shift=0.5).preconditioner(),
    "rp-cholesky": lambda A: cholesky(A, 40, shift=0.5, pivoting="random", generator=generator()).preconditioner(),
    "blocks": lambda A: block_jacobi(A, 30, 0.5),
    "diagonal": lambda A: diagonal_preconditioner(A, 0.5),
    "operator": lambda A: as_preconditioner(LowRank(*_top(A)).add_diagonal(0.5)),
    "tensor": lambda A: as_preconditioner(A + 0.5 * torch.eye(len(A))),
}


def _top(A):
    values, vectors = torch.linalg.eigh(A)
    return vectors[:, -30:], values[-30:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["shift", "lower_bound"])
@pytest.mark.parametrize("name", OWN)
def test_logdet(name, kind, dtype):
    A = large()
    P = OWN[name](A.to(dtype))
    system = (A + 0.5 * torch.eye(300)).to(dtype) if kind == "lower_bound" else A.to(dtype)
    e = logdet(system, **{kind: 0.5}, preconditioner=P, max_matvecs=290, generator=generator())
    exact = torch.linalg.eigvalsh(A).add(0.5).log().sum()
    low, high = e.interval(0.999)
    assert low <= exact <= high and e.matvecs <= 290
    assert 0 < e.stderr < 0.1 * exact.abs()


@pytest.mark.parametrize("name", ["cholesky", "blocks", "operator"])
def test_logdet_bracket_holds_for_each_probe(name):
    # Of a diagonal matrix random signs know the trace of any function exactly: what is left is the depth alone.
    values = 100 * torch.arange(1, 301, dtype=torch.float64) ** -1.5
    A = values.diag()
    P = OWN[name](A)
    exact = (values + 0.5).log().sum()
    for budget in (12, 24, 48):
        e = logdet(A, shift=0.5, preconditioner=P, max_matvecs=budget, generator=generator())
        assert (e.value - exact).abs() <= e.bias_bound + 1e-8 * exact.abs()


def test_logdet_pays():
    A = symmetric(1000 * torch.arange(1, 301, dtype=torch.float64) ** -2.0)
    options = {"shift": 0.05, "max_matvecs": 200, "rtol": 1e-6}
    plain = logdet(A, preconditioner=None, generator=generator(), **options)
    helped = logdet(A, preconditioner=OWN["rp-cholesky"](A), generator=generator(), **options)
    assert helped.stderr + helped.bias_bound < (plain.stderr + plain.bias_bound) / 3


def test_logdet_names_what_it_cannot_use():
    with pytest.raises(TypeError):
        logdet(EYE, shift=1.0, preconditioner=EYE)
    with pytest.raises(ValueError, match='"auto"'):
        logdet(EYE, shift=1.0, preconditioner="kfac")
