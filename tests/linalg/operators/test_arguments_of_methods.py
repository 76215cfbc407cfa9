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


def known() -> linalg.Operator:
    """An operator that knows its diagonal, and has a closed form of its sum with a diagonal."""
    matrix = symmetric(torch.linspace(0.5, 2, 300).double())
    return linalg.Kronecker(matrix[None, :30, :30], matrix[None, :11, :11])


def test_a_name_of_a_method_requests_an_estimate() -> None:
    A = known()
    for estimate in (A.trace(method="xtrace"), linalg.diagonal(A, method="bekas")):
        assert estimate.samples > 0 and estimate.matvecs == 128


def test_an_option_out_of_range_is_refused_where_nothing_is_estimated() -> None:
    A = known()
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
