"""Operators that users build from a linearisation, and that linear_operator rebuilds from their stored form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checkpoint import identify
from curvops.checks import carries_graph, check_kind
from curvops.linalg.core.matrix_identity import Sources, sources_of
from curvops.linalg.operators.algebra import Scaled
from curvops.linalg.operators.base import UnaryOperator
from curvops.network import likelihoods
from curvops.operators.linearized.linearization import Linearization
from curvops.ranks.sharded_linearization import KNOWN_OF_SHARDS, ShardedLinearization

ASIDE = ("lin", "generator", "checkpoint")
"""Arguments that do not affect the operator that is built."""


SHARDED: dict[type, Callable[..., LinearOperator]] = {}
"""The functions that build operators of a network whose parameters are sharded over ranks, by the operator's class."""


class UserOperator(LinearOperator):
    """An operator that users build from a linearisation, and that linear_operator rebuilds from its stored form.

    The `__init__` of a subclass is for users: it takes `lin` and options, and passes tensors and keywords on to the
    next class, which stores them. A rebuild skips it. `STORED` is a keyword of every stored form and marks a rebuild;
    only a user's call sets `arguments`. Under a Gaussian noise that requires a gradient, the call returns a
    `ScaledByNoise` if the class itself has no gradient for it.
    """

    STORED: str = ""
    CARRIED: bool = False
    """Whether the operator has gradients for the likelihood's hyperparameters, or does not depend on them."""
    arguments: Mapping[str, Any] | None = None
    """The arguments of the user's call without those in `ASIDE`; None for a rebuild."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        written = vars(cls).get("__init__")
        if written is not None and "lin" in inspect.signature(written).parameters:
            cls.__init__ = cls._for_users(written)  # type: ignore[method-assign]
            signature = inspect.signature(written)
            public = [p for name, p in signature.parameters.items() if name != "self"]
            cls.__signature__ = signature.replace(parameters=public, return_annotation=signature.empty)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0] if args else kwargs.get("lin"), ShardedLinearization):
            bound = cls._bound(args, kwargs)
            cls._require_equal_on_ranks(bound)
            if cls not in SHARDED:
                raise ValueError(f"co.{cls.__name__} is not available for sharded models: {KNOWN_OF_SHARDS}.")
            return SHARDED[cls](**bound.arguments)
        scaled = None if cls.CARRIED or cls._is_stored(args, kwargs) else scale_by_noise(cls, *args, **kwargs)
        return super().__new__(cls) if scaled is None else scaled

    @classmethod
    def _for_users(cls, written: Callable[..., None]) -> Callable[..., None]:
        """Return a version of this class's `__init__` that passes stored forms on to the next class."""

        @wraps(written)
        def init(self: UserOperator, *args: Any, **kwargs: Any) -> None:
            if self._is_stored(args, kwargs):
                super(cls, self).__init__(*args, **kwargs)
                return
            bound = self._bound(args, kwargs)
            self._require_equal_on_ranks(bound)
            written(self, *args, **kwargs)
            self.arguments = {key: value for key, value in bound.arguments.items() if key not in ASIDE}

        return init

    def of(self, lin: Linearization, generator: torch.Generator | None = None) -> LinearOperator | None:
        """Build this operator, with its options, from another linearisation; return None if the options are unknown.

        The `generator` is the source of the draws.
        """
        if self.arguments is None:
            return None
        takes = {"generator": generator} if "generator" in inspect.signature(type(self)).parameters else {}
        return type(self)(lin, **self.arguments, **takes)

    def _made_of(self) -> str:
        """Also return what the tensors of an operator do not show: its data, and the options of the user's call."""
        words = [super()._made_of()]
        if (sources := self._kwargs.get("sources")) is not None:
            options = (self.arguments or {}).items()
            words += [f"on {sum(source.num_data for source in sources.counts)} points"]
            words += [f"{name}={value!r}" for name, value in options if isinstance(value, str | int)]
        return ", ".join(filter(None, words))

    @classmethod
    def _require_equal_on_ranks(cls, bound: inspect.BoundArguments) -> None:
        """Raise RanksDifferError on all ranks that share the data unless they build the same operator."""
        lin = bound.arguments["lin"]
        if not lin.passes.is_shared:
            return
        call = inspect.BoundArguments(bound.signature, bound.arguments.copy())
        call.apply_defaults()
        options = {name: value for name, value in call.arguments.items() if name not in ("lin", "checkpoint")}
        name, facts = f"co.{cls.__name__}", {"the likelihood": identify(lin.likelihood)}
        facts |= {f"{option} of {name}": identify(value) for option, value in options.items()}
        lin.passes.agree({"the operator": name} | facts)

    @classmethod
    def _is_stored(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        stored = bool(args) and isinstance(args[0], Tensor | LinearOperator)
        return stored and cls.STORED in kwargs

    @classmethod
    def _bound(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Return the arguments of a user's call by name, after the checks that all classes share."""
        bound = cls.__signature__.bind(*args, **kwargs)
        source = bound.arguments["lin"]
        sharded = isinstance(source, ShardedLinearization)
        if not sharded:
            check_kind("lin", source, Linearization, "a linearised network, curvops.linearize(model, data, likelihood)")
        if sharded or not cls.CARRIED:
            require_no_gradient(source.likelihood, cls.__name__)
        return bound


class ScaledByNoise(UserOperator, Scaled):
    """An operator built at one observation noise, as a function of the noise: A(σ²) = (σ₀²/σ²)ᵖ A(σ₀²).

    For a Gaussian likelihood every curvature is proportional to 1/σ² (p = 1). Empirical Fishers are proportional to its
    square (p = 2), because their residuals scale with 1/σ², too. Classes that walk over the data once, such as
    co.KFAC(lin), return it if σ² is a tensor that requires a gradient. In-place changes of the tensor take effect.
    """

    _shown = ("factor",)
    STORED = "reference"
    CARRIED = True

    def __init__(self, base: LinearOperator, noise: Tensor, *, reference: float, power: int) -> None:
        UnaryOperator.__init__(self, base, noise, reference=reference, power=power)
        self.arguments = getattr(base, "arguments", None)

    @property
    def likelihood(self) -> likelihoods.Likelihood:
        """The likelihood of one output, with this operator's noise."""
        return likelihoods.Gaussian(self._args[1])

    @property
    def factor(self) -> Tensor:
        ratio: Tensor = self._kwargs["reference"] / self._args[1].to(self.dtype).reshape(())
        return ratio ** self._kwargs["power"]

    @property
    def sources(self) -> Sources | None:
        return sources_of(self.base)

    def of(self, lin: Linearization, generator: torch.Generator | None = None) -> LinearOperator | None:
        operator: LinearOperator | None = self.base.of(lin, generator)
        return operator

    def settled(self) -> LinearOperator:
        """Return the operator without a gradient for the noise; raise ValueError if the noise has changed."""
        if float(self.factor.detach()) != 1:
            raise ValueError("the noise has changed since the curvature was built: build the posterior again.")
        base: LinearOperator = self.base
        return base


def scale_by_noise(kind: type[UserOperator], *args: Any, **kwargs: Any) -> ScaledByNoise | None:
    """Return `kind(*args, **kwargs)` as a function of the noise; None if no gradient for a single noise is needed."""
    lin = args[0] if args else kwargs.get("lin")
    if not isinstance(lin, Linearization):  # rejected later, where arguments are read
        return None
    noise = lin.likelihood.single_noise
    if noise is None or not carries_graph((noise,)):
        return None
    fixed = lin.with_likelihood(lin.likelihood.with_hyperparameters([noise.detach().clone()]))
    base = kind(fixed, *args[1:], **kwargs) if args else kind(**kwargs | {"lin": fixed})
    assert base.arguments is not None  # a user's call
    power = 2 if base.arguments.get("fisher") == "empirical" else 1
    return ScaledByNoise(base, noise, reference=float(noise.detach()), power=power)


def require_no_gradient(likelihood: likelihoods.Likelihood, what: str) -> None:
    """Raise ValueError if `what` lacks a gradient that is needed, which would silently be zero."""
    if carries_graph(likelihood.hyperparameters):
        raise ValueError(
            f"{what} has no gradient for the hyperparameters of {likelihood!r}, which require one: detach them, or use "
            "torch.no_grad(). co.GGN and co.EmpiricalFisher have it; co.evidence.maximize(post, 'noise') needs none."
        )
