"""linear_operator's own entries (solve, logdet, roots, samples), answered by our algorithms.

linear_operator's CG and Lanczos are never called. An operator with a closed form uses it. Others of at most
`DENSE_SIZE` rows are formed and factorised, which costs no more than iterating and has every gradient (where one is
asked for, operators with closed forms are formed, too); larger ones are only multiplied. An iteration that does not
converge raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from linear_operator import settings
from linear_operator.operators import (
    LinearOperator,
    RootLinearOperator,
    TriangularLinearOperator,
    to_linear_operator,
)
from torch import Tensor

from curvops.checkpoint import Place
from curvops.checks import checked_whole
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.core.cache import recorded
from curvops.linalg.core.limits import ROUNDINGS
from curvops.linalg.core.results import (
    INDEFINITE_REMEDY,
    Estimate,
    NotPositiveSemidefinite,
)
from curvops.linalg.core.symmetry import clearly_indefinite
from curvops.linalg.core.vectors import require_precision
from curvops.linalg.estimators.dense_spectrum import definite_logdet
from curvops.linalg.estimators.logdet import logdet
from curvops.linalg.estimators.spectral_density import spectral_density
from curvops.linalg.estimators.trace import trace
from curvops.linalg.functions.root_gradients import inverse_root, inverse_root_product
from curvops.linalg.solvers.cg import cg
from curvops.linalg.solvers.solve import Promises, default_rtol, solve, system_of
from curvops.linalg.spectra.eigsh import eigsh
from curvops.linalg.spectra.lanczos import lanczos
from curvops.linalg.spectra.svds import svds
from curvops.progress import Progress


class SolverContract:
    """The solver entries of `Operator`, which rely on its products alone."""

    # Our algorithms as methods, whose first argument A is the operator

    cg = cg
    """Solve by block conjugate gradients, see `co.linalg.cg`."""
    lanczos = lanczos
    """Tridiagonalise by Lanczos, see `co.linalg.lanczos`."""
    eigsh = eigsh
    """Find a few eigenpairs, see `co.linalg.eigsh`."""
    svds = svds
    """Find a few singular triplets, see `co.linalg.svds`."""
    stochastic_logdet = logdet
    """Estimate the log-determinant in nats, see `co.linalg.logdet`."""
    spectral_density = spectral_density
    """Estimate the density of eigenvalues with its band, see `co.linalg.spectral_density`."""

    def trace(
        self: Any,
        *,
        method: str | None = None,
        rtol: float | None = None,
        max_matvecs: int | None = None,
        generator: torch.Generator | None = None,
        memory_budget: int | None = None,
        progress: Progress = None,
    ) -> Estimate:
        """Return the exact trace, for no product, where the diagonal is known; else as `co.linalg.trace`.

        With `method=` it is always that of `co.linalg.trace`, "xtrace" by default.
        """
        if method is None and self.is_square and not self.batch_shape and not self.diagonal_matvecs:
            return Estimate.rounded(self._diagonal().double().sum(), self._diagonal_error().double().sum())
        return trace(
            self,
            method="xtrace" if method is None else method,
            rtol=rtol,
            max_matvecs=max_matvecs,
            generator=generator,
            memory_budget=memory_budget,
            progress=progress,
        )

    def _diagonal_error(self: Any) -> Tensor:
        """Return the largest change of the diagonal's entries by rounding."""
        error: Tensor = ROUNDINGS * torch.finfo(self.dtype).eps * self._diagonal().detach().abs()
        return error

    def plan(self: Any, columns: int = 1) -> routes.SolvePlan:
        """Return how systems with this many right-hand sides are solved, and why: `print(P.plan(8))` shows a table.

        It names for each route its products (at least), its bytes, and why it is not possible where it is not. Raises
        TypeError or ValueError unless columns is a whole number, at least 1. Cost: none; two products where symmetry
        is not promised.
        """
        system = system_of(self, checked_whole("columns", columns, 1), whole=True)
        return routes.SolvePlan({"solve": routes.routes(replace(system, sketch=self._takes_sketch))})

    # linear_operator's entries

    def require_small(self: Any, purpose: str, instead: str = "") -> None:
        """Raise ValueError where `purpose` needs a dense matrix of more than `DENSE_SIZE` columns."""
        if self.shape[-1] > routes.DENSE_SIZE:
            raise ValueError(
                f"{purpose} of a {tuple(self.shape)} {type(self).__name__} needs the dense matrix; {instead}call "
                ".to_dense() yourself if it fits in memory."
            )

    @property
    def _is_small(self: Any) -> bool:
        return bool(max(self.shape[-2:]) <= routes.DENSE_SIZE)

    @property
    def _takes_sketch(self) -> bool:
        """Whether `preconditioner` tries a sketch."""
        return False

    @property
    def _is_formed(self: Any) -> bool:
        """Whether the dense matrix is given, or small enough to be formed: then it is factorised."""
        return bool(self._is_small)

    def _closed_form(self) -> Any:
        """Return the `ClosedForm` of this operator, None where it has none."""
        return None

    def _exactly(self: Any, *others: Tensor) -> Any:
        """Return the closed form, None where there is none, or where the small dense matrix has more gradients."""
        form = self._closed_form()
        if form is None or not (self._is_small and recorded((*self.representation(), *others))):
            return form
        form.require_definite()
        return None

    def _dense(self: Any) -> Tensor:
        """Form the dense matrix, symmetrised where A is symmetric so that gradients inside A are too."""
        dense: Tensor = self.to_dense()
        return (dense + dense.mT) / 2 if self.symmetric else dense

    def solve(self: Any, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """Return A⁻¹ B (or L A⁻¹ B) for (n,), (n, K) or (..., n, K), differentiable in B, L and the tensors inside A.

        Raises `NotConverged` (a RuntimeError carrying the `Solution`) where the tolerance was not reached and
        `NotPositiveDefinite` (also linear_operator's `NotPSDError`) where A is indefinite; warns once where the
        dtype's precision was the limit. Cost: block CG, or the operator's closed form.
        """
        if not self.is_square:
            raise RuntimeError(f"solve needs a square operator, got {tuple(self.shape)}.")
        if right_tensor.shape[-1 if right_tensor.ndim == 1 else -2] != self.shape[-1]:
            raise RuntimeError(f"LinearOperator {tuple(self.shape)} cannot solve for {tuple(right_tensor.shape)}.")
        solution = self.solve_to(right_tensor)
        return solution if left_tensor is None else left_tensor @ solution

    def solve_to(self: Any, rhs: Tensor, rtol: float | None = None) -> Tensor:
        """Solve to a relative residual `rtol` (None: 1e-6, in float64 1.5e-8); see `co.linalg.solve`."""
        require_precision(self.dtype)
        return solve(self, rhs, rtol=rtol)

    def inv_quad(self: Any, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        """Return bᵀ A⁻¹ b per column (…, K), or summed over columns."""
        columns = inv_quad_rhs.unsqueeze(-1) if inv_quad_rhs.ndim == 1 else inv_quad_rhs
        terms = (columns * self.solve(columns)).sum(-2)
        return terms.sum(-1) if reduce_inv_quad else terms

    def inv_quad_logdet(
        self: Any, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        """Return the pair (bᵀ A⁻¹ b, log det A); a term not asked for is an empty or zero tensor."""
        zero = torch.zeros(self.batch_shape, dtype=self.dtype, device=self.device)
        quadratic = zero if inv_quad_rhs is None else self.inv_quad(inv_quad_rhs, bool(reduce_inv_quad))
        return quadratic, self.logdet() if logdet else zero

    def logdet(self: Any) -> Tensor:
        """Return log det A in nats, (...,): by closed form, dense Cholesky where A is small, or an `Estimate`.

        Use `stochastic_logdet` for its standard error. Raises NotPositiveSemidefinite where A is not positive definite.
        """
        require_precision(self.dtype)
        form = self._exactly()
        if form is not None:
            return form.logdet()
        if self._is_formed:
            return definite_logdet(self._dense())
        if self.batch_shape:
            return torch.stack([one.logdet() for one in self._members()]).reshape(self.batch_shape)
        value: Tensor = self._logdet_estimate().value
        return value

    def zero_mean_mvn_samples(self: Any, num_samples: int) -> Tensor:
        """Draw `num_samples` rows of N(0, A), (num_samples, ..., n)."""
        form = None if recorded(self.representation()) and self._is_small else self._closed_form()
        if form is not None:
            return form.draw(num_samples, None).mT
        if not self._is_formed and self.batch_shape:
            draws = [one.zero_mean_mvn_samples(num_samples) for one in self._members()]
            return torch.stack(draws, 1).unflatten(1, self.batch_shape)
        if not self._is_formed:
            return self._exact_draws(num_samples).mT  # exact, or an error: a truncated root would lose variance
        root = self.root_decomposition().root
        noise = torch.randn(*self.batch_shape, root.shape[-1], num_samples, dtype=self.dtype, device=self.device)
        return (root @ noise).movedim(-1, 0)

    def sqrt_inv_matmul(self: Any, rhs: Tensor, lhs: Tensor | None = None) -> Any:
        """Return A^-½ B, or the pair (L A^-½ B, diag(L A⁻¹ Lᵀ)), with the symmetric root.

        Differentiable in A, B and L. Dense where A is small, else by the closed form, else by contour quadrature
        (`co.linalg.inverse_sqrt`), which raises `FunctionNotConverged` where the tolerance was not reached and
        `NotPositiveSemidefinite` where A is not.
        """
        require_precision(self.dtype)
        if self.batch_shape and not self._is_small:
            return self._batched_sqrt_inv_matmul(rhs, lhs)
        form = None if self._is_small else self._closed_form()
        if form is not None:
            root = form.inverse_root
        elif self._is_small:
            dense_root = inverse_root(self._dense())
            root = dense_root.matmul
        else:
            root = partial(inverse_root_product, self, lower_bound=self._lower_bound())
        if lhs is None:
            return _by_vector(root, rhs)
        left = root(lhs.mT).mT
        return left @ rhs, left.square().sum(-1)

    def _batched_sqrt_inv_matmul(self: Any, rhs: Tensor, lhs: Tensor | None) -> Any:
        members = self._members()

        def each(given: Tensor) -> Tensor:
            return given.expand(*self.batch_shape, *given.shape[-2:]).flatten(0, -3)

        columns = each(rhs.unsqueeze(-1) if rhs.ndim == 1 else rhs)
        if lhs is None:
            found = torch.stack([one.sqrt_inv_matmul(B) for one, B in zip(members, columns)])
            found = found.unflatten(0, self.batch_shape)
            return found.squeeze(-1) if rhs.ndim == 1 else found
        pairs = [one.sqrt_inv_matmul(B, L) for one, B, L in zip(members, columns, each(lhs))]
        return tuple(torch.stack(part).unflatten(0, self.batch_shape) for part in zip(*pairs))

    def _members(self: Any) -> list[Any]:
        """Return the operators of a batch in a list."""
        return [self[index] for index in itertools.product(*map(range, self.batch_shape))]

    def _lower_bound(self) -> float | None:
        """Return a positive lower bound of A's eigenvalues, where one is known."""
        return None

    def diagonalization(self: Any, method: str | None = None) -> tuple[Tensor, LinearOperator]:
        """Return eigenvalues (m,) and vectors (n, m), all of them where A is small or `method` is "symeig".

        Else m = `_root_decomposition_size()` (at most n), the pairs of largest absolute value, by `eigsh`; a
        RuntimeError names those that did not converge.
        """
        if self._is_small or method == "symeig":
            return self._symeig(eigenvectors=True)
        m = min(self.shape[-1], self._root_decomposition_size())
        pairs = eigsh(self, m, "magnitude", rtol=default_rtol(self.dtype)).raise_if_failed()
        return pairs.values.to(self.dtype), to_linear_operator(pairs.vectors)

    def _symeig(
        self: Any, eigenvectors: bool = False, return_evals_as_lazy: bool | None = False
    ) -> tuple[Tensor, LinearOperator | None]:
        self.require_small("the eigendecomposition", "use .eigsh(k) for some of it, or ")
        require_precision(self.dtype)
        values, vectors = torch.linalg.eigh(self.to_dense())  # negative ones are kept: clamping would hide them
        return values, to_linear_operator(vectors) if eigenvectors else None

    def _svd(self: Any) -> tuple[LinearOperator, Tensor, LinearOperator]:
        longer = self if self.shape[-1] >= self.shape[-2] else self.mT
        longer.require_small("the singular value decomposition", "use .svds(k) for some of it, or ")
        U, values, Vt = torch.linalg.svd(self.to_dense(), full_matrices=False)
        return to_linear_operator(U), values, to_linear_operator(Vt.mT)

    def _choose_root_method(self) -> str:
        return "cholesky" if self._is_formed else "lanczos"

    def _cholesky(self: Any, upper: bool | None = False) -> TriangularLinearOperator:
        """Return the Cholesky factor; a matrix singular to rounding gets the least jitter that makes it definite.

        The jitter is relative to the largest entry of the diagonal (linear_operator's is absolute, and could be the
        whole variance of small targets), from n eps up to a hundred times linear_operator's. Raises
        NotPositiveSemidefinite where that is not enough.
        """
        dense: Tensor = self._dense()
        if not dense.numel():
            return TriangularLinearOperator(dense, upper=bool(upper))
        largest = dense.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        unit = dense / torch.where(largest > 0, largest, 1.0)
        eye = torch.eye(dense.shape[-1], dtype=dense.dtype, device=dense.device)
        added, most = 0.0, 100 * settings.cholesky_jitter.value(dense.dtype)
        while added <= most:
            L, info = torch.linalg.cholesky_ex(unit + added * eye if added else unit)
            if not bool(info.any()):
                L = L * largest.sqrt()
                return TriangularLinearOperator(L.mT if upper else L, upper=bool(upper))
            added = max(10 * added, len(eye) * torch.finfo(dense.dtype).eps)
        raise NotPositiveSemidefinite(
            f"this {type(self).__name__} has no Cholesky factor: it is not positive definite, beyond what rounding "
            f"explains. {INDEFINITE_REMEDY}"
        )

    def root_decomposition(self: Any, method: str | None = None) -> RootLinearOperator:
        """Return R with R Rᵀ ≈ A: Cholesky where A is small, else Lanczos of rank `_root_decomposition_size()`."""
        require_precision(self.dtype)
        if self._is_formed:
            self._require_psd("a root")
            return super().root_decomposition(method="cholesky" if method == "lanczos" else method)  # type: ignore
        return RootLinearOperator(self._root_decomposition())

    def _require_psd(self: Any, purpose: str) -> None:
        """Raise NotPositiveSemidefinite where a small A has a negative eigenvalue: a jitter would hide it."""
        if not self.psd and clearly_indefinite(self._dense().detach()):
            raise NotPositiveSemidefinite(
                f"{purpose} of this {type(self).__name__} does not exist: it has a negative eigenvalue. "
                f"{INDEFINITE_REMEDY}"
            )

    def _root_decomposition(self) -> Tensor:
        values, vectors = self._ritz_pairs()
        return vectors * values.clamp_min(0).sqrt()

    def root_inv_decomposition(
        self: Any, initial_vectors: Tensor | None = None, test_vectors: Tensor | None = None, method: str | None = None
    ) -> RootLinearOperator:
        """Return R with R Rᵀ ≈ A⁻¹: Cholesky where A is small, else from the Ritz pairs of Lanczos."""
        require_precision(self.dtype)
        if self._is_small:
            self._require_psd("a root")
            return super().root_inv_decomposition(  # type: ignore
                initial_vectors, test_vectors, method="cholesky" if method in (None, "lanczos") else method
            )
        values, vectors = self._ritz_pairs()
        return RootLinearOperator(vectors * values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt())

    def _ritz_pairs(self: Any) -> tuple[Tensor, Tensor]:
        result = lanczos(self, min(self.shape[-1], self._root_decomposition_size()))
        values, rotation = torch.linalg.eigh(result.T)
        return values.to(result.Q.dtype), result.Q @ rotation.to(result.Q.dtype)

    def _solve(self: Any, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Tensor:
        if num_tridiag:
            raise ValueError("tridiagonal matrices come from curvops.linalg.lanczos, not from solve.")
        return solve(self, rhs)

    # Methods that a subclass with a closed form replaces

    def promises(self: Any) -> Promises:
        """Return the properties that `co.linalg.solve` may rely on."""
        return Promises(self.symmetric, self.psd)

    def exact_solver(self) -> Callable[..., Tensor] | None:
        """Return the function (block, rtol) -> A⁻¹ block of a closed form, None where there is none."""
        form = self._closed_form()
        return None if form is None else form.solve

    def require_definite(self) -> None:
        """Raise NotPositiveSemidefinite (a ValueError) where a closed form shows A to be singular or indefinite."""
        form = self._closed_form()
        if form is not None:
            form.require_definite()

    def preconditioner(
        self,
        columns: int = 1,
        generator: torch.Generator | None = None,
        *,
        memory_budget: int | None = None,
        checkpoint: Place | None = None,
    ) -> Any:
        """Return M ≈ A⁻¹ for conjugate gradients with `columns` right-hand sides; None where none is known to pay."""
        return None

    def _logdet_estimate(self: Any, rtol: float = 0.01, **options: Any) -> Estimate:
        """Estimate log det A, with gradient: by closed form, else by `co.linalg.logdet` with its options."""
        form = self._closed_form()
        return logdet(self, rtol=rtol, **options) if form is None else form.logdet_estimate(rtol)


def _by_vector(of_block: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor:
    """Call a function of blocks (n, K) with a vector (n,) or a block."""
    return of_block(vectors.unsqueeze(-1)).squeeze(-1) if vectors.ndim == 1 else of_block(vectors)
