"""The likelihood of several outputs with a likelihood each, such as a class and a value."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvops.network.data.named_outputs import Name, TargetShape
from curvops.network.likelihoods.likelihood import Likelihood, OutputBlock, Outputs, RootBlock, Weights

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
            raise ValueError(
                f"Multitask needs a number of outputs and a form of targets for each likelihood; given "
                f"{len(self.likelihoods)} likelihoods, {len(self.num_outputs)} numbers and {len(self.targets)} forms."
            )

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
        members = zip(self.members, f.split(self.num_outputs, -1), self.targets)
        drawn = [(member.sample(f, generator), form) for member, f, form in members]
        return torch.cat([_as_row(y, form).to(f.dtype) for y, form in drawn], 1)

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
        drawn = zip((m.any_targets(g) for m, g in zip(self.members, f.split(self.num_outputs, -1))), self.targets)
        return torch.cat([_as_row(y, form).to(f.dtype) for y, form in drawn], 1)

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

    def snapshot(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Multitask:
        return self.with_members(member.snapshot(device, dtype) for member in self.members)

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


def _as_row(drawn: Tensor, form: TargetShape) -> Tensor:
    """Return drawn targets as rows; classes become unit vectors where the data have probabilities."""
    if form.floating and not drawn.is_floating_point() and drawn.shape[1:].numel() != form.columns:
        drawn = torch.nn.functional.one_hot(drawn, form.shape[-1])
    return drawn.reshape(len(drawn), -1)
