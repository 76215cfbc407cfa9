"""Kronecker-factored curvature: a block B ⊗ A for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar, cast, get_args

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import Progress
from curvops.checkpoint import Place, begin, seed_of
from curvops.checks import carries_graph, check_choice, in_transform
from curvops.linalg import DirectSum, Kronecker, Operator
from curvops.linalg.core.algorithm import algorithm
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.memory import Memory
from curvops.linalg.core.partition import whole_partition
from curvops.linalg.core.sources import Sources, scale_sources
from curvops.linalg.core.spaces import Space
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.linalg.operators.direct_sum import DirectSumForm
from curvops.linalg.operators.kronecker import EigenKroneckerForm, KroneckerForm, decompose
from curvops.network import OutputFisher
from curvops.operators.kfac.kfac_factors import (
    Bias,
    Sharing,
    eigenvalue_corrected,
    kfac_blocks,
)
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.user_operator import UserOperator

TOLD = "progress", "memory"
"""The keywords of layer blocks that belong to the linearisation, not to the matrix."""


class LayerBlocksForm(DirectSumForm):
    """The closed form of layer blocks plus a diagonal; layers too large for Cholesky need a multiple of I."""

    @cached_property
    def kronecker_forms(self) -> dict[tuple[str, ...], EigenKroneckerForm]:
        """The forms of the blocks that are Kronecker products, by the names of their parameters."""
        blocks = zip(cast(LayerBlocks, self.base).names, self.forms)
        return {names: form for names, form in blocks if isinstance(form, EigenKroneckerForm)}

    @cached_property
    def decomposed(self) -> list[ClosedForm]:
        """The forms of all blocks, with their eigendecompositions computed together."""
        self.decompose(self.forms)
        return self.forms

    def decompose(self, forms: Iterable[ClosedForm]) -> None:
        """Compute the eigendecompositions of some of the blocks together."""
        blocks = (form.base for form in forms if isinstance(form, KroneckerForm))
        decompose(blocks, self.base.progress, self.base.memory)


class LayerBlocks(DirectSum):
    """A block-diagonal operator with a block for each layer's parameters; the base class of KFAC and EKFAC."""

    _shown = ()
    _damped_form: ClassVar[type[ClosedForm] | None] = LayerBlocksForm

    def __init__(
        self,
        *blocks: Operator,
        positions: Any,
        cache: Cache | None = None,
        space: Space | None = None,
        names: tuple[tuple[str, ...], ...] = (),
        sources: Sources | None = None,
        progress: Progress = None,
        memory: Memory | None = None,
    ) -> None:
        ambient = {"progress": progress, "memory": memory}
        self._store(blocks, positions, cache, space=space, names=names, sources=sources, **ambient)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The parameters of each block."""
        return self._kwargs["names"]

    @property
    def progress(self) -> Progress:
        return self._kwargs["progress"]

    @property
    def memory(self) -> Memory | None:
        """The budget for decompositions."""
        return self._kwargs["memory"]

    def _made_of(self) -> str:
        return f"{len(self.blocks)} blocks"

    def in_place(self, *beside: Tensor) -> bool:
        return not carries_graph((*beside, *self.representation())) and not in_transform()

    def _times(self, factor: Tensor) -> LinearOperator:
        options = {name: self._kwargs[name] for name in ("positions", "space", "names", *TOLD)}
        blocks = (block._mul_constant(factor) for block in self.blocks)
        return LayerBlocks(*blocks, **options, sources=scale_sources(self.sources, factor))

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        if isinstance(diag, Tensor) and diag.ndim == 2 and diag.shape == self.shape and len(diag) > 1:
            raise ValueError(
                f"the diagonal is a matrix {tuple(diag.shape)}: give a number or a vector (D,). To add a matrix, write "
                f"{type(self).__name__} + prior, which is solved by conjugate gradients."
            )
        return super().add_diagonal(diag)


class KroneckerCurvature(UserOperator, LayerBlocks):
    """Layer blocks built from Kronecker factors, in one or two walks over the data."""

    STORED = "positions"

    @algorithm
    def __init__(
        self,
        lin: Linearization,
        fisher: str = "exact",
        sharing: str = "expand",
        mc_samples: int = 1,
        generator: torch.Generator | None = None,
        bias: str = "joint",
        checkpoint: Place | None = None,
    ) -> None:
        check_choice("sharing", sharing, get_args(Sharing))
        check_choice("bias", bias, get_args(Bias))
        output = lin.output_fisher(fisher, mc_samples, generator).narrow  # all walks use the same draws
        seed = seed_of(getattr(output, "generator", None))

        def problem() -> dict[str, Any]:
            return lin.problem() | (lin.order if fisher == "mc" else {})

        begin(type(self).__name__, checkpoint, problem, lin.theta.device, True, lin.ranks, lin=None, generator=seed)
        blocks = kfac_blocks(lin, output, sharing, bias)
        # Each selected tensor lies in one block as a whole, so there is nothing to check.
        positions = whole_partition([block.positions for block in blocks], lin.theta.device)
        operators = {block.names: block.operator for block in blocks}
        names = tuple(operators)
        del blocks  # so that factors can be freed before the walk is over
        corrected = self._operators(lin, output, operators)
        ambient: dict[str, Any] = {"progress": lin.passes.progress, "memory": lin.memory}
        super().__init__(*corrected, positions=positions, names=names, **ambient, **lin.origin)

    @staticmethod
    def _operators(
        lin: Linearization, output: OutputFisher, operators: dict[tuple[str, ...], Operator]
    ) -> list[Operator]:
        """Return the blocks from those with Kronecker factors, by the names of their parameters; this may empty it."""
        return list(operators.values())


class KFAC(KroneckerCurvature):
    """A block-diagonal approximation of the GGN (D, D): B ⊗ A for a layer's weight and bias (Martens & Grosse 2015).

    A is the mean of a aᵀ over inputs (with a one appended for the bias), and B the sum of δ δᵀ over the columns of the
    output Fisher's square root; a sample of weight two counts as two in both. Linear layers, convolutions (a block for
    each group) and embeddings have factors. Normalisation and other layers get their exact block if they have up to
    1,024 parameters, and its exact diagonal beyond (a `NoFactorsWarning` names them), so that no model is rejected.
    Layers that share weights have one block. A layer with M rows for N points, a different number for each (atoms of
    graphs, packed sequences, tokens that a mask selects), has A = (1/M) Σ_i a_i a_iᵀ and B = Σ_i Σ_r δ_ir δ_irᵀ, sums
    over its rows i and the root's columns r: those of T positions, with M in place of N·T (Eschenhagen et al. 2023).

    Small eigenvalues are accurate for factors with up to 512 columns, which are summed in float64 whatever the data's
    dtype, and for wider factors that sum fewer rows than columns, whose eigenvalues come from these rows. For other
    factors a `PrecisionWarning` warning is issued if the prior precision is below the rounding of single precision.

    With a prior that is constant in each layer, products, solves, log-determinants and samples have a closed form in
    the eigenbases of A and B, which are computed once; the first two predictions at few points need no eigenbasis of a
    factor beside one of at most 8 columns (an adapter of low rank). With a prior that varies within a layer, layers of
    up to 2,048 weights are factorised. If a larger layer is among them, conjugate gradients and probes compute
    everything, preconditioned by the closed form under each layer's geometric mean if the prior is close to it. An
    added term of low rank (an update with form="low_rank") keeps the closed form, by Woodbury's identity.
    `heuristic_damping` gives Martens & Grosse's factored damping instead.

    Cost to build: a forward pass, a backward pass for each column (C, of a softmax C − 1, `mc_samples`, or 1), and the
    factors' matrix products; a last layer needs no columns, but the sum of H, one product. A product is two matrix
    products per layer. Memory: Σ 2·(in² + out²) numbers. Choose it if the GGN's own products cost too much and a
    diagonal is too crude.

    Args:
        lin: the linearised network.
        fisher: "exact", "mc" (targets drawn from the model) or "empirical" (the true targets).
        sharing: for a layer that is applied at several positions, "expand" treats each position as a separate point,
            and "reduce" first averages a and sums δ over the positions that count, or over the rows of each point
            (Eschenhagen et al. 2023; embeddings always expand). If a layer in one call for all rows has as many rows
            of each point as the outputs have positions, they are taken to be these positions, in their order.
        mc_samples: the number of targets drawn per point with fisher="mc".
        generator: the source of the draws.
        bias: "joint" for one block with the weight, or "separate" for its own block B, which ignores correlations with
            the weight; the two may then have different prior precisions.
        checkpoint: a folder for the sums over the points processed so far, saved at most every half minute, and for the
            result. A build that was killed resumes from it and gives bitwise the same result. A checkpoint of another
            network, other data or other options is rejected.

    Raises:
        ValueError: `fisher`, `sharing` or `bias` is unknown, or a selection splits a layer.

    Examples:
        >>> K = co.KFAC(lin)
        >>> K.shape, K.add_diagonal(1.0).solve(torch.ones(17)).shape
        (torch.Size([17, 17]), torch.Size([17]))
    """

    def heuristic_damping(self, shift: float) -> LinearOperator:
        """Return (B + √λ/π I) ⊗ (A + π√λ I) for Kronecker blocks and + λ I for others (Martens & Grosse 2015, §6.3).

        The result is Kronecker-factored, but has cross terms that the exact B ⊗ A + λ I does not have.

        Args:
            shift: λ > 0.

        Returns:
            The damped operator, block by block.
        """
        damped = [
            block.heuristic_damping(shift) if isinstance(block, Kronecker) else block.add_diagonal(shift)
            for block in self.blocks
        ]
        return DirectSum(*damped, positions=self.partition, space=self.spaces[0], sources=self.sources)


class EKFAC(KroneckerCurvature):
    """KFAC with exact second moments in each block's eigenbasis (D, D): U diag(s) Uᵀ, U = U_B ⊗ U_A.

    In Frobenius norm it is never further from the GGN's blocks than KFAC, and its trace is exact. Choose it over KFAC
    if the second walk is affordable: solves and samples cost the same.

    Cost to build: that of KFAC, its eigendecompositions, and a second walk with a matrix product for each column (for a
    layer that is applied at one position: one for all columns). A product is four matrix products per layer. Memory:
    that of KFAC and D numbers.

    Args:
        lin: the linearised network.
        fisher: "exact", "mc" or "empirical", as in `KFAC`.
        sharing: "expand" or "reduce", as in `KFAC`.
        mc_samples: the number of targets drawn per point with fisher="mc".
        generator: source of the draws.
        bias: "joint" or "separate", as in `KFAC`.
        checkpoint: a folder for the sums over the points done so far, and for the result, as in `KFAC`.

    Raises:
        ValueError: `fisher`, `sharing` or `bias` is unknown, or the selection splits a layer.

    Source: George et al. 2018.

    Examples:
        >>> K = co.EKFAC(lin)
        >>> K.shape, K.add_diagonal(1.0).solve(torch.ones(17)).shape
        (torch.Size([17, 17]), torch.Size([17]))
    """

    @staticmethod
    def _operators(
        lin: Linearization, output: OutputFisher, operators: dict[tuple[str, ...], Operator]
    ) -> list[Operator]:
        return eigenvalue_corrected(lin, output, operators)
