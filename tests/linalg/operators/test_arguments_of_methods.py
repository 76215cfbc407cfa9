"""One name, one meaning: methods of operators and functions of linalg, what they return and what they cost."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops import linalg
from tests.linalg.matrices import symmetric

METHODS = ("cg", "lanczos", "eigsh", "svds", "spectral_density", "trace")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_its_function(method: str) -> None:
    assert getattr(linalg.Operator, method) is getattr(linalg, method)


def known() -> list[linalg.Operator]:
    """Operators that know their diagonal, and have a closed form of their sum with a diagonal."""
    matrix = symmetric(torch.linspace(0.5, 2, 300).double())
    low_rank = linalg.LowRank(torch.linalg.qr(matrix[:, :3])[0], torch.tensor([1.0, 2.0, 3.0]).double())
    return [
        linalg.Kronecker(matrix[None, :30, :30], matrix[None, :11, :11]),
        linalg.Diagonal(matrix.diagonal().clone()),
        low_rank,
    ]


@pytest.mark.parametrize("i", range(3))
def test_what_an_operator_knows_is_returned_exactly_and_without_a_product(i: int) -> None:
    A = known()[i]
    dense, P = A.to_dense(), A.add_diagonal(0.5)
    for trace in (A.trace(), linalg.trace(A, rtol=1e-3)):
        torch.testing.assert_close(trace.value, dense.trace(), rtol=1e-10, atol=0)
        assert trace.samples == trace.matvecs == 0
    diagonal = linalg.diagonal(A)
    torch.testing.assert_close(diagonal.value, dense.diagonal(), rtol=1e-10, atol=1e-14)
    assert torch.equal(diagonal.value, A.diagonal()) and diagonal.samples == diagonal.matvecs == 0
    found = linalg.logdet(P)
    torch.testing.assert_close(found.value, torch.logdet(P.to_dense()), rtol=1e-10, atol=0)
    assert torch.equal(found.value, P.logdet()) and found.samples == found.matvecs == 0


def test_a_name_of_a_method_requests_an_estimate() -> None:
    A = known()[0]
    for estimate in (A.trace(method="xtrace"), linalg.diagonal(A, method="bekas")):
        assert estimate.samples > 0 and estimate.matvecs == 128


def test_an_option_out_of_range_is_refused_where_nothing_is_estimated() -> None:
    A = known()[0]
    for call in (A.trace, lambda **o: linalg.diagonal(A, **o), lambda **o: linalg.logdet(A.add_diagonal(1.0), **o)):
        for option in ({"rtol": -1.0}, {"max_matvecs": -1}, {"memory_budget": -1}):
            with pytest.raises(ValueError, match=next(iter(option))):
                call(**option)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize(("call", "width", "told"), [("diagonal", 1000, True), ("to_dense", 999, False)])
def test_more_than_a_thousand_products_are_told(call: str, width: int, told: bool) -> None:
    """Not for 1,000, and not by functions that make fewer."""
    lin = co.linearize(nn.Linear(width, 1), (torch.ones(2, width), torch.ones(2, 1)), co.likelihoods.Gaussian(1.0))
    G, H = co.GGN(lin), co.Hessian(lin)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(H, call)()
        G.diagonal(), (G + G).trace(), H.trace(), co.linalg.diagonal(H)
    found = [str(each.message) for each in caught if each.category is co.errors.ManyProductsWarning]
    assert len(found) == told and all("of this Hessian takes 1,001 products: " in message for message in found)


def test_the_warning_comes_before_the_first_product() -> None:
    def product(V: Tensor) -> Tensor:
        raise InterruptedError

    A = linalg.as_operator(product, torch.ones(1001))
    with pytest.warns(co.errors.ManyProductsWarning, match="1,001 products"), pytest.raises(InterruptedError):
        A.diagonal()
