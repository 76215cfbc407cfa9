"""How an operator is made of a linearisation: its public signature, apart from the form in which it is stored."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.cache import recorded
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.operators.linearization import Linearization

Stored = tuple[tuple[Any, ...], dict[str, Any]]
"""Tensors and operators by position, and keywords: what the next class in line stores."""


ASIDE = ("lin", "generator", "checkpoint")
"""Arguments that do not say which operator of a linearisation it is."""


class OfLinearization(LinearOperator):
    """An operator that users make of a linearisation, and linear_operator rebuilds from what is stored.

    A subclass reads the linearisation in `_read`, whose signature is the public one (positions, names and defaults),
    and returns the tensors and keywords that the next class in line stores. `STORED` is a keyword that every stored
    form has: it distinguishes a rebuild from a user's call, which alone knows its `asked`.
    """

    STORED: str = ""
    CARRIED: bool = False
    """Whether the operator has gradients for the likelihood's hyperparameters, or does not depend on them."""
    asked: Mapping[str, Any] | None = None
    """What the user's call said but for `ASIDE`; None for a rebuild of its result."""
    _read: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_read" in vars(cls):
            cls.__signature__ = inspect.signature(cls._read)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        asked = None
        if not self._is_stored(args, kwargs):
            bound = self._bound(args, kwargs)
            stored: Stored = self._read(*bound.args, **bound.kwargs)
            args, kwargs = stored
            asked = {key: value for key, value in bound.arguments.items() if key not in ASIDE}
        super().__init__(*args, **kwargs)
        self.asked = asked

    def of(self, lin: Linearization, generator: torch.Generator | None = None) -> LinearOperator | None:
        """The same kind of operator with the same options, of another linearisation; None where they are not known.

        What it draws comes from `generator`.
        """
        if self.asked is None:
            return None
        takes = {"generator": generator} if "generator" in inspect.signature(type(self)).parameters else {}
        return type(self)(lin, **self.asked, **takes)

    @classmethod
    def _is_stored(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        stored = bool(args) and isinstance(args[0], Tensor | LinearOperator)
        return stored and cls.STORED in kwargs

    @classmethod
    def _bound(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """The arguments of a user's call by name, checked as far as all classes share them."""
        signature = inspect.signature(cls)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
            raise TypeError(f"co.{cls.__name__}({', '.join(map(str, plain))}): {error}.") from None
        source = bound.arguments["lin"]
        if not isinstance(source, Linearization):
            raise TypeError(
                f"{cls.__name__} is made of a linearised network, curvops.linearize(model, data, likelihood), "
                f"got {type(source).__name__}."
            )
        if not cls.CARRIED:
            require_no_gradient(source.likelihood, cls.__name__)
        return bound


def made_of(lin: Linearization) -> dict[str, Any]:
    """The keywords that record, without the linearisation, which weights and data an operator was made of."""
    return {"space": lin.tangent_space, "sources": lin.sources}


def require_no_gradient(likelihood: Likelihood, what: str) -> None:
    """Raise ValueError where a gradient is asked for that `what` does not have: it would silently be zero."""
    if recorded(likelihood.hyperparameters):
        raise ValueError(
            f"{what} has no gradient for the hyperparameters of {likelihood!r}, which require one: detach them "
            "(noise.detach()), or build it under torch.no_grad(). co.GGN(lin) and co.EmpiricalFisher(lin) have it; "
            "co.evidence.maximize(post, 'noise') finds a Gaussian's noise without."
        )
