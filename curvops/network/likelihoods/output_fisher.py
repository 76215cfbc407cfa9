"""The output Fisher between J and Jᵀ: each point's C × C curvature, as products and as columns of a square root."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvops.checkpoint import Checkpoint
from curvops.network.data.batches import Batch
from curvops.network.likelihoods.likelihood import HessianParts, Independent, Likelihood, unit_vectors

FisherKind = Literal["exact", "mc", "empirical"]


class OutputFisher(ABC):
    """The output Fisher H_n = Σ_r s_r s_rᵀ of each point n: the likelihood's own, or a sum over a few residuals."""

    likelihood: Likelihood

    @abstractmethod
    def num_columns(self, num_outputs: int) -> int:
        """Return R, the number of columns s_r per point for C outputs."""

    @abstractmethod
    def product(self, f: Float[Tensor, "n C"], u: Float[Tensor, "K n C"], batch: Batch) -> Float[Tensor, "K n C"]:
        """Return H u."""

    @abstractmethod
    def root_product(self, f: Float[Tensor, "n C"], z: Float[Tensor, "K n R"], batch: Batch) -> Float[Tensor, "K n C"]:
        """Return L z = Σ_r z_r s_r."""

    @abstractmethod
    def root_transpose_product(
        self, f: Float[Tensor, "n C"], u: Float[Tensor, "K n C"], batch: Batch
    ) -> Float[Tensor, "K n R"]:
        """Return Lᵀ u, the scalars s_rᵀ u: the adjoint of `root_product`."""

    def hessian_parts(self, f: Float[Tensor, "n C"], batch: Batch) -> HessianParts | None:
        """Return H by its parts, in float64, if they are known; see `Likelihood.hessian_parts`."""
        return None

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue a saved run, with its draws if targets are drawn."""
        return

    def counted(self, batch: Batch) -> Bool[Tensor, "n *T"] | None:
        """Return a mask of the points that count, or of the positions for sequences; None if all do."""
        return self.likelihood.counted(batch.any_targets, batch.weights)

    def weights_of_points(self, batch: Batch) -> Float[Tensor, "n *T"] | None:
        """Return one weight per point, or per position; see `Likelihood.weights_of_points`."""
        w = batch.weights
        return None if w is None else self.likelihood.weights_of_points(batch.any_targets, w)

    def columns(self, f: Float[Tensor, "n C"], batch: Batch, start: int, stop: int) -> Float[Tensor, "r n C"]:
        """Return the columns s_start … s_(stop−1) of every point."""
        return self.root_product(f, unit_vectors(f, self.num_columns(f.shape[1]), start, stop), batch)

    @property
    def narrow(self) -> OutputFisher:
        """The output Fisher with as few columns as are known to suffice, for sums over all of them."""
        return self


@dataclass(frozen=True, eq=False)
class Exact(OutputFisher):
    """The likelihood's output Fisher, R = C columns: the curvature of the GGN.

    With a `shift` (N, C) it is evaluated at the outputs f + shift, those of the linear model f + J δ.
    """

    likelihood: Likelihood
    shift: Tensor | None = None

    def num_columns(self, num_outputs: int) -> int:
        return self.likelihood.root_columns(num_outputs)

    def product(self, f: Tensor, u: Tensor, batch: Batch) -> Tensor:
        return self.likelihood.hessian_product(self.outputs_at(f, batch), u, batch.any_targets, batch.weights)

    def root_product(self, f: Tensor, z: Tensor, batch: Batch) -> Tensor:
        return self.likelihood.root_product(self.outputs_at(f, batch), z, batch.any_targets, batch.weights)

    def root_transpose_product(self, f: Tensor, u: Tensor, batch: Batch) -> Tensor:
        return self.likelihood.root_transpose_product(self.outputs_at(f, batch), u, batch.any_targets, batch.weights)

    @property
    def is_diagonal(self) -> bool:
        """Whether H is known to be diagonal, whatever the outputs."""
        return type(self.likelihood.of_position).hessian_parts is Independent.hessian_parts

    def hessian_parts(self, f: Tensor, batch: Batch) -> HessianParts | None:
        return self.likelihood.hessian_parts(self.outputs_at(f, batch).double(), batch.any_targets, batch.weights)

    def residual(self, f: Float[Tensor, "n C"], batch: Batch) -> Float[Tensor, "n C"]:
        """Return the gradient of each point's negative log-likelihood in its outputs."""
        return self.likelihood.residual(self.outputs_at(f, batch), batch.targets, batch.weights)

    def log_prob(self, f: Float[Tensor, "n C"], batch: Batch) -> Float[Tensor, " n"]:
        """Return each point's log-likelihood in nats."""
        return self.likelihood.log_prob(self.outputs_at(f, batch), batch.targets, batch.weights)

    @property
    def narrow(self) -> OutputFisher:
        return Narrow(self)

    def outputs_at(self, f: Float[Tensor, "n C"], batch: Batch) -> Float[Tensor, "n C"]:
        """Return the outputs at which H is evaluated."""
        return f if self.shift is None else f + self.shift[batch.start : batch.start + len(f)]


class FromResiduals(OutputFisher):
    """The sum H_n = Σ_m r_m r_mᵀ over a few residuals, which needs few rows J_nᵀ r_m however many outputs there are."""

    def product(self, f: Tensor, u: Tensor, batch: Batch) -> Tensor:
        return self.root_product(f, self.root_transpose_product(f, u, batch), batch)


class FromColumns(FromResiduals):
    """An output Fisher that is defined by its columns."""

    @abstractmethod
    def columns(self, f: Tensor, batch: Batch, start: int, stop: int) -> Tensor: ...

    def root_product(self, f: Tensor, z: Tensor, batch: Batch) -> Tensor:
        return torch.einsum("mnc,knm->knc", self._all_columns(f, batch), z)

    def root_transpose_product(self, f: Tensor, u: Tensor, batch: Batch) -> Tensor:
        return torch.einsum("mnc,knc->knm", self._all_columns(f, batch), u)

    def _all_columns(self, f: Tensor, batch: Batch) -> Tensor:
        return self.columns(f, batch, 0, self.num_columns(f.shape[1]))


class Unit(FromColumns):
    """The identity H = I: the columns are unit vectors, and the rows of Lᵀ J are those of J itself."""

    def num_columns(self, num_outputs: int) -> int:
        return num_outputs

    def counted(self, batch: Batch) -> None:
        return None

    def columns(self, f: Tensor, batch: Batch, start: int, stop: int) -> Tensor:
        return unit_vectors(f, f.shape[1], start, stop)


class Narrow(FromColumns):
    """The likelihood's output Fisher by the narrowest root that the likelihood knows: a softmax has C − 1 columns."""

    def __init__(self, exact: Exact) -> None:
        self.exact, self.likelihood = exact, exact.likelihood

    def num_columns(self, num_outputs: int) -> int:
        return self.likelihood.narrow_columns(num_outputs)

    def hessian_parts(self, f: Tensor, batch: Batch) -> HessianParts | None:
        return self.exact.hessian_parts(f, batch)

    def columns(self, f: Tensor, batch: Batch, start: int, stop: int) -> Tensor:
        at = self.exact.outputs_at(f, batch)
        return self.likelihood.narrow_root(at, batch.any_targets, batch.weights, start, stop)


@dataclass(eq=False)
class Sampled(FromColumns):
    """The Monte-Carlo Fisher: residuals (M, N, C), divided by √M, at targets drawn once from the model."""

    likelihood: Likelihood
    draws: Tensor

    def resume(self, checkpoint: Checkpoint) -> None:
        earlier = checkpoint.attach("draws", lambda: self.draws)
        self.draws = self.draws if earlier is None else earlier

    def num_columns(self, num_outputs: int) -> int:
        return len(self.draws)

    def columns(self, f: Tensor, batch: Batch, start: int, stop: int) -> Tensor:
        return self.draws[start:stop, batch.start : batch.start + f.shape[0]]


@dataclass(frozen=True, eq=False)
class Empirical(FromResiduals):
    """The empirical Fisher: one outer product per point, of the residual at the true target (R = 1).

    With more than one of `positions` T, a point is a sequence of T tokens, each with its own outer product (R = T). A
    sample weight is a number of points: it multiplies the outer product, and its root multiplies the residual. A point
    with several weights, one for each position or target, counts with the largest; the others are relative to that.
    With `whole` the rows are the gradients themselves, in which weights multiply the residual.
    """

    likelihood: Likelihood
    positions: int = 1
    whole: bool = False

    def num_columns(self, num_outputs: int) -> int:
        return self.positions

    def root_product(self, f: Tensor, z: Tensor, batch: Batch) -> Tensor:
        return (self._residuals(f, batch) * z.unsqueeze(-1)).flatten(2)

    def root_transpose_product(self, f: Tensor, u: Tensor, batch: Batch) -> Tensor:
        return torch.einsum("ntc,kntc->knt", self._residuals(f, batch), u.unflatten(2, (self.positions, -1)))

    def columns(self, f: Tensor, batch: Batch, start: int, stop: int) -> Tensor:
        r = self._residuals(f, batch)
        columns = r.new_zeros(stop - start, *r.shape)
        index = torch.arange(start, stop, device=r.device)
        columns[index - start, :, index] = r[:, start:stop].transpose(0, 1)
        return columns.flatten(2)

    def _residuals(self, f: Tensor, batch: Batch) -> Float[Tensor, "n T C"]:
        r = self.likelihood.residual(f, batch.targets, batch.weights).unflatten(1, (self.positions, -1))
        roots = self._weight_roots(batch)
        return r if roots is None else r / roots.where(roots > 0, 1).unsqueeze(-1)

    def weigh(self, z: Float[Tensor, "K n T"], batch: Batch) -> Float[Tensor, "K n T"]:
        """Return z times √w of each row: the weighted gradient is √w times the row of this root."""
        roots = self._weight_roots(batch)
        return z if roots is None else z * roots

    def _weight_roots(self, batch: Batch) -> Float[Tensor, "n T"] | None:
        w = None if self.whole else self.weights_of_points(batch)
        if w is None:
            return None
        w = w.unsqueeze(1) if w.ndim == 1 else w
        return (w.amax(1, keepdim=True) if self.positions == 1 else w.expand(-1, self.positions)).sqrt()


@dataclass(frozen=True, eq=False)
class Root:
    """The square root L of one batch's H = L Lᵀ, which reduces J to the rows Lᵀ J."""

    fisher: OutputFisher
    batch: Batch

    def num_columns(self, num_outputs: int) -> int:
        """Return the number R of columns."""
        return self.fisher.num_columns(num_outputs)

    def columns(self, f: Float[Tensor, "n C"], start: int, stop: int) -> Float[Tensor, "r n C"]:
        """Return the columns start … stop − 1 of every point."""
        return self.fisher.columns(f, self.batch, start, stop)


IDENTITY = Root(Unit(), Batch((), torch.empty(0)))
"""The root L = I for any points: the rows are those of J itself."""


class RootJacobian:
    """The map Lᵀ J: a push of J followed by Lᵀ, or L followed by a pull; it costs what J costs, however few its rows.

    On an engine it is an engine itself; on a differentiable map it carries gradients in the likelihood's
    hyperparameters.
    """

    def __init__(self, whole: Any, root: Root) -> None:
        self.whole, self.root = whole, root
        self.kind, self.nbytes = getattr(whole, "kind", None), getattr(whole, "nbytes", 0)
        self.points: slice = getattr(whole, "points", slice(None))

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        """The outputs f(θ, inputs)."""
        outputs: Tensor = self.whole.outputs
        return outputs

    def push(self, tangents: Any) -> Float[Tensor, "K n R"]:
        """Return Lᵀ J V."""
        pushed = self.whole.push(tangents)  # first, because a streamed push also computes the outputs
        return self.root.fisher.root_transpose_product(self.outputs, pushed, self.root.batch)

    def pull(self, cotangents: Float[Tensor, "K n R"]) -> Any:
        """Return Jᵀ L U, in the form of J's pull."""
        return self.whole.pull(self.root.fisher.root_product(self.outputs, cotangents, self.root.batch))
