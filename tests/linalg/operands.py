"""Every structured operand with its dense matrix, built apart from the library, and the shifts it takes."""

from collections.abc import Callable

import torch
from torch import Tensor

from curvops.linalg import Dense, Diagonal, DirectSum, EigenKronecker, Kronecker, LowRank, Operator, Scaled

Case = tuple[Operator, Tensor, Tensor]  # operator, dense matrix, a vector shift that its closed form takes


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Fail unless these agree to this tolerance, relative or absolute."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return 0.5 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(g: int, m: int, seed: int = 0) -> Tensor:
    """(g, m, m), positive definite with condition number of order 10."""
    root = random(g, m, 2 * m, seed=seed)
    return root @ root.mT / (2 * m) + 0.1 * torch.eye(m, dtype=torch.float64)


def orthogonal(g: int, m: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(random(g, m, m, seed=seed)).Q.contiguous()


def full(factor: Tensor) -> Tensor:
    return torch.diag_embed(factor) if factor.ndim == 2 else factor


def kron(left: Tensor, right: Tensor) -> Tensor:
    return torch.block_diag(*(torch.kron(a, b) for a, b in zip(full(left), full(right))))


def per_group(g: int, size: int) -> Tensor:
    return torch.linspace(0.5, 2, g, dtype=torch.float64).repeat_interleave(size)


def kronecker(left: Tensor, right: Tensor) -> Case:
    g, p, q = left.shape[0], left.shape[1], right.shape[1]
    return Kronecker(left, right), kron(left, right), per_group(g, p * q)


def eigen_kronecker(left: Tensor, right: Tensor, values: Tensor) -> Case:
    U = kron(left, right)
    g, p, q = values.shape
    return EigenKronecker(left, right, values), (U * values.flatten()) @ U.mT, per_group(g, p * q)


def low_rank(n: int = 40, r: int = 6) -> Case:
    vectors, values = random(n, r), uniform(r)  # not orthonormal: nothing may rely on it
    return LowRank(vectors, values), (vectors * values) @ vectors.mT, uniform(n, seed=1)


def diagonal(n: int = 40) -> Case:
    return Diagonal(uniform(n)), uniform(n).diag(), uniform(n, seed=1)


def dense(n: int = 40) -> Case:
    return Dense(positive(1, n)[0]), positive(1, n)[0], uniform(n, seed=1)


def blocks(parts: list[Case], permuted: bool) -> Case:
    n = sum(len(matrix) for _, matrix, _ in parts)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3)) if permuted else torch.arange(n)
    sizes = [len(matrix) for _, matrix, _ in parts]
    back = order.argsort()
    matrix = torch.block_diag(*(matrix for _, matrix, _ in parts))[back][:, back]
    operator = DirectSum(*(part for part, _, _ in parts), positions=order.split(sizes))
    return operator, matrix, torch.cat([shift for _, _, shift in parts])[back]


def scaled(case: Case, factor: float = 1.7) -> Case:
    """By the class of any operand: most have multiples of their own kind."""
    operator, matrix, shift = case
    return Scaled(operator, torch.tensor(factor, dtype=torch.float64)), factor * matrix, shift


ones = torch.ones(2, 3, dtype=torch.float64)
OPERANDS: dict[str, Callable[[], Case]] = {
    "diagonal": diagonal,
    "dense": dense,
    "low rank": low_rank,
    "kronecker": lambda: kronecker(positive(1, 5), positive(1, 7, seed=1)),
    "kronecker g=3": lambda: kronecker(positive(3, 4), positive(3, 5, seed=1)),
    "kronecker diagonal left": lambda: kronecker(uniform(2, 6), positive(2, 4)),
    "kronecker diagonal right": lambda: kronecker(positive(2, 3), uniform(2, 6)),
    "kronecker both diagonal": lambda: kronecker(uniform(2, 3), uniform(2, 6, seed=1)),
    "kronecker p=1": lambda: kronecker(positive(2, 1), positive(2, 8)),
    "kronecker q=1": lambda: kronecker(positive(3, 6), positive(3, 1)),
    "kronecker large": lambda: kronecker(positive(2, 9), positive(2, 17, seed=1)),
    "eigen kronecker": lambda: eigen_kronecker(orthogonal(2, 4), orthogonal(2, 5, seed=1), uniform(2, 4, 5)),
    "eigen kronecker identity": lambda: eigen_kronecker(ones, orthogonal(2, 5), uniform(2, 3, 5)),
    "blocks": lambda: blocks([kronecker(positive(2, 3), positive(2, 4)), low_rank(9, 2), diagonal(5)], False),
    "blocks permuted": lambda: blocks([kronecker(positive(1, 3), positive(1, 4)), dense(7), diagonal(5)], True),
    "blocks large": lambda: blocks([kronecker(positive(2, 9), positive(2, 17)), dense(20)], True),
    "scaled kronecker": lambda: scaled(kronecker(positive(2, 3), positive(2, 4, seed=1))),
    "scaled blocks": lambda: scaled(OPERANDS["blocks"]()),
}
SINGULAR = {"low rank", "blocks", "scaled blocks"}
"""Without a closed form of their own."""
