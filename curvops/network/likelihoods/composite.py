"""Likelihoods built from others: of a target at each position, and of several outputs by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvops.network.data.layouts import Name, TargetShape, misplaced
from curvops.network.likelihoods.likelihood import HessianParts, Likelihood, OutputBlock, Outputs, RootBlock, Weights

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
        log_p = self.likelihood.log_prob(self._split(f), *self._labels(y, w))
        return log_p.unflatten(0, (-1, self.positions)).sum(1)

    def residual(self, f: Outputs, y: Tensor, w: SequenceWeights = None) -> Outputs:
        return self._join(self.likelihood.residual(self._split(f), *self._labels(y, w)))

    def hessian_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: SequenceWeights = None) -> OutputBlock:
        return self._join(self.likelihood.hessian_product(self._split(f), self._split(u), *self._labels(y, w)))

    def hessian_parts(self, f: Outputs, y: Tensor, w: SequenceWeights = None) -> HessianParts | None:
        return self.likelihood.hessian_parts(self._split(f), *self._labels(y, w))

    def root_product(self, f: Outputs, z: RootBlock, y: Tensor, w: SequenceWeights = None) -> OutputBlock:
        return self._join(self.likelihood.root_product(self._split(f), self._split(z), *self._labels(y, w)))

    def root_transpose_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: SequenceWeights = None) -> RootBlock:
        return self._join(self.likelihood.root_transpose_product(self._split(f), self._split(u), *self._labels(y, w)))

    def root_columns(self, num_outputs: int) -> int:
        return self.positions * self.likelihood.root_columns(num_outputs // self.positions)

    def narrow_columns(self, num_outputs: int) -> int:
        return self.positions * self.likelihood.narrow_columns(num_outputs // self.positions)

    def narrow_root(
        self, f: Outputs, y: Tensor, w: SequenceWeights, start: int, stop: int
    ) -> Float[Tensor, "{stop}-{start} n C"]:
        f, (y, w) = self._split(f), self._labels(y, w)
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
        return self._join(self.likelihood.mc_residual(self._split(f), *self._labels(y, w), generator))

    def mean(self, f: Outputs) -> Float[Tensor, "n m"]:
        return self._join(self.likelihood.mean(self._split(f)))

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        if num_outputs not in (None, self.output_shape.numel()):
            raise ValueError(f"{self!r} needs {self.output_shape.numel()} outputs; the model has {num_outputs}.")
        if y.ndim < 2 or y.shape[1] != self.positions:
            raise ValueError(misplaced((self.positions,), y))
        self.likelihood.check_targets(y.flatten(0, 1), self.num_outputs)

    def any_targets(self, f: Outputs) -> Tensor:
        return self.likelihood.any_targets(self._split(f)).unflatten(0, (-1, self.positions))

    def counted(self, y: Tensor, w: SequenceWeights = None) -> Bool[Tensor, "n T"] | None:
        """Return a mask of the positions that count, None if all do."""
        mask = self.likelihood.counted(*self._labels(y, w))
        return None if mask is None else mask.unflatten(0, (-1, self.positions))

    def weights_of_points(self, y: Tensor, w: SequenceWeights) -> Float[Tensor, "n *T"] | None:
        if w is None or w.ndim == 1:
            return w
        weights = self.likelihood.weights_of_points(*self._labels(y, w))
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

    def _labels(self, y: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return targets (n·T, ...), and one factor per position, (n·T,), or per target of a position, (n·T, m)."""
        if w is not None:
            w = (w.unsqueeze(-1).expand(-1, self.positions) if w.ndim == 1 else w).flatten(0, 1)
        return y.flatten(0, 1), w


PointWeights = Float[Tensor, " n"] | Float[Tensor, "n K"] | None


class Multitask(Likelihood):
    """A likelihood of several outputs, independent given the network: log p is a sum, and H is block-diagonal.

    Outputs are rows (n, ΣR): those of each likelihood, one after the other. Targets are rows (n, ΣM) in the same way,
    in which whole numbers are floating-point. Weights (n,) multiply the sum, and (n, K) its K terms. `co.linearize`
    makes it from a mapping of likelihoods, and from outputs and targets with the same keys.

    Args:
        likelihoods: the likelihoods by name.
        num_outputs: the number R of columns of each one's outputs.
        targets: the form of each one's targets, a shape and whether they are floating-point.

    Raises:
        ValueError: there are not as many numbers of outputs, or forms, as likelihoods.

    Examples:
        >>> heads = lambda params, x: {name: x @ weight for name, weight in params.items()}
        >>> weights = {"kind": torch.ones(2, 2), "value": torch.ones(2, 1)}
        >>> choice = {"kind": "classification", "value": co.likelihoods.Gaussian(0.1)}
        >>> lin = co.linearize((heads, weights), (x, {"kind": y, "value": x[:, :1]}), choice)
        >>> post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
        >>> post.predict(x)["value"].variance.shape, post.probabilities(x)["kind"].shape
        (torch.Size([8, 1]), torch.Size([8, 2]))
    """

    def __init__(
        self,
        likelihoods: Mapping[Name, Likelihood],
        num_outputs: Sequence[int],
        targets: Sequence[tuple[tuple[int, ...], bool]],
    ) -> None:
        self.likelihoods = dict(likelihoods)
        self.num_outputs = tuple(num_outputs)
        self.targets = tuple(TargetShape(tuple(shape), floating) for shape, floating in targets)
        if not len(self.likelihoods) == len(self.num_outputs) == len(self.targets) > 0:
            raise ValueError("Multitask needs a number of outputs and a form of targets for each likelihood.")

    def __repr__(self) -> str:
        return f"Multitask({self.likelihoods!r})"

    @property
    def kind(self) -> str:
        return ", ".join(f"{name}: {member.kind}" for name, member in self.likelihoods.items())

    @property
    def described(self) -> str:
        return ", ".join(f"{name}: {member.described}" for name, member in self.likelihoods.items())

    @property
    def members(self) -> tuple[Likelihood, ...]:
        return tuple(self.likelihoods.values())

    @property
    def missing(self) -> str | None:  # type: ignore[override]  # of any member
        return next((member.of_position.missing for member in self.members if member.of_position.missing), None)

    def split(self, f: Outputs, y: Tensor, w: Weights = None) -> list[tuple[Likelihood, Tensor, Tensor, Weights]]:
        return list(zip(self.members, f.split(self.num_outputs, -1), self._targets(y), self._weights(w)))

    def log_prob(self, f: Outputs, y: Tensor, w: PointWeights = None) -> Float[Tensor, " n"]:
        return torch.stack([member.log_prob(f, y, w) for member, f, y, w in self.split(f, y, w)]).sum(0)

    def residual(self, f: Outputs, y: Tensor, w: PointWeights = None) -> Outputs:
        return torch.cat([member.residual(f, y, w) for member, f, y, w in self.split(f, y, w)], -1)

    def hessian_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: PointWeights = None) -> OutputBlock:
        blocks = zip(self.split(f, y, w), u.split(self.num_outputs, -1))
        return torch.cat([member.hessian_product(f, u, y, w) for (member, f, y, w), u in blocks], -1)

    def root_product(self, f: Outputs, z: RootBlock, y: Tensor, w: PointWeights = None) -> OutputBlock:
        blocks = zip(self.split(f, y, w), z.split(self._columns_of_members("root_columns"), -1))
        return torch.cat([member.root_product(f, z, y, w) for (member, f, y, w), z in blocks], -1)

    def root_transpose_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: PointWeights = None) -> RootBlock:
        blocks = zip(self.split(f, y, w), u.split(self.num_outputs, -1))
        return torch.cat([member.root_transpose_product(f, u, y, w) for (member, f, y, w), u in blocks], -1)

    def root_columns(self, num_outputs: int) -> int:
        return sum(self._columns_of_members("root_columns"))

    def narrow_columns(self, num_outputs: int) -> int:
        return sum(self._columns_of_members("narrow_columns"))

    def narrow_root(
        self, f: Outputs, y: Tensor, w: PointWeights, start: int, stop: int
    ) -> Float[Tensor, "{stop}-{start} n C"]:
        root, row, column = f.new_zeros(stop - start, *f.shape), 0, 0
        for (member, g, targets, weights), width in zip(
            self.split(f, y, w), self._columns_of_members("narrow_columns")
        ):
            first, last = max(start, row), min(stop, row + width)
            if first < last:
                member_root = member.narrow_root(g, targets, weights, first - row, last - row)
                root[first - start : last - start, :, column : column + g.shape[1]] = member_root
            row, column = row + width, column + g.shape[1]
        return root

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        return self._target_rows(f, lambda member, g: member.sample(g, generator))

    def mc_residual(
        self, f: Outputs, y: Tensor, w: PointWeights = None, generator: torch.Generator | None = None
    ) -> Outputs:
        return torch.cat([member.mc_residual(f, y, w, generator) for member, f, y, w in self.split(f, y, w)], -1)

    def mean(self, f: Outputs) -> Float[Tensor, "n m"]:
        return torch.cat([member.mean(f) for member, f in zip(self.members, f.split(self.num_outputs, -1))], -1)

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        for (name, member), member_targets, width in zip(self.likelihoods.items(), self._targets(y), self.num_outputs):
            try:
                member.check_targets(member_targets, width)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"targets[{name!r}]: {error}") from error

    def any_targets(self, f: Outputs) -> Tensor:
        return self._target_rows(f, lambda member, g: member.any_targets(g))

    def counted(self, y: Tensor, w: PointWeights = None) -> Bool[Tensor, " n"] | None:
        """Return a mask of the points of which some target counts; None if all do."""
        parts = zip(self.members, self._targets(y), self._weights(w))
        masks = [member.counted(targets, weights) for member, targets, weights in parts]
        present = [mask.reshape(len(mask), -1).any(1) for mask in masks if mask is not None]
        return torch.stack(present).any(0) if len(present) == len(masks) else None

    @property
    def hyperparameters(self) -> tuple[Tensor, ...]:
        return tuple(tensor for member in self.members for tensor in member.hyperparameters)

    def with_hyperparameters(self, tensors: Sequence[Tensor]) -> Multitask:
        rest = iter(tensors)
        return self.with_members(
            member.with_hyperparameters([next(rest) for _ in member.hyperparameters]) for member in self.members
        )

    def with_members(self, members: Iterable[Likelihood]) -> Multitask:
        """Return a copy with other likelihoods of the same outputs and targets."""
        new = copy.copy(self)
        new.likelihoods = dict(zip(self.likelihoods, members))
        return new

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Multitask:
        return self.with_members(member.to(device, dtype) for member in self.members)

    def _columns_of_members(self, count: str) -> list[int]:
        """Return the numbers of columns of the members' roots, by the name of the method that counts them."""
        return [getattr(member, count)(R) for member, R in zip(self.members, self.num_outputs)]

    def _weights(self, w: Weights) -> list[Weights]:
        """Return each member's weights (n,)."""
        return [w] * len(self.members) if w is None or w.ndim == 1 else list(w.unbind(1))

    def _targets(self, y: Tensor) -> list[Tensor]:
        """Return each member's targets in their own shape, whole numbers as such."""
        pairs = zip(y.split([form.columns for form in self.targets], 1), self.targets)
        return [(block if form.floating else block.long()).reshape(len(y), *form.shape) for block, form in pairs]

    def _target_rows(self, f: Outputs, draw: Callable[[Likelihood, Tensor], Tensor]) -> Tensor:
        """Return targets that `draw` gives, as rows; classes become unit vectors where the data have probabilities."""
        rows = []
        for member, g, form in zip(self.members, f.split(self.num_outputs, -1), self.targets):
            drawn = draw(member, g)
            if form.floating and not drawn.is_floating_point() and drawn.shape[1:].numel() != form.columns:
                drawn = torch.nn.functional.one_hot(drawn, form.shape[-1])
            rows.append(drawn.reshape(len(drawn), -1).to(f.dtype))
        return torch.cat(rows, 1)
