"""linear_operator's own conformance suite: rectangular for every operator, square for positive definite ones.

Tests `contract.py`.
"""

import functools
import unittest

import pytest
import torch
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase

import curvops as co
from curvops.linalg import Dense, Diagonal, DirectSum, Kronecker, LowRank
from tests.randomness import perceptron


@functools.cache
def linearized(noise=None, points=6):
    """A network with 3 inputs, 2 hidden units and 2 outputs, D = 14, linearised once; Gaussian where noise is given."""
    model = perceptron(3, 2, 2, dtype=torch.float32)
    x = 2 * torch.randn(points, 3)
    if noise is None:
        return co.linearize(model, (x, torch.arange(points) % 2), "classification")
    likelihood = co.likelihoods.Gaussian(torch.tensor(noise, requires_grad=True))
    return co.linearize(model, (x, torch.randn(points, 2)), likelihood)


@functools.cache
def events():
    """The same network for independent events: Kronecker factors with distinct eigenvalues, none zero."""
    model = perceptron(3, 2, 2, dtype=torch.float32)
    return co.linearize(model, (torch.randn(40, 3), (torch.rand(40, 2) > 0.4).float()), co.likelihoods.Bernoulli())


def spd(n=7):
    root = torch.randn(n, n, generator=torch.Generator().manual_seed(1))
    return root @ root.mT / n + torch.eye(n)


def dense_with_graph(operator):
    """The dense matrix from unit vectors, attached to the tensors inside the operator."""
    unit = torch.eye(operator.shape[-1], dtype=operator.dtype)
    with torch.enable_grad():
        dense = operator._matmul(unit)
    return dense if dense.requires_grad or not operator.requires_grad else dense + 0 * operator._args[0].sum()


def low_rank(*values):
    values = values or (3.0, 2.0, 1.0)
    vectors = torch.linalg.qr(torch.randn(7, len(values), generator=torch.Generator().manual_seed(2))).Q
    return LowRank(vectors, torch.tensor(values))


def nearly_full_rank():
    """The suite differentiates eigh for its reference, which needs distinct eigenvalues: zero is one of them once."""
    return low_rank(3.1, 2.6, 2.1, 1.6, 1.1, 0.6)


def factor(g, m, seed):
    root = torch.randn(g, m, 2 * m, generator=torch.Generator().manual_seed(seed))
    return root @ root.mT / m


def kronecker():
    return Kronecker(factor(2, 2, 3), factor(2, 3, 4))


def block_diagonal(first=low_rank):
    positions = [torch.tensor([3, 1, 12, 0, 14, 5, 6]), torch.tensor([2, 4, 7]), torch.tensor([8, 9, 10, 11, 13, 15])]
    last = Kronecker(factor(1, 2, 3), factor(1, 3, 4))
    return DirectSum(first(), Diagonal(torch.linspace(0.5, 2, 3)), last, positions=positions)


def jacobian():
    return linearized().jacobian()


def ggn():
    return co.GGN(linearized())


def gaussian_ggn(points=6, noise=0.5):
    return co.GGN(linearized(noise, points))


def full_rank_ggn():
    """Distinct eigenvalues, as the suite needs: more data than parameters."""
    return gaussian_ggn(points=40, noise=10.0)


def operator(kind, **options):
    """An operator of the small network, its draws (if any) seeded."""
    if options.get("fisher") == "mc":
        options["generator"] = torch.Generator().manual_seed(0)
    return kind(linearized(), **options)


RECTANGULAR = {
    "empirical_fisher": lambda: operator(co.EmpiricalFisher),
    "gradients": lambda: linearized().gradients(),
    "hessian": lambda: operator(co.Hessian),
    "diagonal_ggn": lambda: operator(co.DiagonalGGN),
    "kfac": lambda: operator(co.KFAC),
    "ekfac": lambda: operator(co.EKFAC, fisher="mc"),
    "block_diagonal_ggn": lambda: operator(co.BlockDiagonal),
    "subnetwork": lambda: co.Subnetwork(ggn(), [1, 5, 9, 3]),
    "tangent_kernel": lambda: operator(co.TangentKernel),
    "jacobian": jacobian,
    "jacobian_transposed": lambda: jacobian().mT,
    "ggn": ggn,
    "sum": lambda: ggn() + spd(14),
    "scaled": lambda: ggn() * 2.0,
    "product": lambda: jacobian() @ ggn(),
    "sliced": lambda: ggn()[2:12, 4:13],
    "congruence": lambda: jacobian() @ ggn().add_diagonal(1.0).inverse() @ jacobian().mT,
    "low_rank": low_rank,
    "dense": lambda: Dense(torch.randn(4, 6, generator=torch.Generator().manual_seed(3))),
    "expanded": lambda: ggn().expand(3, 14, 14),
    "eigen_kronecker": lambda: kronecker().eigen(),
    "block_diagonal": block_diagonal,
}

SQUARE = {
    "damped_diagonal_ggn": lambda: operator(co.DiagonalGGN).add_diagonal(torch.linspace(0.5, 2, 14)),
    "damped_kfac": lambda: co.KFAC(events()).add_diagonal(1.0),
    "damped_ekfac": lambda: co.EKFAC(events()).add_diagonal(1.0),
    "damped_subnetwork": lambda: co.Subnetwork(ggn(), [1, 5, 9, 3]).add_diagonal(torch.linspace(0.5, 2, 4)),
    "damped_tangent_kernel": lambda: operator(co.TangentKernel).add_diagonal(torch.linspace(0.5, 2, 12)),
    "damped_ggn": lambda: full_rank_ggn().add_diagonal(1.0),
    "damped_low_rank": lambda: nearly_full_rank().add_diagonal(1.0),
    "damped_dense": lambda: Dense(spd()).add_diagonal(torch.linspace(0.5, 2, 7)),
    "damped_low_rank_vector": lambda: low_rank().with_diagonal(low_rank().diagonal() + torch.linspace(0.2, 1, 7)),
    "damped_kronecker": lambda: kronecker().add_diagonal(1.0),
    "damped_block_diagonal": lambda: block_diagonal(nearly_full_rank).add_diagonal(1.0),
    "kronecker": kronecker,
    "dense": lambda: Dense(spd()),
    "diagonal": lambda: Diagonal(torch.linspace(0.5, 2, 7)),
    "inverse": lambda: full_rank_ggn().add_diagonal(1.0).inverse(),
}


def case(base, name, make):
    def create_linear_op(self):
        return make()

    def evaluate_linear_op(self, linear_op):
        return dense_with_graph(linear_op)

    body = {
        "seed": 0,
        "should_call_cg": False,
        "should_call_lanczos": False,
        "should_call_lanczos_diagonalization": False,
        "should_test_sample": base is LinearOperatorTestCase,
        "create_linear_op": create_linear_op,
        "evaluate_linear_op": evaluate_linear_op,
        "__module__": __name__,
    }
    return type(name, (base, unittest.TestCase), body)


for key, build in RECTANGULAR.items():
    globals()[f"TestRectangular_{key}"] = case(RectangularLinearOperatorTestCase, f"TestRectangular_{key}", build)
for key, build in SQUARE.items():
    globals()[f"TestSquare_{key}"] = case(LinearOperatorTestCase, f"TestSquare_{key}", build)

pytestmark = pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.PerformanceWarning")
