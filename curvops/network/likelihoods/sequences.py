"""The likelihood of a sequence of targets, built from the likelihood of the target at one position."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvops.network.data.inputs import misplaced
from curvops.network.likelihoods.likelihood import HessianParts, Likelihood, OutputBlock, Outputs, RootBlock

SequenceWeights = Float[Tensor, " n"] | Float[Tensor, "n T"] | Float[Tensor, "n T m"] | None


class Sequences(Likelihood):
    """A likelihood of T targets per point, independent given the outputs: log p is a sum, and H is block-diagonal.

    Outputs are rows (n, T·C), position by position (t·C + c). Targets are (n, T) or (n, T, ...), in the form that
    `likelihood` has for n·T points. Weights are (n, T), one factor per position (zeros leave positions out), or (n,),
    one per sequence; if targets are independent given the outputs, also of the targets' shape. `co.linearize` wraps any
    likelihood in this one if the model returns (N, T, C).

    Args:
        likelihood: the likelihood of one target.
        positions: T, the number of targets per point.
        num_outputs: C, the number of outputs per target.

    Raises:
        ValueError: the likelihood needs another number of positions.

    Examples:
        >>> tokens, labels = torch.zeros(8, 3, 2), torch.zeros(8, 3, dtype=torch.long)
        >>> lin = co.linearize(nn.Linear(2, 2), (tokens, labels), "classification")
        >>> lin.likelihood
        Sequences(Categorical(weight=None, ignore_index=-100, label_smoothing=0), positions=3, num_outputs=2)
    """

    positions: int

    def __init__(self, likelihood: Likelihood, positions: int, num_outputs: int) -> None:
        if likelihood.positions not in (None, positions):
            raise ValueError(f"{likelihood!r} needs {likelihood.positions} positions per point; given {positions}.")
        self.likelihood, self.positions, self.num_outputs = likelihood, positions, num_outputs

    def __repr__(self) -> str:
        return f"Sequences({self.likelihood!r}, positions={self.positions}, num_outputs={self.num_outputs})"

    @property
    def kind(self) -> str:
        return self.likelihood.kind

    @property
    def described(self) -> str:
        return self.likelihood.described

    @property
    def of_position(self) -> Likelihood:
        return self.likelihood

    @property
    def single_noise(self) -> Tensor | None:
        return self.likelihood.single_noise

    @property
    def output_shape(self) -> torch.Size:
        """The shape (T, C) of a point's outputs."""
        return torch.Size((self.positions, self.num_outputs))

    def log_prob(self, f: Outputs, y: Tensor, w: SequenceWeights = None) -> Float[Tensor, " n"]:
        log_p = self.likelihood.log_prob(self._split(f), y.flatten(0, 1), self._weights(w))
        return log_p.unflatten(0, (-1, self.positions)).sum(1)

    def residual(self, f: Outputs, y: Tensor, w: SequenceWeights = None) -> Outputs:
        return self._join(self.likelihood.residual(self._split(f), y.flatten(0, 1), self._weights(w)))

    def hessian_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: SequenceWeights = None) -> OutputBlock:
        product = self.likelihood.hessian_product(self._split(f), self._split(u), y.flatten(0, 1), self._weights(w))
        return self._join(product)

    def hessian_parts(self, f: Outputs, y: Tensor, w: SequenceWeights = None) -> HessianParts | None:
        return self.likelihood.hessian_parts(self._split(f), y.flatten(0, 1), self._weights(w))

    def root_product(self, f: Outputs, z: RootBlock, y: Tensor, w: SequenceWeights = None) -> OutputBlock:
        product = self.likelihood.root_product(self._split(f), self._split(z), y.flatten(0, 1), self._weights(w))
        return self._join(product)

    def root_transpose_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: SequenceWeights = None) -> RootBlock:
        product = self.likelihood.root_transpose_product(
            self._split(f), self._split(u), y.flatten(0, 1), self._weights(w)
        )
        return self._join(product)

    def root_columns(self, num_outputs: int) -> int:
        return self.positions * self.likelihood.root_columns(num_outputs // self.positions)

    def narrow_columns(self, num_outputs: int) -> int:
        return self.positions * self.likelihood.narrow_columns(num_outputs // self.positions)

    def narrow_root(
        self, f: Outputs, y: Tensor, w: SequenceWeights, start: int, stop: int
    ) -> Float[Tensor, "{stop}-{start} n C"]:
        f, y, w = self._split(f), y.flatten(0, 1), self._weights(w)
        width = self.likelihood.narrow_columns(f.shape[1])
        root = f.new_zeros(stop - start, len(f) // self.positions, self.positions, f.shape[1])
        for t in range(start // width, -(-stop // width)):
            first, end = max(start, t * width), min(stop, (t + 1) * width)
            columns = self.likelihood.narrow_root(f, y, w, first - t * width, end - t * width)
            root[first - start : end - start, :, t] = columns.unflatten(1, (-1, self.positions))[:, :, t]
        return root.flatten(2)

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        return self.likelihood.sample(self._split(f), generator).unflatten(0, (-1, self.positions))

    def mc_residual(
        self,
        f: Outputs,
        y: Tensor,
        w: SequenceWeights = None,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        return self._join(self.likelihood.mc_residual(self._split(f), y.flatten(0, 1), self._weights(w), generator))

    def mean(self, f: Outputs) -> Float[Tensor, "n m"]:
        return self._join(self.likelihood.mean(self._split(f)))

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        if num_outputs not in (None, self.output_shape.numel()):
            raise ValueError(f"{self!r} needs {self.output_shape.numel()} outputs; the model has {num_outputs}.")
        if y.ndim < 2 or y.shape[1] != self.positions:
            raise ValueError(misplaced((self.positions,), y))
        try:
            self.likelihood.check_targets(y.flatten(0, 1), self.num_outputs)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"With each of the {self.positions} positions as a point (n·T in total): {error}") from error

    def any_targets(self, f: Outputs) -> Tensor:
        return self.likelihood.any_targets(self._split(f)).unflatten(0, (-1, self.positions))

    def counted(self, y: Tensor, w: SequenceWeights = None) -> Bool[Tensor, "n T"] | None:
        """Return a mask of the positions that count, None if all do."""
        mask = self.likelihood.counted(y.flatten(0, 1), self._weights(w))
        return None if mask is None else mask.unflatten(0, (-1, self.positions))

    def weights_of_points(self, y: Tensor, w: SequenceWeights) -> Float[Tensor, "n *T"] | None:
        if w is None or w.ndim == 1:
            return w
        weights = self.likelihood.weights_of_points(y.flatten(0, 1), self._weights(w))
        return None if weights is None else weights.unflatten(0, (-1, self.positions))

    @property
    def hyperparameters(self) -> tuple[Tensor, ...]:
        return self.likelihood.hyperparameters

    def with_hyperparameters(self, tensors: Sequence[Tensor]) -> Sequences:
        new = copy.copy(self)
        new.likelihood = self.likelihood.with_hyperparameters(tensors)
        return new

    def _split(self, x: Tensor) -> Tensor:
        """Reshape (*K, n, T·C) to (*K, n·T, C)."""
        return x.unflatten(-1, (self.positions, -1)).flatten(-3, -2)

    def _join(self, x: Tensor) -> Tensor:
        """Invert `_split`."""
        return x.unflatten(-2, (-1, self.positions)).flatten(-2)

    def _weights(self, w: Tensor | None) -> Tensor | None:
        """Return one factor per position, (n·T,), or per target of a position, (n·T, m)."""
        if w is None:
            return None
        return (w.unsqueeze(-1).expand(-1, self.positions) if w.ndim == 1 else w).flatten(0, 1)
