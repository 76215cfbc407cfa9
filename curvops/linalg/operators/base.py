"""The base class of every operator: its properties, its products, and an algebra that returns only our classes."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    IdentityLinearOperator,
    LinearOperator,
    ZeroLinearOperator,
)
from torch import Tensor

from curvops.ambient import Memories, Progress
from curvops.argument_types import Mesh
from curvops.checkpoint import Place
from curvops.checks import carries_graph, check_like, checked_whole, refuse_modes, refuse_tangents, shown
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.cache import differentiable_once
from curvops.linalg.core.matrix_identity import Sources, Spaces, sources_of, spaces_of
from curvops.linalg.core.vectors import ROUNDINGS, Vectors
from curvops.linalg.estimators.spectral_density import spectral_density
from curvops.linalg.estimators.trace import trace
from curvops.linalg.operators.closed_form import ClosedForm, DiagonalPlusRoot
from curvops.linalg.operators.contract import LinearOperatorContract, positions
from curvops.linalg.operators.draws import draw_by_products, draw_dense
from curvops.linalg.solvers.cg import cg
from curvops.linalg.solvers.solve import solve, system_of
from curvops.linalg.spectra.eigsh import eigsh
from curvops.linalg.spectra.lanczos import lanczos
from curvops.linalg.spectra.svds import svds
from curvops.ranks.process_group import is_dtensor
from curvops.ranks.sharded_vectors import (
    Layouts,
    RowLayout,
    Sharded,
    layouts_of,
    over_ranks,
    stored,
    times_block,
    transposed_times_block,
    unwrapped,
)
from curvops.summary import name_of, summary

SHOWN = (
    *("shape", "dtype", "device", "symmetric", "psd", "mT", "matmul", "add_diagonal", "inverse", "solve", "cg", "plan"),
    *("preconditioner", "eigsh", "svds", "lanczos", "spectral_density", "trace", "logdet", "diagonal", "to_dense"),
    *("detached_from_weights", "detach", "sharded", "to", "to_scipy"),
)
"""The names of every operator that `dir` shows."""


def by_columns(product: Callable[[Tensor], Tensor], rhs: Tensor) -> Tensor:
    """Apply a product defined on (n, K) blocks to a vector (n,) or to a batch (..., n, K), as further columns."""
    if rhs.ndim == 1:
        return product(rhs.unsqueeze(-1)).squeeze(-1)
    if rhs.ndim == 2:
        return product(rhs)
    *batch, rows, columns = rhs.shape
    block = product(rhs.movedim(-2, 0).reshape(rows, -1))
    return block.reshape(-1, *batch, columns).movedim(0, -2)


class Operator(LinearOperatorContract):
    """A matrix known by its products: (m, n), usually far too large to be formed.

    A subclass stores tensors positionally (the first gives dtype and device) and everything else by keyword. It does no
    work in `__init__`, since linear_operator rebuilds an operator from its arguments at every product. It defines
    `_size`, `_product` on (n, K) blocks and, unless it is symmetric, `_transposed_product` on (m, K) blocks.

    Solvers rely on its tags `symmetric` and `psd` (positive semi-definite).

    Examples:
        >>> A = co.linalg.Dense(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), psd=True)
        >>> A @ torch.ones(2), A.mT.shape, A.add_diagonal(1.0).to_dense().diagonal()
        (tensor([3., 4.]), torch.Size([2, 2]), tensor([3., 4.]))
    """

    @cached_property
    def shape(self) -> torch.Size:
        """The shape, cached because linear_operator reads it many times for a sum or a product."""
        return self._size()

    _shown: ClassVar[tuple[str, ...]]
    """The names of a subclass that `dir` shows in addition; without it, all that it defines."""

    def __dir__(self) -> list[str]:
        """List what a user calls: `SHOWN`, and what a subclass adds or lists as `_shown`.

        The other methods of linear_operator work, too; most of them are internal.
        """
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, Operator) and kind is not Operator]
        added = {name for kind in kinds for name in vars(kind).get("_shown", vars(kind)) if name[0].islower()}
        return sorted({*SHOWN, *added - set(dir(Operator))})

    _damped_form: ClassVar[type[ClosedForm] | None] = None
    """The closed form of A + diag(d) for operators of this class, if it has one."""
    _in_formula: ClassVar[str] = ""
    """The format of `_made_of` inside another formula; empty for an operator that prints with its class."""

    @property
    def symmetric(self) -> bool:
        """Whether A = Aᵀ is known to hold."""
        return self.psd

    @property
    def psd(self) -> bool:
        """Whether A is known to be symmetric positive semi-definite."""
        return False

    @property
    def definite(self) -> bool:
        """Whether A is solved by CG, for which negative curvature is an error."""
        return self.psd

    @property
    def at_hand(self) -> bool:
        """Whether the dense matrix exists."""
        return False

    @property
    def spaces(self) -> Spaces:
        """The spaces of rows and columns, from the keyword `space`, which conversions and rebuilds keep."""
        space = self._kwargs.get("space")
        return space, space

    @property
    def sources(self) -> Sources | None:
        """The data that the operator sums over, from the keyword `sources`; None if unknown."""
        return self._kwargs.get("sources")

    @property
    def narrow_root(self) -> LinearOperator | None:
        """The root S (n, m) with A = S Sᵀ, if m is much smaller than n and S and Sᵀ cost what A does; else None.

        The eigenvalues of A are those of SᵀS and zeros, so that vectors of length m suffice to find them.
        """
        return None

    def detached_from_weights(self) -> LinearOperator:
        """Return the matrix as a constant, which may be added to operators linearised at other weights.

        Sums across weights are rejected, since they are the curvature of neither network; call this if such a sum is
        intended (yesterday's curvature as a prior, merged Fishers). Costs nothing; shares tensors and caches.
        """
        args = [arg.detached_from_weights() if isinstance(arg, Operator) else arg for arg in self._args]
        space, sources = self._kwargs.get("space"), self._kwargs.get("sources")
        changed: dict[str, Any] = {} if space is None else {"space": space.detached()}
        changed |= {} if sources is None else {"sources": sources.detach()}
        return self.__class__(*args, **self._kwargs | changed)

    @property
    def memories(self) -> Memories:
        """The memory budgets of the networks in A, within which algorithms on A allocate their vectors."""
        memories: Memories = frozenset()
        for arg in self._args:
            memories |= getattr(arg, "memories", frozenset())
        return memories

    @property
    def progress(self) -> Progress:
        """The setting of progress bars for algorithms on A, from the first network in A that has one."""
        for arg in self._args:
            if (progress := getattr(arg, "progress", None)) is not None:
                return progress
        return None

    # Products

    def _product(self, block: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} defines neither _product nor _matmul; an Operator needs one of them.")

    def _transposed_product(self, block: Tensor) -> Tensor:
        if not self.symmetric:
            raise TypeError(f"{type(self).__name__} is not symmetric and defines no _transposed_product.")
        return self._product(block)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return by_columns(self._product, rhs) if isinstance(rhs, Tensor) else times_block(self, rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        if isinstance(rhs, Tensor):
            return by_columns(self._transposed_product, rhs)
        return transposed_times_block(self, rhs)

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self.symmetric else algebra.Transposed(self)

    def matmul(self, other: Tensor | LinearOperator) -> Tensor | LinearOperator:
        """Multiply a vector (n,), a block (n, K), a batch (..., n, K), or another operator (a lazy product).

        It costs one product with A per column.

        Args:
            other: a tensor of n rows, or an operator.

        Returns:
            The product, of the kind of `other`.

        Raises:
            ValueError: dtype, device or size do not fit.
            RuntimeError: the call is inside a transform of `torch.func`, or in forward mode.
        """
        if isinstance(other, LinearOperator):
            return algebra.Product(self, other)
        if isinstance(other, Sharded):
            return self._matmul(other)
        if type(other) is not Tensor and is_dtensor(other):
            return self._times_shards(unwrapped(other))
        if not isinstance(other, Tensor):
            hint = " Pass torch.as_tensor(vector)." if isinstance(other, np.ndarray) else ""
            raise TypeError(f"an operator multiplies tensors and operators, got {type(other).__name__}.{hint}")
        self.require_fit(other)
        if other.ndim > 1 and not other.numel():  # there is nothing to multiply
            batch = torch.broadcast_shapes(self.batch_shape, other.shape[:-2])
            return other.new_zeros(*batch, self.shape[-2], other.shape[-1])
        tensors = self.representation()
        refuse_tangents((other, *tensors))
        of_matrix = carries_graph(tensors)
        if of_matrix or other.ndim > 2 or carries_graph((other,)):
            product: Tensor = super().matmul(other)
            return differentiable_once(product) if of_matrix else product
        with torch.no_grad():  # without linear_operator's copy of this operator for a backward pass
            return self._matmul(other)

    def _times_shards(self, block: Sharded) -> Any:
        """Multiply a block that was a DTensor; the result is a DTensor, too."""
        self.require_fit(block)
        if carries_graph(self.representation()):
            raise TypeError("no gradient passes through sharded vectors: detach() the operator.")
        image = vec.product(over_ranks(self, block.rows))(vec.as_columns(block))
        return stored(vec.shaped_as(image, block))

    def require_fit(self, other: Vectors) -> None:
        """Raise ValueError if this cannot be multiplied."""
        refuse_modes(self.dtype, self.device)
        check_like("the right-hand side", other, self, type(self).__name__)
        if not vec.has_rows(other, self.shape[-1]):
            raise ValueError(f"cannot multiply an operator of shape {tuple(self.shape)} by {tuple(other.shape)}.")

    @property
    def layouts(self) -> Layouts:
        """The layouts over ranks of sharded vectors, by rows and by columns of A, if a part of A determines them."""
        return next((layouts for arg in self._args if (layouts := layouts_of(arg)) is not None), None)

    def sharded(self, mesh: Mesh) -> LinearOperator:
        """Return the operator on vectors that are sharded over a one-dimensional device mesh.

        Everything that algorithms keep with it (bases, sketches, random vectors) is then sharded by rows, and results
        are DTensors with `Shard(0)`: ``G.sharded(mesh).eigsh(50).vectors``. All ranks of the mesh make the same calls.
        If the data are sharded, too, their process group has the ranks of the mesh.

        A product gathers some columns at a time, and adds up or keeps the rows of each rank.

        Args:
            mesh: a one-dimensional DeviceMesh.

        Returns:
            The operator for vectors that are DTensors.

        Raises:
            ValueError: the mesh has several dimensions, or its ranks are not those of the data.
        """
        return over_ranks(self, RowLayout.on(mesh, self.shape[-2]))

    def on_layouts(self, rows: RowLayout, columns: RowLayout) -> LinearOperator:
        """Return the operator on vectors in these layouts; a class that shows its parts applies them to each part."""
        return on_shards.OnShards(self, rows, columns)

    # The printed form takes no product, and reads no number from an accelerator

    def __repr__(self) -> str:
        size = " × ".join(map(str, self.shape))
        facts = (size, self._made_of(), name_of(self.dtype), str(self.device))
        return f"{type(self).__name__}({', '.join(filter(None, facts))})"

    def _made_of(self) -> str:
        """Return what the matrix is made of, in a few words or as a formula of its parts."""
        return ""

    def _as_part(self) -> str:
        """Return the operator as a part of a formula, without its size."""
        words = self._made_of()
        if self._in_formula:
            return self._in_formula.format(words)
        return f"{type(self).__name__}({words})" if words else type(self).__name__

    # The algebra: every expression returns an Operator

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, ZeroLinearOperator) or (isinstance(other, int | float) and other == 0):
            return self
        if isinstance(other, numbers.Number) or (isinstance(other, Tensor) and other.ndim < 2):
            raise TypeError(f"A + {shown(other)} would add to every entry: use add_diagonal({shown(other)}).")
        if isinstance(other, ConstantDiagLinearOperator) and other.diag_values.ndim == 1:
            return self.add_diagonal(other.diag_values.squeeze(0))
        if isinstance(other, ConstantDiagLinearOperator | IdentityLinearOperator | DiagLinearOperator):
            return self.add_diagonal(other._diagonal())
        if isinstance(other, Tensor):
            other = given_matrix.Dense(other)
        if not isinstance(other, LinearOperator):
            raise TypeError(f"cannot add {type(other).__name__} to {type(self).__name__}; expected an operator.")
        return damped.add(self, other)

    def __neg__(self) -> LinearOperator:
        return self.mul(-1.0)

    def __sub__(self, other: Any) -> LinearOperator:
        return self + (-other)

    def _mul_constant(self, other: Any) -> LinearOperator:
        factor = torch.as_tensor(other, dtype=self.dtype, device=self.device)
        return algebra.Scaled(self, factor) if factor.ndim else self._times(factor)

    def _times(self, factor: Tensor) -> LinearOperator:
        """Return c A for a number c, 0-d; a class whose multiples are of the same class overrides it."""
        return algebra.Scaled(self, factor)

    def _mul_matrix(self, other: Any) -> LinearOperator:
        self.require_small("an elementwise product")
        return given_matrix.Dense(self.to_dense() * other.to_dense())

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        """Return A + diag(d) as `Damped`, d a number, a 0-d tensor, or a vector (n,); a batch (..., n) broadcasts.

        It costs nothing until it is used.

        Args:
            diag: d: a number, a 0-d tensor, a vector (n,), or a batch (..., n).

        Returns:
            The sum, a `Damped` or an operator of the same structure.

        Raises:
            ValueError: the sizes do not fit, or A is not square.
        """
        if not self.is_square:
            raise ValueError(f"add_diagonal needs a square operator, got {tuple(self.shape)}.")
        diag = unwrapped(diag).whole() if is_dtensor(diag) else diag
        if not isinstance(diag, numbers.Real | Tensor | np.ndarray):
            raise TypeError(f"the diagonal must be a number or a tensor ({self.shape[-1]},), got {shown(diag)}.")
        shift = torch.as_tensor(diag, dtype=self.dtype, device=self.device)
        shift = shift.squeeze(-1) if shift.ndim and shift.shape[-1] == 1 and self.shape[-1] != 1 else shift
        if shift.ndim and shift.shape[-1] != self.shape[-1]:
            raise ValueError(f"the diagonal has {shift.shape[-1]} entries, but the operator has {self.shape[-1]} rows.")
        return damped.Damped(self, shift)

    def inverse(self, rtol: float | None = None) -> LinearOperator:
        """Return A⁻¹ as a lazy operator, a solve per product: J @ A.inverse() @ J.mT composes. `rtol` as in `cg`."""
        return damped.Inverse(self, rtol=rtol)

    # Entries, slices, batches

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        rows, columns = map(partial(positions, device=self.device), (row_index, col_index), self.matrix_shape)
        return self if rows is None and columns is None else algebra.Sliced(self, rows=rows, columns=columns)

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        batch_shape = torch.Size(batch_shape)
        return self if batch_shape == self.batch_shape else algebra.Expanded(self, batch=batch_shape)

    # Our algorithms as methods; the operator is their first argument A

    cg = cg
    """Solve by block conjugate gradients, see `co.linalg.cg`."""
    lanczos = lanczos
    """Tridiagonalise by Lanczos, see `co.linalg.lanczos`."""
    eigsh = eigsh
    """Find a few eigenpairs, see `co.linalg.eigsh`."""
    svds = svds
    """Find a few singular triplets, see `co.linalg.svds`."""
    trace = trace
    """Return the trace, exact if the diagonal is known, see `co.linalg.trace`."""
    spectral_density = spectral_density
    """Estimate the density of eigenvalues with its band, see `co.linalg.spectral_density`."""

    def _diagonal_and_error(self) -> tuple[Tensor, Tensor]:
        """Return the diagonal, and the largest change of its entries by rounding."""
        diagonal = self._diagonal()
        return diagonal, ROUNDINGS * torch.finfo(self.dtype).eps * diagonal.detach().abs()

    # Facts about A: a subclass with a closed form, a root or a preconditioner overrides these

    @property
    def _is_small(self) -> bool:
        return bool(max(self.matrix_shape) <= routes.DENSE_SIZE)

    @property
    def _is_formed(self) -> bool:
        """Whether the dense matrix exists, or is small enough to be formed, so that it is factorised."""
        return self.at_hand or self._is_small

    def require_small(self, purpose: str, instead: str = "") -> None:
        """Raise ValueError if `purpose` needs a dense matrix of more than `DENSE_SIZE` columns."""
        if self.shape[-1] > routes.DENSE_SIZE:
            raise ValueError(
                f"{purpose} of a matrix {tuple(self.shape)} is dense; {instead}call .to_dense() if it fits in memory."
            )

    def _dense(self) -> Tensor:
        """Form the dense matrix, symmetrised if A is symmetric so that gradients inside A are symmetric, too."""
        matrix = self.to_dense()
        return (matrix + matrix.mT) / 2 if self.symmetric else matrix

    def diagonal_plus_root(self) -> DiagonalPlusRoot | None:
        """Return this matrix as a diagonal plus a term of low rank, if it has this form."""
        return None

    def _closed_form(self) -> Any:
        """Return the `ClosedForm` of this operator, or None."""
        return None

    def _exact_form(self) -> Any:
        """Return the closed form; None if there is none, or if the small dense matrix carries more gradients."""
        form = self._closed_form()
        if form is None or not (self._is_small and carries_graph(self.representation())):
            return form
        form.require_definite()
        return None

    def _lower_bound(self) -> float | None:
        """Return a positive lower bound of A's eigenvalues, if one is known."""
        return None

    def exact_solver(self) -> Callable[[Tensor], Tensor] | None:
        """Return the function block -> A⁻¹ block of a closed form, or None."""
        form = self._closed_form()
        return None if form is None else form.solve

    def require_definite(self) -> None:
        """Raise NotPositiveSemidefiniteError (a ValueError) if a closed form shows that A is singular or indefinite."""
        form = self._closed_form()
        if form is not None:
            form.require_definite()

    @property
    def _takes_sketch(self) -> bool:
        """Whether `preconditioner` tries a sketch."""
        return False

    def preconditioner(
        self,
        columns: int = 1,
        generator: torch.Generator | None = None,
        *,
        memory_budget: int | None = None,
        checkpoint: Place | None = None,
    ) -> Any:
        """Return M ≈ A⁻¹ for conjugate gradients with `columns` right-hand sides; None if none is known to pay off."""
        return None

    # Solutions and determinants

    def plan(self, columns: int = 1) -> routes.SolvePlan:
        """Return how systems with this many right-hand sides are solved, and why: `print(P.plan(8))` shows a table.

        For each route it lists the least number of products, the bytes and, for routes that are not possible, the
        reason. It costs nothing, or two products if the symmetry of A is not known.

        Args:
            columns: the number of right-hand sides.

        Returns:
            The SolvePlan, which prints as a table.

        Raises:
            TypeError, ValueError: columns is not a whole number, at least 1.
        """
        system = system_of(self, checked_whole("columns", columns, 1), whole=True)
        return routes.SolvePlan({"solve": routes.routes(replace(system, sketch=self._takes_sketch))})

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """Return A⁻¹ B (or L A⁻¹ B) for (n,), (n, K) or (..., n, K), differentiable in B, L and the tensors inside A.

        It warns once if the dtype's precision was the limit. Cost: that of block CG, or of the operator's closed form.

        Args:
            right_tensor: B, (n,), (n, K) or (..., n, K).
            left_tensor: L, (..., m, n), or None.

        Returns:
            A⁻¹ B, or L A⁻¹ B.

        Raises:
            ConvergenceError: the tolerance was not reached; the error, a RuntimeError, has the `Solution`.
            NotPositiveDefiniteError: A is indefinite (it is also linear_operator's `NotPSDError`).
        """
        if not self.is_square:
            raise RuntimeError(f"solve needs a square operator, got {tuple(self.shape)}.")
        if isinstance(right_tensor, Tensor) and not vec.has_rows(right_tensor, self.shape[-1]):  # as in linear_operator
            raise RuntimeError(f"LinearOperator {tuple(self.shape)} cannot solve for {tuple(right_tensor.shape)}.")
        solution = solve(self, right_tensor)
        return solution if left_tensor is None else left_tensor @ solution

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        """Draw k columns of N(0, A), (n, k), all at once; `draw` keeps to the memory budget.

        A class with a root overrides it. Otherwise a small matrix is factorised; for a large one tagged as positive
        semidefinite, noise is multiplied by its square root; any other matrix raises ValueError.
        """
        if self._is_formed:
            return draw_dense(self, k, generator)
        if self.psd and not self.batch_shape:
            return draw_by_products(self, k, generator)
        raise ValueError(f"no root of this {type(self).__name__} is known, nor that it is positive semidefinite.")


class UnaryOperator(Operator):
    """An operator built from an operator A, its first argument, with A's properties unless a class overrides them."""

    _shown: ClassVar[tuple[str, ...]] = ("base",)

    def __init__(self, base: LinearOperator, *args: Any, **kwargs: Any) -> None:
        super().__init__(base, *args, **kwargs)
        self.base = base

    @property
    def spaces(self) -> Spaces:
        return spaces_of(self.base)

    @property
    def sources(self) -> Sources | None:
        return sources_of(self.base)

    @property
    def symmetric(self) -> bool:
        return vec.is_symmetric(self.base)

    @property
    def psd(self) -> bool:
        return vec.is_psd(self.base)

    def _size(self) -> torch.Size:
        return self.base.shape

    def _made_of(self) -> str:
        return as_part(self.base)

    def _transpose_nonbatch(self) -> LinearOperator:
        transposed = self.base.mT
        return self if transposed is self.base else self.__class__(transposed, *self._args[1:], **self._kwargs)


def as_part(value: Any) -> str:
    """Return an operator, of curvops or another library, as a part of a formula."""
    return value._as_part() if isinstance(value, Operator) else type(value).__name__


def joined(parts: Sequence[Any], sign: str) -> str:
    """Return parts of a formula with a sign between them; of many parts only the first four."""
    more = [f"… ({len(parts)} in all)"] if len(parts) > 4 else []
    return f" {sign} ".join([*map(as_part, parts[:4]), *more])


def number_of(value: Tensor, name: str) -> str:
    """Return a number as it prints; return its name for several numbers, or for a number on an accelerator."""
    return summary(value) if value.ndim == 0 and value.device.type == "cpu" else name


# The algebra's classes derive from Operator, and Operator's methods return them: the cycle is closed here.
from curvops.linalg.operators import algebra, damped, given_matrix  # noqa: E402
from curvops.ranks import on_shards  # noqa: E402
