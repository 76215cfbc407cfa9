"""How a posterior's systems are solved: which matrix, and which preconditioner, for so many right-hand sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checkpoint import current
from curvops.linalg import Damped
from curvops.linalg.core.cache import recorded
from curvops.linalg.core.dense_sizes import DENSE_BLOCK, DENSE_SIZE
from curvops.linalg.core.memory import keep
from curvops.linalg.operators.algebra import is_psd
from curvops.linalg.operators.damped import ScaledPreconditioner
from curvops.linalg.preconditioners.factored import LowRankPreconditioner
from curvops.linalg.preconditioners.of_operator import ClosedFormPreconditioner
from curvops.operators.curvatures.formed import Formed
from curvops.posterior.formed_kernel import MOST_GRADIENTS, FormedKernel
from curvops.posterior.spectrum import Spectrum
from curvops.records import from_record

PRODUCTS_A_SOLVE = 8
"""What a right-hand side of a block solve takes at least: from D / 8 of them on, D products form the whole matrix."""
FEWER, UNEVEN = 4, 4.0
"""A sketch for so many times fewer columns, or for priors that differ so unevenly, is as good as a new one."""


@dataclass(eq=False)
class Tools:
    """What was made for solving so far, in this era of the likelihood."""

    era: object
    solved: tuple[LinearOperator, Formed, LinearOperator] | None = None
    rows: int = 0
    sketches: dict[str, tuple[Tensor, int, Any]] = field(default_factory=dict)


class Solving:
    """P in the form that is cheapest to solve with, and M ≈ P⁻¹, shared by posteriors that differ in their priors."""

    def __init__(self, spectrum: Spectrum, generator: torch.Generator | None = None) -> None:
        self._spectrum, self._terms, self._lin = spectrum, spectrum.terms, spectrum.terms.lin
        self._generator = generator  # of sketches that are asked for without one
        self._kept = Tools(self._terms.era())

    def __getstate__(self) -> dict[str, Any]:
        """What was made is copied and pickled along; a source of numbers cannot be."""
        return self.__dict__ | {"_generator": None}

    @property
    def _found(self) -> Tools:
        """What was made, forgotten where the likelihood's hyperparameters have changed since (in place)."""
        with self._terms.lock:
            era = self._terms.era()
            if self._kept.era is not era:
                self._kept = Tools(era)
            return self._kept

    def solving_kernel(self, prior: Tensor | None, most_gradients: float = MOST_GRADIENTS) -> FormedKernel | None:
        """`Spectrum.formed_kernel` where its rounding leaves it fit to solve under this prior."""
        found = self._spectrum.formed_kernel(prior, most_gradients)
        return found if found is not None and prior is not None and found.resolves(float(prior.detach())) else None

    def for_columns(self, precision: Any, columns: int, further: bool = False) -> Any:
        """P for solves with so many right-hand sides: as it is, or with its operand `Formed` where that is cheaper.

        It is between `DENSE_SIZE` weights (up to which every solve forms P) and `DENSE_BLOCK`, where P has no closed
        form and no gradient is recorded. What is formed serves all priors that are numbers or vectors. With `further`
        the columns are more of those that were asked for before: draws, which equal seeds make equal, count alone.
        """
        size = len(self._lin.theta)
        base, shift = (precision.base, precision.shift) if isinstance(precision, Damped) else (precision, 0.0)
        if not DENSE_SIZE < size <= DENSE_BLOCK or recorded(precision.representation()):
            return precision
        if precision._closed_form() is not None or not is_psd(base):
            return precision
        with self._terms.lock:
            found = self._found
            if further:
                found.rows += columns
            if PRODUCTS_A_SOLVE * (found.rows if further else columns) < size:
                return precision
            formed = self._spectrum.formed(base)
            if formed is None:
                return precision
            if found.solved is None or found.solved[0] is not precision or found.solved[1] is not formed:
                found.solved = precision, formed, formed.add_diagonal(shift)
            return found.solved[2]

    def preconditioner(
        self,
        precision: Any,
        columns: int,
        prior: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Any, int]:
        """M ≈ P⁻¹ for so many right-hand sides, None where none pays, and the products that it took.

        A sketch of A^-½GA^-½ made for one prior serves its neighbours c·A, too: all larger ones, smaller ones down to
        a third, and those whose entries scale by factors that differ at most `UNEVEN`-fold. With `prior`, its diagonal,
        P is I + SᵀA⁻¹S of function space, whose sketches are kept apart, or which is inverted where it is formed. In a
        run with a checkpoint it is the one of that, whatever was sketched before. A new one is drawn from `generator`.
        """
        generator = generator or self._generator
        if (kernel := self.solving_kernel(prior)) is not None:
            assert prior is not None
            return kernel.inverse(float(prior)), 0
        if current():
            made = precision.preconditioner(columns, generator)
            return made, 0 if made is None else made.matvecs
        if not isinstance(precision, Damped) or recorded(precision.representation()) or precision.shift.ndim > 1:
            return precision.preconditioner(columns, generator), 0
        space, diagonal = ("weights", precision.shift) if prior is None else ("functions", prior)
        with self._terms.lock:
            kept = self._found.sketches
            if space in kept:
                of, served, known = kept[space]
                factors = diagonal.detach() / of
                low, high = float(factors.min()), float(factors.max())
                if served * FEWER >= columns and low >= 1 / 3 and high <= UNEVEN * low:
                    scalar = of.ndim == 0 and prior is None  # else the matrix that was sketched is whitened
                    return known.shifted((float(of) if scalar else 1.0) * float(factors.log().mean().exp())), 0
            made = precision.preconditioner(columns, generator)
            if made is None or isinstance(made, ClosedFormPreconditioner):  # this takes no products for another prior
                return made, 0 if made is None else made.matvecs
            kept[space] = diagonal.detach().clone(), columns, made
            return made, made.matvecs

    def state(self) -> dict[str, Any]:
        """The sketches, as plain values and tensors."""
        sketches = {}
        for space, (of, columns, made) in self._found.sketches.items():
            scale, inner = (made.scale, made.inner) if isinstance(made, ScaledPreconditioner) else (None, made)
            sketches[space] = {"of": of, "columns": columns, "scale": scale, "inner": inner}
        return sketches

    def recall(self, state: Mapping[str, Any]) -> None:
        """Take the sketches that were made for the same curvature."""
        found = self._found
        for space, each in state.items():
            inner: Any = from_record(LowRankPreconditioner, each["inner"])
            keep(self._terms.curvature, inner, inner.U.nbytes)
            made = inner if each["scale"] is None else ScaledPreconditioner(each["scale"], inner)
            found.sketches[space] = each["of"], each["columns"], made
