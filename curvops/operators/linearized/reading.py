"""How an operator is made of a linearisation: its public signature, apart from the form in which it is stored."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.cache import recorded
from curvops.linalg.core.sources import Sources, sources_of
from curvops.linalg.operators.algebra import Scaled
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.sequences import single_noise
from curvops.operators.linearized.linearization import Linearization

Stored = tuple[tuple[Any, ...], dict[str, Any]]
"""Tensors and operators by position, and keywords: what the next class in line stores."""


ASIDE = ("lin", "generator", "checkpoint")
"""Arguments that do not say which operator of a linearisation it is."""


class OfLinearization(LinearOperator):
    """An operator that users make of a linearisation, and linear_operator rebuilds from what is stored.

    A subclass reads the linearisation in `_read`, whose signature is the public one (positions, names and defaults),
    and returns the tensors and keywords that the next class in line stores. `STORED` is a keyword that every stored
    form has: it distinguishes a rebuild from a user's call, which alone knows its `asked`. A call under a Gaussian
    noise that requires a gradient makes a `ScaledByNoise` where the class has no such gradient of its own.
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

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        scaled = None if cls.CARRIED or cls._is_stored(args, kwargs) else scaled_by_noise(cls, *args, **kwargs)
        return super().__new__(cls) if scaled is None else scaled

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


class ScaledByNoise(OfLinearization, Scaled):
    """An operator made at one observation noise, as a function of it: A(σ²) = (σ₀²/σ²)ᵖ A(σ₀²).

    For a Gaussian likelihood every curvature is proportional to 1/σ² (p = 1), and empirical Fishers, whose residuals
    are, to its square (p = 2). Users get it of a class that walks over the data once, co.KFAC(lin) say, where σ² is a
    tensor that requires a gradient. It follows the tensor when it changes in place.
    """

    STORED = "reference"
    CARRIED = True

    def __init__(self, base: LinearOperator, noise: Tensor, *, reference: float, power: int) -> None:
        LinearOperator.__init__(self, base, noise, reference=reference, power=power)
        self.asked = getattr(base, "asked", None)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of one output, at this operator's noise."""
        return Gaussian(self._args[1])

    @property
    def factor(self) -> Tensor:
        ratio: Tensor = self._kwargs["reference"] / self._args[1].to(self.dtype).reshape(())
        return ratio ** self._kwargs["power"]

    @property
    def sources(self) -> Sources | None:
        return sources_of(self.base)

    def of(self, lin: Linearization, generator: torch.Generator | None = None) -> LinearOperator | None:
        found: LinearOperator | None = self.base.of(lin, generator)
        return found

    def settled(self) -> LinearOperator:
        """The operator at this noise, without a gradient for it; ValueError where it is no longer that of the data."""
        if float(self.factor.detach()) != 1:
            raise ValueError(
                f"the noise has changed from {self._kwargs['reference']:.6g} to {float(self._args[1].detach()):.6g} "
                "since the curvature was made: make the posterior again, co.laplace(lin, ...), before it is saved."
            )
        base: LinearOperator = self.base
        return base


def scaled_by_noise(kind: type[OfLinearization], *args: Any, **kwargs: Any) -> ScaledByNoise | None:
    """`kind(*args, **kwargs)` as a function of the noise; None where no gradient for a single one is asked for."""
    lin = args[0] if args else kwargs.get("lin")
    if not isinstance(lin, Linearization):  # refused where arguments are read
        return None
    noise = single_noise(lin.likelihood)
    if noise is None or not recorded((noise,)):
        return None
    fixed = lin.with_likelihood(lin.likelihood.with_hyperparameters([noise.detach().clone()]))
    base = kind(fixed, *args[1:], **kwargs) if args else kind(**kwargs | {"lin": fixed})
    assert base.asked is not None  # a user's call
    power = 2 if base.asked.get("fisher") == "empirical" else 1
    return ScaledByNoise(base, noise, reference=float(noise.detach()), power=power)


def made_of(lin: Linearization) -> dict[str, Any]:
    """The keywords that record, without the linearisation, which weights and data an operator was made of."""
    return {"space": lin.tangent_space, "sources": lin.sources}


def require_no_gradient(likelihood: Likelihood, what: str) -> None:
    """Raise ValueError where a gradient is asked for that `what` does not have: it would silently be zero."""
    if recorded(likelihood.hyperparameters):
        raise ValueError(
            f"{what} has no gradient for the hyperparameters of {likelihood!r}, which require one: detach them "
            "(noise.detach()), or build it under torch.no_grad(). co.GGN(lin) and co.EmpiricalFisher(lin) have it; for "
            "the one noise of a Gaussian likelihood so have co.KFAC(lin) and the others, made while gradients are on, "
            "and co.evidence.maximize(post, 'noise') finds it without."
        )
