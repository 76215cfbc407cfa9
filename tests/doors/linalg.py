"""What the functions and operators of linalg refuse."""

import math

import numpy as np
import torch
from linear_operator.utils.errors import NotPSDError
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg import (
    Dense,
    Diagonal,
    DirectSum,
    Kronecker,
    apply_function,
    block_jacobi,
    cg,
    cholesky,
    diagonal,
    diagonal_preconditioner,
    dual_descent,
    effective_dimension,
    eigsh,
    frobenius_norm,
    lanczos,
    logdet,
    low_rank,
    lsmr,
    nystrom,
    solve,
    spectral_density,
    spectral_quadrature,
    svds,
    trace,
)
from curvops.linalg.core import vectors
from curvops.operators.curvatures import nearest_kronecker
from tests.doors.door import Door
from tests.linalg.known import Known, Rooted
from tests.linalg.matrices import symmetric
from tests.linalg.operands import positive, random, uniform

N = 300  # above the size that is factorised densely
INDEFINITE = symmetric(torch.linspace(-1, 1, 100).double())
POSITIVE = symmetric(torch.linspace(1, 3, N).double())


A = Rooted(POSITIVE)
MATRIX, B = torch.eye(4).double(), torch.ones(4).double()
LARGE = symmetric(torch.linspace(1, 2, 360).double())
OUT_OF_RANGE = r"out of range|indices for an operator"

DOORS = [
    Door(
        "a matrix",
        rows={
            "a stack of matrices": (lambda: vectors.describe(torch.ones(2, 3, 4)), "single matrix"),
            "whole numbers": (lambda: vectors.describe(torch.ones(2, 2, dtype=torch.int64)), TypeError, "floating"),
            "a sparse matrix": (lambda: eigsh(csr_array(np.eye(2)), 1), TypeError, r"aslinearoperator\(A\)"),
            "not square": (lambda: vectors.describe_square(torch.ones(2, 3)), "2 x 3"),
        },
    ),
    Door(
        "a function as A",
        rows={
            "no size": (lambda: trace(lambda V: V), TypeError, "the size of a function's matrix is unknown"),
            "no transpose": (
                lambda: lsmr(lambda V: V, B),
                TypeError,
                "lsmr for example, needs products with Aᵀ",
            ),
            "of vectors": (lambda: cg(lambda v: B * v, B[:, None]), r"must have shape \(4, 1\), got \(4, 4\)"),
            "another dtype": (
                lambda: cg(lambda V: V.float(), B),
                "is torch.float32 on cpu, but its argument torch.float64",
            ),
            "a SciPy operator without rmatvec": (
                lambda: lsmr(LinearOperator((4, 4), matvec=lambda v: v, dtype=float), B),
                TypeError,
                "rmatvec",
            ),
            "a complex one": (lambda: cg(aslinearoperator(1j * np.eye(4)), B), TypeError, "real .* complex128"),
        },
    ),
    Door(
        "cg",
        rows={
            "eye(3), ones(3, device=meta)": (lambda: cg(torch.eye(3), torch.ones(3, device="meta")), "device"),
            "a sketch as preconditioner": (
                lambda: cg(torch.eye(3), torch.ones(3), preconditioner=nystrom(torch.eye(3), rank=2)),
                TypeError,
                "a Nystrom approximates A, not A⁻¹: pass its preconditioner",
            ),
            "float16": (
                lambda: cg(torch.eye(3, dtype=torch.float16), torch.ones(3, dtype=torch.float16)),
                TypeError,
                r"too coarse.*op\.to\(torch\.float32\)",
            ),
        },
    ),
    Door(
        "lsmr",
        rows={
            "ones(3)": (lambda: lsmr(torch.ones(4, 3), torch.ones(3)), r"\(4,\)"),
            "x0=ones(4)": (lambda: lsmr(torch.ones(4, 3), torch.ones(4), x0=torch.ones(4)), "x0"),
            "ones(4).double()": (lambda: lsmr(torch.ones(4, 3), torch.ones(4).double()), TypeError, "float64"),
        },
    ),
    Door(
        "dual_descent",
        rows={"noise": (lambda: dual_descent(POSITIVE, torch.ones(N).double(), noise=-1.0), "noise must")},
    ),
    Door(
        "solve",
        rows={
            "another length": (lambda: solve(POSITIVE, torch.ones(4).double()), "cannot be solved"),
            "no closed form": (lambda: solve(Known(POSITIVE), POSITIVE, method="closed form"), "closed form"),
            "int64": (lambda: solve(torch.eye(4).long(), torch.ones(4).long()), TypeError, "torch.int64"),
        },
    ),
    Door(
        "nystrom",
        rows={
            "indefinite": (lambda: nystrom(-torch.eye(5), 3), NotPSDError, "add_diagonal"),
            "no shift": (lambda: nystrom(torch.ones(4, 4), 2).preconditioner(0.0), "positive shift"),
            "NaN": (lambda: nystrom(torch.full((4, 4), math.nan), 2), "NaN"),
        },
    ),
    Door(
        "cholesky",
        rows={
            "NaN": (lambda: cholesky(torch.full((4, 4), math.nan), 2), "NaN"),
            "NaN below the diagonal": (
                lambda: cholesky(torch.tensor([[1, 0, 0], [0, 1, 0], [math.nan, 0, 1]]), 2),
                "NaN",
            ),
            "another diagonal": (lambda: cholesky(POSITIVE, 5, diagonal=2 * POSITIVE.diagonal()), "exact diagonal"),
            "a short diagonal": (lambda: cholesky(POSITIVE, 5, diagonal=torch.ones(3).double()), r"shape \(300,\)"),
        },
    ),
    Door(
        "block_jacobi and diagonal_preconditioner",
        rows={
            "a zero block": (lambda: block_jacobi(torch.zeros(4, 4), 2), NotPSDError, "starts at position 0"),
            "a zero diagonal": (lambda: diagonal_preconditioner(torch.zeros(4, 4)), NotPSDError, "not positive"),
            "blocks of another length": (lambda: block_jacobi(torch.eye(4), [2, 3]), "block|position"),
            "a position twice": (lambda: block_jacobi(torch.eye(4), [torch.tensor([0, 0, 1, 2])]), "block|position"),
            "memory_budget=10": (lambda: block_jacobi(torch.eye(4), 4, memory_budget=10), "memory_budget"),
        },
    ),
    Door(
        "low_rank, spectra and functions of a matrix",
        rows={
            "low_rank in no memory": (
                lambda: low_rank(positive(1, 9)[0], rank=3, memory_budget=100),
                "memory_budget",
            ),
            "a longer start of lanczos": (
                lambda: lanczos(torch.eye(4), steps=2, start=torch.ones(5)),
                r"\(4,\), got \(5,\)",
            ),
            "which=SM": (lambda: eigsh(torch.eye(4), 1, "SM"), "pass sigma=0"),
            "sigma=1.0, which=SA": (lambda: eigsh(torch.eye(4), 1, "SA", sigma=1.0), "nearest to it"),
            "max_matvecs=6 of eigsh": (lambda: eigsh(torch.eye(9), 3, max_matvecs=6), "at least 8"),
            "memory_budget=100 of eigsh": (lambda: eigsh(torch.eye(9), 3, memory_budget=100), "at least 324"),
            "start=zeros(9, 2)": (lambda: eigsh(torch.eye(9), 3, start=torch.zeros(9, 2)), "not zero"),
            "start=ones(8, 2)": (lambda: eigsh(torch.eye(9), 3, start=torch.ones(8, 2)), r"\(9, b\)"),
            "max_matvecs=3 of svds": (lambda: svds(torch.ones(3, 5), 1, max_matvecs=3), "at least 8"),
            "a function that sums": (lambda: apply_function(torch.eye(4), lambda x: x.sum(), torch.ones(4)), "shape"),
            "eigh of a large matrix": (lambda: Dense(LARGE).eigh(), r"eigsh\(k\)"),
            "a narrow bandwidth": (
                lambda: spectral_density(torch.diag(torch.arange(4.0)), bandwidth=1e-09),
                (ValueError, TypeError),
                "grid_size >=",
            ),
            "spectral_density of NaN": (lambda: spectral_density(torch.full((9, 9), math.nan)), "NaN"),
        },
    ),
    Door(
        "estimators",
        rows={
            "a trace of an indefinite matrix": (
                lambda: trace(INDEFINITE, method="xnystrace", max_matvecs=50),
                NotPositiveSemidefiniteError,
                "xtrace",
            ),
            "a diagonal in few products": (lambda: diagonal(torch.eye(300), max_matvecs=3), "at least 4"),
            "a norm of a wide matrix": (lambda: frobenius_norm(torch.ones(2, 300), method="xtrace"), "square"),
            "a prior of zero": (lambda: effective_dimension(torch.eye(4), 0.0), "positive"),
            "a short prior": (lambda: effective_dimension(torch.eye(4), torch.ones(3)), "prior must have shape"),
            "shift=-1": (lambda: spectral_quadrature(torch.eye(4), shift=-1), "positive"),
        },
    ),
    Door(
        "logdet",
        rows={
            "a matrix as preconditioner": (
                lambda: logdet(POSITIVE, shift=1.0, preconditioner=POSITIVE),
                TypeError,
                r"as_preconditioner\(P\)",
            ),
            "a grid with a gradient": (
                lambda: logdet(torch.eye(3), shift=torch.ones(2, requires_grad=True)),
                "add_diagonal",
            ),
            "no room": (
                lambda: logdet(torch.eye(300), max_matvecs=300, memory_budget=10_000),
                "memory_budget >= 1440000 bytes",
            ),
        },
    ),
    Door(
        "an operator",
        rows={
            "a product with a short vector": (lambda: A @ torch.ones(3, dtype=torch.float64), "cannot multiply"),
            "a sum of two sizes": (lambda: A + torch.ones(3, 3, dtype=torch.float64), "cannot add"),
            "a short diagonal": (lambda: A.add_diagonal(torch.ones(3)), "entries"),
            "a diagonal of some rows": (lambda: A[:3].add_diagonal(1.0), "square"),
            "an index too large": (lambda: A[N], IndexError, OUT_OF_RANGE),
            "three indices": (lambda: A[0, 1, 2], IndexError, OUT_OF_RANGE),
            "a short mask": (lambda: A[B > 0], IndexError, "the mask has shape"),
        },
    ),
    Door(
        "DirectSum",
        rows={
            "a longer set": (lambda: DirectSum(Diagonal(uniform(3)), positions=[range(4)]), "block 0 must have shape"),
            "another number of sets": (
                lambda: DirectSum(Diagonal(uniform(3)), positions=[range(3), range(3, 4)]),
                "as many sets",
            ),
        },
    ),
    Door(
        "Kronecker",
        rows={
            "columns": (lambda: Kronecker(positive(2, 3), random(2, 3, 1)), "right must be"),
            "nearest to factors of other sizes": (
                lambda: nearest_kronecker(
                    [Kronecker(positive(1, 2), positive(1, 3)), Kronecker(positive(1, 3), positive(1, 2))]
                ),
                "differ in their sizes",
            ),
        },
    ),
    Door(
        "arguments of another kind",
        rows={
            "a vector to solve with": (lambda: solve(B, B), "at least one row and one column"),
        },
    ),
]
