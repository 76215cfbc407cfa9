"""Second derivatives through operators are refused by name: they would be zero without a word."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from curvops.linalg import Operator, logdet, solve, trace
from tests.linalg.known import Known
from tests.linalg.matrices import symmetric

SIZE = 300  # more than is solved for densely
MATRIX = symmetric(torch.linspace(1, 3, SIZE).double())
ONES = torch.ones(SIZE, dtype=torch.float64)
USES: dict[str, Callable[[Operator], Tensor]] = {
    "product": lambda A: A @ ONES,
    "solve": lambda A: A.solve(ONES),
    "function solve": lambda A: solve(A, ONES),
    "log-determinant by draws": lambda A: logdet(A, lower_bound=0.5).value,
    "trace by draws": lambda A: trace(A, method="hutchinson").value,
}


@pytest.mark.parametrize("use", USES)
def test_a_hessian_through_an_operator_is_refused(use: str) -> None:
    def squared(scale: Tensor) -> Tensor:
        return USES[use](Known(scale**2 * MATRIX, is_psd=True)).sum()

    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    value = squared(scale)
    if not value.requires_grad:
        pytest.fail(f"{use} has no first derivative")
    with pytest.raises(RuntimeError, match=r"first derivatives only.*create_graph"):
        torch.autograd.functional.hessian(squared, scale)
