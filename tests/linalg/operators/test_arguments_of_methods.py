"""Algorithms as methods of operators take the arguments of the functions, by name."""

import inspect

import pytest
import torch

from curvops import linalg

METHODS = {name: name for name in ("cg", "lanczos", "eigsh", "svds", "spectral_density", "trace")}


@pytest.mark.parametrize(("method", "function"), (METHODS | {"stochastic_logdet": "logdet"}).items())
def test_a_method_takes_the_arguments_of_its_function(method: str, function: str) -> None:
    own = inspect.signature(getattr(linalg.Diagonal(torch.ones(3)), method)).parameters
    assert list(own) == list(inspect.signature(getattr(linalg, function)).parameters)[1:]
    assert all(argument.kind is not argument.VAR_KEYWORD for argument in own.values())
