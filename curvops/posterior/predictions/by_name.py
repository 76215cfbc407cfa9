"""The predictions of a network with several outputs, by name, and scores of all their targets together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from curvops.argument_types import Points
from curvops.linalg import Estimate
from curvops.posterior.predictions.answers import NAMED


@dataclass(frozen=True, eq=False)
class NamedPredictions(Mapping[Any, Any]):
    """The predictions of a posterior at inputs x for several outputs, a mapping from names to `Predictions`.

    Its methods answer for each output for which the answer exists, as mappings with the same names, and raise
    ValueError if there is none. Log-likelihoods are of the targets under all names together.

    Examples:
        >>> heads = lambda params, x: {name: x @ weight for name, weight in params.items()}
        >>> weights = {"kind": torch.ones(2, 2), "value": torch.ones(2, 1)}
        >>> choice = {"kind": "classification", "value": co.likelihoods.Gaussian(0.1)}
        >>> lin = co.linearize((heads, weights), (x, {"kind": y, "value": x[:, :1]}), choice)
        >>> at = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False).at(x)
        >>> at["value"].predict().mean.shape, list(at.probabilities())
        (torch.Size([8, 1]), ['kind'])
    """

    whole: Any
    """The predictions of all outputs, as one row per point."""
    outputs: dict[Any, Any]

    def __getitem__(self, name: Any) -> Any:
        if name not in self.outputs:
            raise KeyError(f"{name!r} is not one of the outputs {list(self.outputs)}.")
        return self.outputs[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def predict(self, joint: bool = False, noise: bool = False, groups: int | None = None) -> dict[Any, Any]:
        """Return the distribution of each output; with noise=True, of the targets that are numbers."""
        return self._each(
            lambda output: output.predict(joint, noise, groups),
            lambda form: noise is not True or form == "numbers",
            "observation noise",
        )

    def functions(self) -> dict[Any, Any]:
        """Return the linearised network as a function at each of the samples, for each output."""
        return self._each(lambda output: output.functions(), lambda form: True, "outputs")

    def probabilities(self, link: str | None = None, generator: torch.Generator | None = None) -> dict[Any, Any]:
        """Return class probabilities for each output that has some."""
        return self._each(
            lambda output: output.probabilities(link, generator), lambda form: form in NAMED, "probabilities"
        )

    def uncertainty(self, generator: torch.Generator | None = None) -> dict[Any, Any]:
        """Return the uncertainty of each output's targets."""
        return self._each(
            lambda output: output.uncertainty(generator), lambda form: form is not None, "a decomposed uncertainty"
        )

    def log_likelihood(
        self, y: Points, joint: bool = False, generator: torch.Generator | None = None, link: str = "mc"
    ) -> Estimate:
        """Return log p(y | x, data) of the targets under all names together, which depend on the same weights."""
        score: Estimate = self.whole.log_likelihood(y, joint, generator, link)
        return score

    def _each(self, ask: Callable[[Any], Any], suits: Callable[[str | None], bool], what: str) -> dict[Any, Any]:
        """Return an answer for each output whose targets have a form that suits it."""
        targets = {name: output.lin.likelihood.of_position for name, output in self.outputs.items()}
        answers = {name: ask(self.outputs[name]) for name, target in targets.items() if suits(target.form)}
        if not answers:
            raise ValueError(f"none of the likelihoods of {list(targets)} has {what}: {list(targets.values())}.")
        return answers
