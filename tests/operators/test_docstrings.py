"""Every operator says what it is, what it costs, and when to choose it."""

import inspect

import pytest

import curvops as co

OPERATORS = [
    co.GGN,
    co.EmpiricalFisher,
    co.Gradients,
    co.Hessian,
    co.DiagonalGGN,
    co.KFAC,
    co.EKFAC,
    co.BlockDiagonal,
    co.linalg.LowRank,
    co.Subnetwork,
    co.TangentKernel,
]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("said", ["(", "ost to build", "product is", "emory", "hoose it"])
def test_the_docstring_says(operator, said):
    text = " ".join(inspect.getdoc(operator).split())
    shape = text.split(". ")[0]
    assert said in text and any(form in shape for form in ("(D, D)", "(n, n)", "(S, S)", "(n·C, n'·C)", "(N, D)"))
