"""Every preconditioner against its dense matrix, in CG, and in the log-determinant.

Tests `factored.py`, `jacobi.py`.
"""

import pytest
import torch
from linear_operator.operators import DenseLinearOperator
from linear_operator.utils.errors import NotPSDError

from curvops import linalg
from tests.linalg.matrices import SPECTRA, generator, symmetric
from tests.linalg.operands import positive, random, uniform
from tests.linalg.systems import Counted

N, MU = 120, 0.01
EYE = torch.eye(N, dtype=torch.float64)
SHUFFLED = torch.randperm(N, generator=torch.Generator().manual_seed(5))


def decaying(dtype=torch.float64):
    return symmetric(SPECTRA["decaying"]).to(dtype)


def blocks_of(A, sets):
    P = torch.zeros_like(A)
    for s in sets:
        P[s[:, None], s] = A[s[:, None], s]
    return P


def nystrom_dense(rank, shift):
    """(Ĝ + shift)/shift; without a shift, relative to the smallest eigenvalue that was kept."""

    def make(A):
        approximation = linalg.nystrom(A, rank, generator=generator())
        U, values = approximation.U.double(), approximation.eigenvalues
        ratio = (values + shift) / (shift if shift else values[-1])
        return approximation.preconditioner(shift), (U * ratio) @ U.mT + EYE - U @ U.mT

    return make


def cholesky_dense(pivoting):
    def make(A):
        found = linalg.cholesky(A, 12, pivoting=pivoting, shift=MU, generator=generator())
        return found.preconditioner(), found.F.double() @ found.F.double().mT + MU * EYE

    return make


def structured():
    left, right = positive(3, 4), positive(3, 10, seed=1)
    operator = linalg.Kronecker(left, right).add_diagonal(MU)
    return linalg.as_preconditioner(operator), operator.to_dense()


def by_layers():
    dense = [positive(1, size, seed=size)[0] for size in (50, 40, 30)]
    operator = linalg.DirectSum(
        *(linalg.Dense(part, psd=True) for part in dense), positions=SHUFFLED.split([50, 40, 30])
    )
    return linalg.as_preconditioner(operator.add_diagonal(MU)), operator.to_dense() + MU * EYE


def woodbury():
    operator = linalg.LowRank(random(N, 6), uniform(6)).add_diagonal(MU)
    return linalg.as_preconditioner(operator), operator.to_dense()


MADE = {
    "nystrom": nystrom_dense(10, MU),
    "nystrom of rank 0": nystrom_dense(0, MU),
    "nystrom without a shift": nystrom_dense(10, 0.0),
    "cholesky": cholesky_dense("greedy"),
    "rp-cholesky": cholesky_dense("random"),
    "diagonal": lambda A: (linalg.diagonal_preconditioner(A, MU), torch.diag(A.diagonal() + MU)),
    "diagonal given": lambda A: (linalg.diagonal_preconditioner(A.diagonal(), MU), torch.diag(A.diagonal() + MU)),
    "blocks": lambda A: (linalg.block_jacobi(A, 7, MU), blocks_of(A, torch.arange(N).split(7)) + MU * EYE),
    "blocks by sets": lambda A: (
        linalg.block_jacobi(A, SHUFFLED.split([20, 60, 20, 20]), MU),
        blocks_of(A, SHUFFLED.split([20, 60, 20, 20])) + MU * EYE,
    ),
    "tensor": lambda A: (linalg.as_preconditioner(A + MU * EYE), A + MU * EYE),
    "Dense": lambda A: (linalg.as_preconditioner(linalg.Dense(A + MU * EYE, psd=True)), A + MU * EYE),
    "Kronecker": lambda A: structured(),
    "DirectSum": lambda A: by_layers(),
    "LowRank": lambda A: woodbury(),
    "Diagonal": lambda A: (linalg.as_preconditioner(linalg.Diagonal(uniform(N))), uniform(N).diag()),
}


@pytest.mark.parametrize("name", MADE)
def test_identities_against_the_dense_matrix(name):
    P, dense = MADE[name](decaying())
    assert isinstance(P, linalg.FactoredPreconditioner)
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
@pytest.mark.parametrize("level", [1e-4, 3.0])
def test_the_floor_is_a_bound(name, level):
    A = decaying()
    P, _ = MADE[name](A)
    whitened = P.sqrt_inverse(P.sqrt_inverse(A + level * EYE).mT)
    assert 0 < P.floor(level) <= torch.linalg.eigvalsh(whitened)[0] * (1 + 1e-10)


# Blocks and diagonals.


@pytest.mark.parametrize("wrap", [DenseLinearOperator, Counted, linalg.Dense])
def test_blocks_of_an_operator_by_its_products(wrap):
    A, sets = decaying(), [3, 50, 50, 17]
    P, expected = linalg.block_jacobi(wrap(A), sets, MU), linalg.block_jacobi(A, sets, MU)
    torch.testing.assert_close(P @ EYE, expected @ EYE, rtol=1e-10, atol=1e-10)
    assert P.matvecs == N and expected.matvecs == 0
    parts = linalg.DirectSum(*[linalg.Diagonal(torch.ones(40))] * 3, positions=SHUFFLED.split(40)).partition
    by_partition = linalg.block_jacobi(A, parts, MU)
    torch.testing.assert_close(by_partition @ EYE, linalg.block_jacobi(A, SHUFFLED.split(40), MU) @ EYE)


def test_diagonal_of_an_operator():
    A = decaying()
    for operator, matvecs in (
        (linalg.Dense(A), 0),
        (linalg.Dense(A) @ linalg.Dense(EYE), N),
        (linalg.Dense(A).add_diagonal(0.0), 0),
    ):
        P = linalg.diagonal_preconditioner(operator, MU)
        torch.testing.assert_close(P.entries, A.diagonal() + MU)
        assert P.matvecs == matvecs


# Any operator.


def test_what_has_no_closed_form_is_an_error():
    with pytest.raises(TypeError, match="nystrom"):
        linalg.as_preconditioner(linalg.Dense(decaying()) @ linalg.Dense(EYE))
    with pytest.raises(TypeError, match="nystrom"):
        linalg.as_preconditioner(DenseLinearOperator(EYE))
    with pytest.raises(TypeError, match=r"add_diagonal\(shift\)"):
        linalg.as_preconditioner(linalg.LowRank(random(9, 2), uniform(2)))
    with pytest.raises(TypeError):
        linalg.as_preconditioner("kfac")
    with pytest.raises(NotPSDError):
        linalg.as_preconditioner(linalg.Diagonal(torch.tensor([1.0, -1.0])))
    with pytest.raises(NotPSDError):
        linalg.as_preconditioner(torch.diag(torch.tensor([1.0, -1.0])))
    P = linalg.diagonal_preconditioner(EYE)
    assert linalg.as_preconditioner(P) is P


@pytest.mark.parametrize("n", [1, 2])
def test_smallest_sizes(n):
    A = 4 * torch.eye(n, dtype=torch.float64)
    made = [
        linalg.nystrom(A, 5, shift=1.0, generator=generator()).preconditioner(),
        linalg.cholesky(A, 5, shift=1.0).preconditioner(),
        linalg.cholesky(A, 5, shift=1.0, pivoting="random", generator=generator()).preconditioner(),
        linalg.block_jacobi(A, 5, 1.0),
        linalg.diagonal_preconditioner(A, 1.0),
        linalg.as_preconditioner(A + torch.eye(n)),
    ]
    for P in made:
        x = linalg.cg(A + torch.eye(n), torch.ones(n).double(), preconditioner=P)
        assert x.accepted and x.iterations <= 1
        assert 0 < P.floor(1.0) <= 5.0 / P.bounds()[0]


# The log-determinant with a preconditioner of one's own, with one that it makes, and without.

GIVEN = ["nystrom", "cholesky", "rp-cholesky", "diagonal", "blocks", "tensor", "auto", None]


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [(name, *row) for name, row in zip(GIVEN, [("shift", torch.float32), ("lower_bound", torch.float64)] * 4)],
)
def test_logdet(name, kind, dtype):
    values = SPECTRA["decaying"]
    A, exact = decaying(dtype), (values + MU).log().sum()
    P = MADE[name](A)[0] if name in MADE else name
    system = A + MU * EYE.to(dtype) if kind == "lower_bound" else A
    e = linalg.logdet(system, **{kind: MU}, preconditioner=P, max_matvecs=110, generator=generator())
    low, high = e.interval(0.999)
    assert low <= exact <= high and e.matvecs <= 110
    assert 0 < e.stderr < 0.1 * exact.abs()


@pytest.mark.parametrize("name", ["cholesky", "blocks", "Diagonal"])
def test_logdet_bracket_holds_for_each_probe(name):
    # Of a diagonal matrix random signs know the trace of any function exactly: what is left is the depth alone.
    A = SPECTRA["decaying"].diag()
    P, _ = MADE[name](A)
    exact = (SPECTRA["decaying"] + MU).log().sum()
    for budget in (12, 24, 48):
        e = linalg.logdet(A, shift=MU, preconditioner=P, max_matvecs=budget, generator=generator())
        assert (e.value - exact).abs() <= e.bias_bound + 1e-8 * exact.abs()
