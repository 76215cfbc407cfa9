"""The checks of shapes that the test run makes: what they see, and that they end after the first calls."""

from dataclasses import dataclass

import beartype
import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core import vectors
from tests import shape_checks

checked = shape_checks.sparing(typechecker=beartype.beartype)


@checked
def product(A: Float[Tensor, "m n"], v: Float[Tensor, " n"]) -> Float[Tensor, " m"]:
    return A @ v if v.sum() >= 0 else v


@checked
@dataclass
class Column:
    value: Float[Tensor, " n"]


def test_arguments_results_and_fields_are_checked() -> None:
    A, v = torch.ones(2, 3), torch.ones(3)
    assert product(A, v).shape == (2,) and Column(v).value is v
    for wrong in (lambda: product(A, torch.ones(2)), lambda: product(A, -v), lambda: Column(A)):
        shape_checks.restart()  # only first calls are checked
        with pytest.raises(jaxtyping.TypeCheckError):
            wrong()


def test_the_library_is_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        vectors.as_block(torch.ones(3))


def test_the_checks_end_after_the_first_calls_of_a_test() -> None:
    for _ in range(shape_checks.CALLS):
        with pytest.raises(jaxtyping.TypeCheckError):
            product(torch.ones(2, 3), -torch.ones(3))
    assert product(torch.ones(2, 3), -torch.ones(3)).shape == (3,)
    shape_checks.restart()
    with pytest.raises(jaxtyping.TypeCheckError):
        product(torch.ones(2, 3), -torch.ones(3))


def test_nothing_is_checked_where_a_test_says_so(annotations_unchecked: None) -> None:
    assert Column(3).value == 3  # type: ignore[arg-type]


def test_a_function_whose_annotations_name_no_shape_is_left_as_it_is() -> None:
    def of(value: int) -> int:
        return value

    of.__qualname__, own = "of", of.__code__
    assert shape_checks.sparing(typechecker=beartype.beartype)(of).__code__ is own
