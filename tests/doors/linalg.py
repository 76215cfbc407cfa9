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
    method_for,
    minres,
    nystrom,
    solve,
    spectral_density,
    spectral_quadrature,
    svds,
    trace,
)
from curvops.linalg.core import vectors
from curvops.linalg.core.partition import partition
from curvops.linalg.core.results import Estimate
from curvops.linalg.operators.nearest_kronecker import nearest_kronecker
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
ESTIMATE = Estimate(torch.tensor(10.0), torch.tensor(1.0), 3, 5, 0.0)
OUT_OF_RANGE = r"out of range|indices for an operator"
NO_OPERATORS = {
    "0.5": 0.5,
    "1": 1,
    "a 0-d tensor": torch.tensor(0.5),
    "a vector": torch.ones(N, dtype=torch.float64),
}
SUMS = {
    "A +": lambda A, other: A + other,
    "A + on the right of": lambda A, other: other + A,
    "A −": lambda A, other: A - other,
    "(A + A) +": lambda A, other: (A + A) + other,
}

DOORS = [
    Door(
        "a matrix",
        rows={
            "a stack of matrices": (lambda: vectors.describe(torch.ones(2, 3, 4)), ValueError, "single matrix"),
            "whole numbers": (lambda: vectors.describe(torch.ones(2, 2, dtype=torch.int64)), TypeError, "floating"),
            "not square": (lambda: vectors.describe_square(torch.ones(2, 3)), ValueError, "2 x 3"),
        },
    ),
    Door(
        "a function as A",
        rows={
            "no size": (
                lambda: trace(lambda V: V),
                TypeError,
                r"does not tell the size.*as_operator\(function, like=v",
            ),
            "no transpose": (lambda: lsmr(lambda V: V, B), TypeError, "lsmr for example, needs products with Aᵀ"),
            "of vectors": (
                lambda: cg(lambda v: B * v, B[:, None]),
                ValueError,
                r"a tensor \(4, 1\) .* to a tensor \(4, 1\) .*, got \(4, 4\) .*given what B, or like, is: vectors",
            ),
            "of arrays": (lambda: cg(lambda V: V.numpy(), B), ValueError, "got a ndarray"),
            "another dtype": (lambda: cg(lambda V: V.float(), B), ValueError, "float64 to a tensor .* got .*float32"),
            "b of NumPy": (lambda: cg(lambda V: V, np.ones(4)), TypeError, r"tensor, B or like, got ndarray"),
            "a class": (lambda: cg(Dense, B), TypeError, "A must be a tensor"),
            "a module": (lambda: cg(torch.nn.Linear(4, 4), B), TypeError, "A must be a tensor"),
            "a SciPy operator without rmatvec": (
                lambda: lsmr(LinearOperator((4, 4), matvec=lambda v: v, dtype=float), B),
                TypeError,
                "rmatvec",
            ),
            "a complex one": (lambda: cg(aslinearoperator(1j * np.eye(4)), B), TypeError, "real .* complex128"),
            "a sparse array": (lambda: cg(csr_array(np.eye(4)), B), TypeError, "aslinearoperator"),
        },
    ),
    Door(
        "cg",
        rows={
            "ones(3, 2), ones(3)": (lambda: cg(torch.ones(3, 2), torch.ones(3)), ValueError, "3 x 2"),
            "eye(3), ones(4)": (lambda: cg(torch.eye(3), torch.ones(4)), ValueError, r"\(4,\)"),
            "eye(3), ones(3, 1, 1)": (lambda: cg(torch.eye(3), torch.ones(3, 1, 1)), ValueError, "shape"),
            "eye(3), ones(3).double()": (lambda: cg(torch.eye(3), torch.ones(3).double()), TypeError, "float64"),
            "eye(3), ones(3).long()": (lambda: cg(torch.eye(3), torch.ones(3).long()), TypeError, "int64"),
            "rtol=-1.0": (lambda: cg(torch.eye(3), torch.ones(3), rtol=-1.0), ValueError, "negative"),
            "rtol=math.nan": (
                lambda: cg(torch.eye(3), torch.ones(3), rtol=math.nan),
                ValueError,
                "nan",
            ),
            "maxiter=-1": (
                lambda: cg(torch.eye(3), torch.ones(3), maxiter=-1),
                ValueError,
                "negative",
            ),
            "keep_directions=-1": (
                lambda: cg(torch.eye(3), torch.ones(3), keep_directions=-1),
                ValueError,
                "keep_directions",
            ),
            "keep_directions=2.5": (
                lambda: cg(torch.eye(3), torch.ones(3), keep_directions=2.5),
                TypeError,
                "keep_directions",
            ),  # type: ignore[arg-type]
            "x0=ones(3, 1)": (
                lambda: cg(torch.eye(3), torch.ones(3), x0=torch.ones(3, 1)),
                ValueError,
                "x0",
            ),
            "x0=ones(3).double()": (
                lambda: cg(torch.eye(3), torch.ones(3), x0=torch.ones(3).double()),
                TypeError,
                "x0",
            ),
            "eye(3), ones(3, device=meta)": (
                lambda: cg(torch.eye(3), torch.ones(3, device="meta")),
                ValueError,
                "device",
            ),
            "a sketch as preconditioner": (
                lambda: cg(torch.eye(3), torch.ones(3), preconditioner=nystrom(torch.eye(3), rank=2)),
                TypeError,
                "a Nystrom approximates A, and a preconditioner must approximate its inverse: pass the result of",
            ),
            "bfloat16": (
                lambda: cg(torch.eye(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
                TypeError,
                r"too coarse.*op\.to\(torch\.float32\)",
            ),
            "float16": (
                lambda: cg(torch.eye(3, dtype=torch.float16), torch.ones(3, dtype=torch.float16)),
                TypeError,
                r"too coarse.*op\.to\(torch\.float32\)",
            ),
        },
    ),
    Door(
        "minres",
        rows={
            "ones(3, 2), ones(3)": (lambda: minres(torch.ones(3, 2), torch.ones(3)), ValueError, "3 x 2"),
            "eye(3), ones(4)": (lambda: minres(torch.eye(3), torch.ones(4)), ValueError, r"\(3,\)"),
            "eye(3), ones(3).double()": (lambda: minres(torch.eye(3), torch.ones(3).double()), TypeError, "float64"),
            "memory_budget=-1": (
                lambda: minres(torch.eye(3), torch.ones(3), memory_budget=-1),
                ValueError,
                "memory_budget",
            ),
            "eye(3, bfloat16), ones(3, bfloat16)": (
                lambda: minres(torch.eye(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
                TypeError,
                "float32",
            ),
        },
    ),
    Door(
        "lsmr",
        rows={
            "ones(3)": (lambda: lsmr(torch.ones(4, 3), torch.ones(3)), ValueError, r"\(4,\)"),
            "damp=-1.0": (lambda: lsmr(torch.ones(4, 3), torch.ones(4), damp=-1.0), ValueError, "damp"),
            "x0=ones(4)": (lambda: lsmr(torch.ones(4, 3), torch.ones(4), x0=torch.ones(4)), ValueError, "x0"),
            "ones(4).double()": (lambda: lsmr(torch.ones(4, 3), torch.ones(4).double()), TypeError, "float64"),
            "lsmr(zeros(4, 0).double(), ones(4).double())": (
                lambda: lsmr(torch.zeros(4, 0).double(), torch.ones(4).double()),
                ValueError,
                "at least one row and one column",
            ),
        },
    ),
    Door(
        "dual_descent",
        rows={
            "momentum": (
                lambda: dual_descent(POSITIVE, torch.ones(N).double(), momentum=1.0),
                ValueError,
                "dual_descent needs",
            ),
            "batch size": (
                lambda: dual_descent(POSITIVE, torch.ones(N).double(), batch_size=0),
                ValueError,
                "dual_descent needs",
            ),
            "noise": (
                lambda: dual_descent(POSITIVE, torch.ones(N).double(), noise=-1.0),
                ValueError,
                "dual_descent needs",
            ),
            "step size": (
                lambda: dual_descent(POSITIVE, torch.ones(N).double(), step_size=0.0),
                ValueError,
                "dual_descent needs",
            ),
        },
    ),
    Door(
        "solve",
        rows={
            "method": (lambda: solve(POSITIVE, POSITIVE, method="gmres"), ValueError, "method"),
            "another length": (lambda: solve(POSITIVE, torch.ones(4).double()), ValueError, "cannot be solved"),
            "no closed form": (
                lambda: solve(Known(POSITIVE), POSITIVE, method="closed form"),
                ValueError,
                "closed form",
            ),
            "float16": (lambda: solve(torch.eye(4).half(), torch.ones(4).half()), TypeError, "torch.float16"),
            "bfloat16": (lambda: solve(torch.eye(4).bfloat16(), torch.ones(4).bfloat16()), TypeError, "torch.bfloat16"),
            "int64": (lambda: solve(torch.eye(4).long(), torch.ones(4).long()), TypeError, "torch.int64"),
            "complex128": (
                lambda: solve(torch.eye(4).cdouble(), torch.ones(4).cdouble()),
                TypeError,
                "torch.complex128",
            ),
            "two dtypes": (
                lambda: solve(torch.eye(4), torch.ones(4).double()),
                TypeError,
                "one real floating-point dtype",
            ),
        },
    ),
    Door(
        "nystrom",
        rows={
            "indefinite": (lambda: nystrom(-torch.eye(5), 3), NotPSDError, "add_diagonal"),
            "rank=-1": (lambda: nystrom(torch.eye(4), rank=-1), ValueError, "at least 0"),
            "shift=-1.0": (lambda: nystrom(torch.eye(4), shift=-1.0), ValueError, "negative"),
            "rhs=-1": (lambda: nystrom(torch.eye(4), rhs=-1), ValueError, "negative"),
            "max_rank=-2": (lambda: nystrom(torch.eye(4), max_rank=-2), ValueError, "at least 0"),
            "no shift": (lambda: nystrom(torch.ones(4, 4), 2).preconditioner(0.0), ValueError, "positive shift"),
            "NaN": (lambda: nystrom(torch.full((4, 4), math.nan), 2), ValueError, "NaN"),
        },
    ),
    Door(
        "cholesky",
        rows={
            "NaN": (lambda: cholesky(torch.full((4, 4), math.nan), 2), ValueError, "NaN"),
            "infinite": (lambda: cholesky(torch.full((4, 4), math.inf), 2), ValueError, "NaN"),
            "NaN below the diagonal": (
                lambda: cholesky(torch.tensor([[1, 0, 0], [0, 1, 0], [math.nan, 0, 1]]), 2),
                ValueError,
                "NaN",
            ),
            "another diagonal": (
                lambda: cholesky(POSITIVE, 5, diagonal=2 * POSITIVE.diagonal()),
                ValueError,
                "exact diagonal",
            ),
            "a short diagonal": (
                lambda: cholesky(POSITIVE, 5, diagonal=torch.ones(3).double()),
                ValueError,
                r"shape \(300,\)",
            ),
            "rank=-1": (lambda: cholesky(torch.eye(4), rank=-1), ValueError, "at least 0"),
            "half a rank": (lambda: cholesky(torch.eye(4), rank=0.5), TypeError, "whole number"),
            "no shift": (lambda: cholesky(torch.eye(4), shift=None), TypeError, "shift must be a number"),
            "a word for the diagonal": (lambda: cholesky(torch.eye(4), 2, diagonal="x"), TypeError, "diagonal must be"),
            "shift=-1.0": (lambda: cholesky(torch.eye(4), shift=-1.0), ValueError, "not negative"),
            "shift=nan": (lambda: cholesky(torch.eye(4), shift=math.nan), ValueError, "not negative"),
            "rtol=-0.1": (lambda: cholesky(torch.eye(4), rtol=-0.1), ValueError, "not negative"),
            "not square": (lambda: cholesky(torch.ones(3, 2), 1), ValueError, "square"),
        },
    ),
    Door(
        "block_jacobi and diagonal_preconditioner",
        rows={
            "an indefinite block": (
                lambda: block_jacobi(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), 2),
                NotPSDError,
                "larger shift",
            ),
            "a zero on the diagonal": (
                lambda: diagonal_preconditioner(torch.diag(torch.tensor([1.0, 0.0]))),
                NotPSDError,
                "entry 1",
            ),
            "a zero block": (lambda: block_jacobi(torch.zeros(4, 4), 2), NotPSDError, "starts at position 0"),
            "a zero diagonal": (lambda: diagonal_preconditioner(torch.zeros(4, 4)), NotPSDError, "not positive"),
            "NaN in a block": (lambda: block_jacobi(torch.full((4, 4), math.nan), 2), ValueError, "NaN"),
            "NaN on the diagonal": (lambda: diagonal_preconditioner(torch.zeros(4, 4) + math.nan), ValueError, "NaN"),
            "shift=-1.0 of blocks": (lambda: block_jacobi(torch.zeros(4, 4), 2, -1.0), ValueError, "shift"),
            "shift=-1.0 of a diagonal": (lambda: diagonal_preconditioner(torch.zeros(4, 4), -1.0), ValueError, "shift"),
            "shift=nan of blocks": (lambda: block_jacobi(torch.zeros(4, 4), 2, math.nan), ValueError, "shift"),
            "shift=nan of a diagonal": (
                lambda: diagonal_preconditioner(torch.zeros(4, 4), math.nan),
                ValueError,
                "shift",
            ),
            "blocks of another length": (lambda: block_jacobi(torch.eye(4), [2, 3]), ValueError, "block|position"),
            "blocks of 0": (lambda: block_jacobi(torch.eye(4), 0), ValueError, "block|position"),
            "a position twice": (
                lambda: block_jacobi(torch.eye(4), [torch.tensor([0, 0, 1, 2])]),
                ValueError,
                "block|position",
            ),
            "no blocks": (lambda: block_jacobi(torch.eye(4), []), ValueError, "block|position"),
            "memory_budget=10": (lambda: block_jacobi(torch.eye(4), 4, memory_budget=10), ValueError, "memory_budget"),
        },
    ),
    Door(
        "low_rank",
        rows={
            "rank=0": (lambda: low_rank(positive(1, 9)[0], rank=0), ValueError, "rank must lie between 1 and the 9"),
            "rank=10": (lambda: low_rank(positive(1, 9)[0], rank=10), ValueError, "rank must lie between 1 and the 9"),
            "rtol=0.0": (lambda: low_rank(positive(1, 9)[0], rtol=0.0), ValueError, "rtol"),
            "rtol=1.5": (lambda: low_rank(positive(1, 9)[0], rtol=1.5), ValueError, "rtol"),
            "rank=3, method=svd": (lambda: low_rank(positive(1, 9)[0], rank=3, method="svd"), ValueError, "method"),
            "rank=3, memory_budget=100": (
                lambda: low_rank(positive(1, 9)[0], rank=3, memory_budget=100),
                ValueError,
                "memory_budget",
            ),
        },
    ),
    Door(
        "lanczos",
        rows={
            "steps=0": (lambda: lanczos(torch.eye(4), steps=0), ValueError, "at least 1"),
            "steps=2, start=zeros(4)": (
                lambda: lanczos(torch.eye(4), steps=2, start=torch.zeros(4)),
                ValueError,
                "not zero",
            ),
            "steps=2, start=ones(5)": (
                lambda: lanczos(torch.eye(4), steps=2, start=torch.ones(5)),
                ValueError,
                r"\(5,\)",
            ),
            "steps=2, start=ones(4).double()": (
                lambda: lanczos(torch.eye(4), steps=2, start=torch.ones(4).double()),
                ValueError,
                "float64",
            ),
            "steps=2, start=tensor([1.0, math.nan, 0, 0])": (
                lambda: lanczos(torch.eye(4), steps=2, start=torch.tensor([1.0, math.nan, 0, 0])),
                ValueError,
                "finite",
            ),
        },
    ),
    Door(
        "eigsh",
        rows={
            "eye(4), 0": (lambda: eigsh(torch.eye(4), 0), ValueError, "between 1 and the 4"),
            "eye(4), 5": (lambda: eigsh(torch.eye(4), 5), ValueError, "between 1 and the 4"),
            "ones(4, 3), 1": (lambda: eigsh(torch.ones(4, 3), 1), ValueError, "square"),
            "which=top": (lambda: eigsh(torch.eye(4), 1, "top"), ValueError, "'LM', 'LA', 'SA', 'BE', got 'top'"),
            "which=[]": (lambda: eigsh(torch.eye(4), 1, []), ValueError, "which must be one of"),
            "which=largest": (lambda: eigsh(torch.eye(4), 1, "largest"), ValueError, 'pass which="LA"'),
            "which=smallest": (lambda: eigsh(torch.eye(4), 1, "smallest"), ValueError, 'pass which="SA"'),
            "which=both": (lambda: eigsh(torch.eye(4), 1, "both"), ValueError, 'pass which="BE"'),
            "which=magnitude": (lambda: eigsh(torch.eye(4), 1, "magnitude"), ValueError, 'pass which="LM"'),
            "which=SM": (lambda: eigsh(torch.eye(4), 1, "SM"), ValueError, "pass sigma=0"),
            "which=interior": (lambda: eigsh(torch.eye(4), 1, which="interior"), ValueError, "sigma"),
            "sigma=1.0, which=SA": (lambda: eigsh(torch.eye(4), 1, "SA", sigma=1.0), ValueError, "nearest to it"),
            "rtol=-1.0": (lambda: eigsh(torch.eye(4), 1, rtol=-1.0), ValueError, "rtol"),
            "maxiter=-1": (lambda: eigsh(torch.eye(4), 1, maxiter=-1), ValueError, "maxiter"),
            "block_size=0": (lambda: eigsh(torch.eye(4), 1, block_size=0), ValueError, "block_size"),
            "max_matvecs=6": (lambda: eigsh(torch.eye(9), 3, max_matvecs=6), ValueError, "at least 8"),
            "memory_budget=100": (
                lambda: eigsh(torch.eye(9), 3, memory_budget=100),
                ValueError,
                "at least 324",
            ),
            "start=zeros(9, 2)": (
                lambda: eigsh(torch.eye(9), 3, start=torch.zeros(9, 2)),
                ValueError,
                "not zero",
            ),
            "start=ones(8, 2)": (
                lambda: eigsh(torch.eye(9), 3, start=torch.ones(8, 2)),
                ValueError,
                r"\(9, b\)",
            ),
        },
    ),
    Door(
        "svds",
        rows={
            "0": (lambda: svds(torch.ones(3, 5), 0), ValueError, "between 1 and the 3"),
            "4": (lambda: svds(torch.ones(3, 5), 4), ValueError, "between 1 and the 3"),
            "1, which=both": (lambda: svds(torch.ones(3, 5), 1, which="both"), ValueError, "'LM', 'SM', got 'both'"),
            "1, which=largest": (lambda: svds(torch.ones(3, 5), 1, "largest"), ValueError, "'LM', 'SM'"),
            "1, rtol=-1": (lambda: svds(torch.ones(3, 5), 1, rtol=-1), ValueError, "rtol"),
            "1, maxiter=-1": (lambda: svds(torch.ones(3, 5), 1, maxiter=-1), ValueError, "maxiter"),
            "1, block_size=0": (lambda: svds(torch.ones(3, 5), 1, block_size=0), ValueError, "block_size"),
            "1, max_matvecs=3": (lambda: svds(torch.ones(3, 5), 1, max_matvecs=3), ValueError, "at least 8"),
            "1, memory_budget=10": (lambda: svds(torch.ones(3, 5), 1, memory_budget=10), ValueError, "at least"),
        },
    ),
    Door(
        "apply_function",
        rows={
            "ones(5)": (lambda: apply_function(torch.eye(4), torch.sqrt, torch.ones(5)), ValueError, r"\(4,\)"),
            "ones(4).double()": (
                lambda: apply_function(torch.eye(4), torch.sqrt, torch.ones(4).double()),
                TypeError,
                "float64",
            ),
            "rtol=-1.0": (
                lambda: apply_function(torch.eye(4), torch.sqrt, torch.ones(4), rtol=-1.0),
                ValueError,
                "rtol",
            ),
            "maxiter=-1": (
                lambda: apply_function(torch.eye(4), torch.sqrt, torch.ones(4), maxiter=-1),
                ValueError,
                "maxiter",
            ),
            "max_matvecs=-1": (
                lambda: apply_function(torch.eye(4), torch.sqrt, torch.ones(4), max_matvecs=-1),
                ValueError,
                "max_matvecs",
            ),
            "a function that sums": (
                lambda: apply_function(torch.eye(4), lambda x: x.sum(), torch.ones(4)),
                ValueError,
                "shape",
            ),
        },
    ),
    Door(
        "trace",
        rows={
            "method": (lambda: trace(torch.eye(300), method="guess"), ValueError, "'hutchinson', 'exact'"),
            "few products of xtrace": (
                lambda: trace(torch.eye(300), method="xtrace", max_matvecs=4 - 1),
                ValueError,
                "at least 4",
            ),
            "few products of xnystrace": (
                lambda: trace(torch.eye(300), method="xnystrace", max_matvecs=2 - 1),
                ValueError,
                "at least 2",
            ),
            "few products of hutch++": (
                lambda: trace(torch.eye(300), method="hutch++", max_matvecs=6 - 1),
                ValueError,
                "at least 6",
            ),
            "few products of hutchinson": (
                lambda: trace(torch.eye(300), method="hutchinson", max_matvecs=2 - 1),
                ValueError,
                "at least 2",
            ),
            "rtol=0": (lambda: trace(torch.eye(300), rtol=0.0), ValueError, "positive"),
            "not square": (lambda: trace(torch.ones(2, 3)), ValueError, "square"),
            "indefinite": (
                lambda: trace(INDEFINITE, method="xnystrace", max_matvecs=50),
                NotPositiveSemidefiniteError,
                "xtrace",
            ),
        },
    ),
    Door(
        "diagonal",
        rows={
            "method": (
                lambda: diagonal(torch.eye(300), method="guess"),
                ValueError,
                "'xdiag', 'xnysdiag', 'bekas', 'exact'",
            ),
            "few products": (lambda: diagonal(torch.eye(300), max_matvecs=3), ValueError, "at least 4"),
            "indefinite": (
                lambda: diagonal(INDEFINITE, method="xnysdiag", max_matvecs=50),
                NotPositiveSemidefiniteError,
                "xdiag",
            ),
        },
    ),
    Door(
        "frobenius_norm",
        rows={
            "method": (
                lambda: frobenius_norm(torch.eye(300), method="guess"),
                ValueError,
                "'xtrace', 'hutchinson', 'exact'",
            ),
            "not square": (lambda: frobenius_norm(torch.ones(2, 300), method="xtrace"), ValueError, "square"),
            "few products": (lambda: frobenius_norm(torch.ones(2, 300), max_matvecs=1), ValueError, "at least 2"),
        },
    ),
    Door(
        "effective_dimension",
        rows={
            "0.0": (lambda: effective_dimension(torch.eye(4), 0.0), ValueError, "positive"),
            "-1.0": (lambda: effective_dimension(torch.eye(4), -1.0), ValueError, "positive"),
            "math.nan": (lambda: effective_dimension(torch.eye(4), math.nan), ValueError, "positive"),
            "ones(3)": (lambda: effective_dimension(torch.eye(4), torch.ones(3)), ValueError, "vector"),
            "1.0, rtol=0.0": (lambda: effective_dimension(torch.eye(4), 1.0, rtol=0.0), ValueError, "rtol"),
            "1.0, max_matvecs=1": (
                lambda: effective_dimension(torch.eye(4), 1.0, max_matvecs=1),
                ValueError,
                "at least 4",
            ),
        },
    ),
    Door(
        "logdet",
        rows={
            "shift=-1.0": (lambda: logdet(torch.eye(4), shift=-1.0), ValueError, "must be"),
            "shift=nan": (lambda: logdet(torch.eye(4), shift=math.nan), ValueError, "must be"),
            "lower_bound=-1.0": (lambda: logdet(torch.eye(4), lower_bound=-1.0), ValueError, "must be"),
            "another preconditioner": (lambda: logdet(torch.eye(4), preconditioner="kfac"), ValueError, "must be"),
            "a matrix as preconditioner": (
                lambda: logdet(POSITIVE, shift=1.0, preconditioner=POSITIVE),
                TypeError,
                "with a root",
            ),
            "another preconditioner of a large matrix": (
                lambda: logdet(POSITIVE, shift=1.0, preconditioner="kfac"),
                ValueError,
                '"auto"',
            ),
            "rtol=0.0": (lambda: logdet(torch.eye(4), rtol=0.0), ValueError, "rtol"),
            "a matrix of shifts": (lambda: logdet(torch.eye(4), shift=torch.ones(2, 2)), ValueError, r"\(m,\)"),
            "a grid with a gradient": (
                lambda: logdet(torch.eye(3), shift=torch.ones(2, requires_grad=True)),
                ValueError,
                "add_diagonal",
            ),
            "large without a bound": (lambda: logdet(torch.eye(300)), ValueError, "max_matvecs >= 300"),
            "no room": (
                lambda: logdet(torch.eye(300), max_matvecs=300, memory_budget=10_000),
                ValueError,
                "memory_budget >= 1440000 bytes",
            ),
        },
    ),
    Door(
        "spectral_quadrature",
        rows={
            "shift=0.0": (lambda: spectral_quadrature(torch.eye(4), shift=0.0), ValueError, "positive"),
            "shift=-1": (lambda: spectral_quadrature(torch.eye(4), shift=-1), ValueError, "positive"),
            "shift=1.0, max_matvecs=3": (
                lambda: spectral_quadrature(torch.eye(4), shift=1.0, max_matvecs=3),
                ValueError,
                "at least 4",
            ),
        },
    ),
    Door(
        "spectral_density",
        rows={
            "scale=sqrt": (
                lambda: spectral_density(torch.diag(torch.arange(4.0)), scale="sqrt"),
                (ValueError, TypeError),
                "scale",
            ),
            "probes=0": (
                lambda: spectral_density(torch.diag(torch.arange(4.0)), probes=0),
                (ValueError, TypeError),
                "probes",
            ),
            "steps=0": (
                lambda: spectral_density(torch.diag(torch.arange(4.0)), steps=0),
                (ValueError, TypeError),
                "steps",
            ),
            "grid_size=3": (
                lambda: spectral_density(torch.diag(torch.arange(4.0)), grid_size=3),
                (ValueError, TypeError),
                "grid_size",
            ),
            "bandwidth=-1.0": (
                lambda: spectral_density(torch.diag(torch.arange(4.0)), bandwidth=-1.0),
                (ValueError, TypeError),
                "bandwidth",
            ),
            "bandwidth=1e-09": (
                lambda: spectral_density(torch.diag(torch.arange(4.0)), bandwidth=1e-09),
                (ValueError, TypeError),
                "grid_size >=",
            ),
            "level=1.0": (
                lambda: spectral_density(torch.diag(torch.arange(4.0)), level=1.0),
                (ValueError, TypeError),
                "level",
            ),
            "NaN": (lambda: spectral_density(torch.full((9, 9), math.nan)), ValueError, "NaN"),
        },
    ),
    Door(
        "Estimate.interval",
        rows={
            "level=0.0": (lambda: ESTIMATE.interval(0.0), ValueError, "between 0 and 1"),
            "level=1.0": (lambda: ESTIMATE.interval(1.0), ValueError, "between 0 and 1"),
            "level=95.0": (lambda: ESTIMATE.interval(95.0), ValueError, "between 0 and 1"),
        },
    ),
    Door(
        "an operator",
        rows={
            **{
                f"{name} {kind}": (lambda add=add, other=other: add(A, other), TypeError, "add_diagonal")
                for kind, other in NO_OPERATORS.items()
                for name, add in SUMS.items()
            },
            "a product with a short vector": (
                lambda: A @ torch.ones(3, dtype=torch.float64),
                ValueError,
                "cannot multiply",
            ),
            "a product in another dtype": (lambda: A @ torch.ones(N), ValueError, "float32"),
            "a sum of two sizes": (lambda: A + torch.ones(3, 3, dtype=torch.float64), ValueError, "cannot add"),
            "a short diagonal": (lambda: A.add_diagonal(torch.ones(3)), ValueError, "entries"),
            "a diagonal of some rows": (lambda: A[:3].add_diagonal(1.0), ValueError, "square"),
            "an index too large": (lambda: A[N], IndexError, OUT_OF_RANGE),
            "an index too small": (lambda: A[-N - 1], IndexError, OUT_OF_RANGE),
            "a column out of range": (lambda: A[0, N], IndexError, OUT_OF_RANGE),
            "three indices": (lambda: A[0, 1, 2], IndexError, OUT_OF_RANGE),
            "three indices and dots": (lambda: A[..., 0, 1, 2], IndexError, OUT_OF_RANGE),
        },
    ),
    Door(
        "dense decompositions of what is large",
        rows={
            "eigh": (lambda: Dense(LARGE).eigh(), ValueError, r"eigsh\(k\)"),
            "eigvalsh": (lambda: Dense(LARGE).eigvalsh(), ValueError, r"eigsh\(k\)"),
            "symeig": (lambda: Dense(LARGE).diagonalization(method="symeig"), ValueError, r"eigsh\(k\)"),
            "svd of a tall one": (
                lambda: Known(torch.ones(300, 4), is_symmetric=False).svd(),
                ValueError,
                r"svds\(k\)",
            ),
            "svd of a wide one": (
                lambda: Known(torch.ones(4, 300), is_symmetric=False).svd(),
                ValueError,
                r"svds\(k\)",
            ),
        },
    ),
    Door(
        "partition",
        rows={
            "[range(3), range(2, 5)]": (lambda: partition([range(3), range(2, 5)]), ValueError, "disjoint"),
            "[range(3), range(4, 6)]": (lambda: partition([range(3), range(4, 6)]), ValueError, "disjoint"),
            "[tensor([0, 0])]": (lambda: partition([torch.tensor([0, 0])]), ValueError, "disjoint"),
            "[tensor([-1, 0])]": (lambda: partition([torch.tensor([-1, 0])]), ValueError, "disjoint"),
            "[tensor([0.0, 1.0])]": (lambda: partition([torch.tensor([0.0, 1.0])]), ValueError, "LongTensor"),
            "[tensor([[0, 1]])]": (lambda: partition([torch.tensor([[0, 1]])]), ValueError, "LongTensor"),
            "[range(0)]": (lambda: partition([range(0)]), ValueError, "non-empty"),
            "[range(0, 4, 2)]": (lambda: partition([range(0, 4, 2)]), ValueError, "step 1"),
            "[]": (lambda: partition([]), ValueError, "at least one"),
        },
    ),
    Door(
        "DirectSum",
        rows={
            "a longer set": (
                lambda: DirectSum(Diagonal(uniform(3)), positions=[range(4)]),
                ValueError,
                "block 0 has shape",
            ),
            "another number of sets": (
                lambda: DirectSum(Diagonal(uniform(3)), positions=[range(3), range(3, 4)]),
                ValueError,
                "as many sets",
            ),
            "a tensor": (lambda: DirectSum(uniform(3).diag(), positions=[range(3)]), TypeError, "Operator"),
        },
    ),
    Door(
        "Kronecker",
        rows={
            "numbers of factors": (
                lambda: Kronecker(positive(2, 3), positive(3, 3)),
                ValueError,
                "right must be.*the same g",
            ),
            "not square": (lambda: Kronecker(random(2, 3, 4), positive(2, 3)), ValueError, "left must be"),
            "a vector": (lambda: Kronecker(random(3), positive(3, 3)), ValueError, "left must be"),
            "columns": (lambda: Kronecker(positive(2, 3), random(2, 3, 1)), ValueError, "right must be"),
            "negative": (
                lambda: Kronecker(-positive(1, 3), positive(1, 3)).eigen(),
                NotPositiveSemidefiniteError,
                "left factor",
            ),
            "indefinite": (
                lambda: Kronecker(positive(1, 3) - 2 * torch.eye(3, dtype=torch.float64), positive(1, 3)).eigen(),
                NotPositiveSemidefiniteError,
                "left factor",
            ),
            "negative diagonal": (
                lambda: Kronecker(-uniform(1, 3), positive(1, 3)).eigen(),
                NotPositiveSemidefiniteError,
                "left factor",
            ),
            "nearest to factors of other sizes": (
                lambda: nearest_kronecker(
                    [Kronecker(positive(1, 2), positive(1, 3)), Kronecker(positive(1, 3), positive(1, 2))]
                ),
                ValueError,
                "differ in their sizes",
            ),
        },
    ),
    Door(
        "arguments of another kind",
        rows={
            "a word for a callback": (lambda: cg(MATRIX, B, callback="x"), TypeError, "callback must be a function"),
            "a number for a callback": (lambda: eigsh(MATRIX, 2, callback=1), TypeError, "callback must be a function"),
            "a word for a flag": (lambda: cg(MATRIX, B, block="yes"), TypeError, "block must be True or False"),
            "an array of refinements": (lambda: cg(MATRIX, B, refine=np.ones(3)), ValueError, "refine must be True"),
            "no shift": (lambda: minres(MATRIX, B, shift=None), TypeError, "shift must be a number"),
            "a shift that is no number": (
                lambda: minres(MATRIX, B, shift=math.nan),
                ValueError,
                "shift must be finite",
            ),
            "a word for a damping": (lambda: lsmr(MATRIX, B, damp="x"), TypeError, "damp must be a number"),
            "a tensor for a flag": (lambda: lsmr(MATRIX, B, consistent=B), TypeError, "consistent must be True"),
            "a vector to solve with": (lambda: solve(B, B), ValueError, "at least one row and one column"),
            "no matrix for a method": (lambda: method_for(None), TypeError, "A must be a tensor"),
            "a number to start from": (lambda: lanczos(MATRIX, 2, start=1.0), TypeError, "start must be a tensor"),
            "a word to start from": (lambda: eigsh(MATRIX, 2, start="x"), TypeError, "start must be a tensor"),
            "a word for a tolerance": (lambda: eigsh(MATRIX, 2, rtol="small"), TypeError, "rtol must be a number"),
            "words for the tolerance of triplets": (
                lambda: svds(MATRIX, 2, rtol="x"),
                TypeError,
                "rtol must be a number",
            ),
            "an infinite block": (lambda: eigsh(MATRIX, 2, block_size=math.inf), TypeError, "block_size must be"),
            "a word for a budget": (lambda: trace(MATRIX, max_matvecs="x"), TypeError, "max_matvecs must be a number"),
            "a word for memory": (lambda: low_rank(MATRIX, memory_budget="x"), TypeError, "memory_budget must be"),
            "a threshold that is no number": (
                lambda: spectral_density(MATRIX, threshold=math.nan),
                ValueError,
                "threshold must be finite",
            ),
            "a word for a bound": (
                lambda: apply_function(MATRIX, torch.exp, B, lower_bound="x"),
                TypeError,
                "lower_bound must be a number",
            ),
            "no blocks": (lambda: block_jacobi(MATRIX, None), TypeError, "blocks must be a size"),
            "a word to multiply by": (lambda: Dense(MATRIX, psd=True).solve(B, "x"), TypeError, "left_tensor must be"),
        },
    ),
]
