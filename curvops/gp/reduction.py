"""A posterior with few features for many points: inducing points, leading or random features of J.

W (D, K), with orthonormal columns, spans the features in weights whitened by the prior. They keep the part
Q = J A^-½W WᵀA^-½ Jᵀ of the prior's kernel K = J A⁻¹ Jᵀ. The data inform only the features, through the K × K matrix
WᵀA^-½ G A^-½W, which a pass over the data computes; it is diag(g) after a rotation of W, and then

    Σ = A^-½ (I − W g/(1 + g) Wᵀ) A^-½,

the covariance of the Laplace posterior whose curvature is Ĝ = A^½W g WᵀA^½. At inducing points it is that of Seeger,
Williams & Lawrence 2003 ("DTC") and of Titsias 2009, who derives it as the optimum of a bound. ELLA (Deng, Zhou & Zhu
2022) omits the prior's part outside the features: `without_rest`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.ambient import SMALL_BYTES, columns_at_a_time
from curvops.argument_types import Points, PriorMean, PriorPrecision
from curvops.checks import check_choice, check_options, checked_whole, refuse
from curvops.linalg import Diagonal, Estimate, LowRank, Operator, cholesky, nystrom
from curvops.linalg.core.vectors import combine, gram, independent_basis, part, rounding_level
from curvops.linalg.operators.algebra import Product
from curvops.network import Exact, read_precision
from curvops.operators import GGN, Linearization, TangentKernel
from curvops.posterior import GaussianPosterior, Laplace
from curvops.posterior.gaussians.laplace import make_laplace
from curvops.posterior.gaussians.updating import checked_posterior
from curvops.posterior.terms import check_linearization

FEATURES = ("inducing", "leading", "random")


@dataclass(frozen=True, eq=False)
class Reduction:
    """The features at the time of construction: Ĝ, the prior A, its mean entry, g, tr(A⁻¹G), its rounding, the rows."""

    curvature: LowRank
    prior: Tensor
    mean: Float[Tensor, ""]
    values: Float[Tensor, " K"]
    trace: Float[Tensor, ""]
    rounding: float
    rows: Int[Tensor, "K 2"] | None


@dataclass(frozen=True, eq=False, repr=False)
class ReducedPosterior(Laplace):
    """A Laplace posterior whose curvature acts only on K features; `co.gp.reduced_posterior` makes it.

    It predicts, draws, is tuned, and works in `co.gp.LaplaceModel` like every `co.posterior.Laplace`. The number
    `remainder` bounds its distance from the exact posterior, for the prior of the features and for multiples of it. A
    file keeps the posterior without these bounds: `co.load` returns a `Laplace`.

    Examples:
        >>> reduced = co.gp.reduced_posterior(lin, 4, prior_precision=1.0, check_mode=False)
        >>> reduced.predict(x).mean.shape
        torch.Size([8, 2])
    """

    reduction: Reduction | None = None

    @property
    def rank(self) -> int:
        """The number K of features."""
        return len(self._made.values)

    @property
    def rows(self) -> Int[Tensor, "K 2"] | None:
        """The inducing rows of J as (training point, output), in the order chosen; None for other features."""
        return self._made.rows

    @property
    def remainder(self) -> Estimate:
        """The trace tr(A⁻¹(G − Ĝ)) = Σ_n tr H_n(K_nn − Q_nn) that the features leave out, in nats.

        Calling it t, KL(reduced ‖ exact) ≤ t/2 (Titsias 2009; Burt, Rasmussen & van der Wilk 2019), and the exact
        posterior's log evidence is between this one's minus t/2 and this one's. It is exact up to rounding, which its
        bias bound covers.

        Raises ValueError if the prior or the curvature has been replaced by others than the features were made for.
        """
        made, scale = self._made, self._scale
        left = made.trace - made.values.sum()
        rounding = torch.maximum(made.rounding * made.trace, -left)
        return Estimate.rounded(left.clamp_min(0) / scale, rounding / scale, size=made.trace / scale)

    @property
    def error(self) -> Estimate:
        """The share of the prior's covariance at the data that the features leave out, tr(A⁻¹(G − Ĝ)) / tr(A⁻¹G).

        Raises as `remainder` does.
        """
        return self.remainder * (self._scale / float(self._made.trace))

    @property
    def factor(self) -> float:
        """The factor κ ≥ 1 that bounds the exact posterior's covariance Σ*: Σ/κ ≤ Σ* ≤ κ Σ, for all predictions.

        κ = 1 + (t + √(t² + 4t))/2 with t the remainder; it is guaranteed, and seldom sharp. Raises as `remainder` does.
        """
        remainder = self.remainder
        t = float(remainder.value) + float(remainder.bias_bound)
        return 1 + (t + math.sqrt(t * t + 4 * t)) / 2

    def log_evidence_bound(self) -> Estimate:
        """Return a lower bound of the exact posterior's log evidence at θ*, this one's minus t/2 (Titsias 2009).

        If K is small, use it to choose the prior precision among multiples of that of the features: a weak prior has
        much variance outside them, which the bound counts and `log_evidence` does not. Raises as `remainder` does.
        """
        whole, left = self.log_evidence(mode="map"), self.remainder
        bound = torch.as_tensor(whole.bias_bound).to(left.value) + torch.as_tensor(left.bias_bound) / 2
        return Estimate.rounded(whole.value.to(left.value) - left.value / 2, bound)

    def without_rest(self) -> GaussianPosterior:
        """Return the posterior of a prior without weights outside the features: A^-½ W (1 + g)⁻¹ Wᵀ A^-½.

        It is that of ELLA, and of a subset of regressors. Its covariance never exceeds the exact one, is too small
        far from the features, and is 0 where they vanish. A prediction costs one product of J with K vectors, not C
        backward passes. It has no precision, since Σ is singular. Raises as `remainder` does.
        """
        made = self._made
        values = self.temperature * made.mean / (self._scale + made.values)
        vectors = made.curvature.vectors / (made.prior if made.prior.ndim == 0 else made.prior.unsqueeze(-1))
        return GaussianPosterior.of(self.lin, covariance=LowRank(vectors, values.to(vectors), **self.lin.origin))

    @property
    def _made(self) -> Reduction:
        assert self.reduction is not None
        return self.reduction

    @property
    def _scale(self) -> float:
        """The factor between the prior and the prior for which the features were made."""
        made, prior = self._made, self.prior.diagonal
        ratio = None if prior is None else (prior.detach() / made.prior).double()
        if ratio is None or self.curvature is not made.curvature or bool(ratio.max() > (1 + 1e-5) * ratio.min()):
            raise ValueError("what the features leave out is known only for multiples of the prior they were made for.")
        return float(ratio.mean())


def reduced_posterior(
    lin: Linearization,
    rank: int | None = None,
    prior_precision: PriorPrecision = 1.0,
    prior_mean: PriorMean = 0.0,
    temperature: float = 1.0,
    *,
    features: str = "inducing",
    points: Points | None = None,
    candidates: int | None = None,
    generator: torch.Generator | None = None,
    check_mode: bool = True,
) -> ReducedPosterior:
    """Make the Laplace posterior of K features of the network's tangent kernel, for many points N·C and weights D.

    Its prior is N(m, A⁻¹) in all weights, but the data inform only K directions. If K is the rank of J, it is the exact
    posterior, `co.laplace(lin, co.GGN)`. The mean is that of the network, θ*.

    Args:
        lin: the linearisation, from `co.linearize`.
        rank: K. There may be fewer features if the kernel's rank is smaller.
        prior_precision: A, a positive number, a vector (D,) or a mapping {glob over parameter names: number}.
        prior_mean: as in `co.laplace`.
        temperature: as in `co.laplace`.
        features: "inducing", the rows of J that a pivoted Cholesky of K = J A⁻¹ Jᵀ chooses (Harbrecht, Peters &
            Schneider 2012); "leading", the leading eigenvectors of A^-½GA^-½ (by a Nyström sketch), the best of all
            for `remainder`; "random", the leading combinations of random rows of J (ELLA, Deng et al. 2022).
        points: inputs in the network's form; all of their rows of J are the features. Replaces a rank.
        candidates: how many random rows features="random" chooses from; None is 4 K.
        generator: the source of rows and sketches.
        check_mode: as in `co.laplace`.

    Returns:
        A `ReducedPosterior`, whose `error`, `remainder` and `factor` measure its distance from the exact posterior.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the rank is below 1 or above N·C or D, both or neither of rank and points are given, the D × K
            numbers of the features exceed the memory budget of `lin` (the message names the largest rank), or the
            likelihood's curvature is zero at all points.

    Cost: C backward passes for the trace, and K products with G for g. Besides, inducing points take K products of J
    with one vector each, and leading features 1.5 K products with G, and as many for g. Memory: three arrays of as many
    vectors (D); for random features one array of the candidates and two of K; for inducing points also two of K vectors
    (N·C). A prediction takes C backward passes and a product of J with K vectors.

    Examples:
        >>> reduced = co.gp.reduced_posterior(lin, 4, prior_precision=1.0, check_mode=False)
        >>> reduced.probabilities(x).shape
        torch.Size([8, 2])
    """
    check_linearization(lin)
    check_options(temperature=temperature, generator=generator)
    check_choice("features", features, FEATURES)
    prior = read_precision("prior_precision", prior_precision, lin.model.selection, lin.theta)
    choice = FeatureChoice(
        lin, prior.detach(), features, *_checked_counts(lin, rank, points, features, candidates), generator
    )
    with torch.no_grad():
        reduction = choice.reduce(points)
    made = make_laplace(lin, reduction.curvature, prior_precision, prior_mean, temperature)
    whole = checked_posterior(made, check_mode)
    return ReducedPosterior(**{field.name: getattr(whole, field.name) for field in fields(whole)}, reduction=reduction)


@dataclass(frozen=True, eq=False)
class FeatureChoice:
    """The choice of K features of one kind, in weights whitened by the prior A."""

    lin: Linearization
    prior: Tensor
    kind: str
    rank: int
    candidates: int
    generator: torch.Generator | None

    @property
    def root(self) -> Tensor:
        """The root A^½ as a column (D, 1), or 0-d."""
        return self.prior.sqrt() if self.prior.ndim == 0 else self.prior.sqrt().unsqueeze(-1)

    @property
    def whitened(self) -> Operator:
        """The whitened curvature A^-½ G A^-½."""
        scale = Diagonal(self.prior.rsqrt().expand_as(self.lin.theta))
        return Product(scale, GGN(self.lin), scale)

    def reduce(self, points: Any) -> Reduction:
        """Choose the features and compute Ĝ."""
        exact = Exact(self.lin.likelihood)
        diagonal = self.lin.curvature_diagonal(exact)
        trace = (diagonal.double() / self.prior).sum()
        refuse(not (trace > 0), "the loss has no curvature at these points: the posterior is the prior.")
        chosen = None
        if points is not None:
            basis = self._basis(self.lin.jacobian(points).formed())
        elif self.kind == "leading":
            basis = self._leading()
        else:
            chosen = self._pivots() if self.kind == "inducing" else self._drawn()
            basis = self._basis(self.lin.jacobian().rows_at(chosen))
        values, basis = self._rotate(basis)
        mean = self.prior.double().mean()
        vectors = basis if self.prior.ndim == 0 else basis.mul_(self.root / mean.sqrt().to(basis))
        curvature = LowRank(vectors, (mean * values).to(vectors), **self.lin.origin)
        terms = self.lin.num_data * self.lin.num_outputs
        rounding = rounding_level(basis.dtype, max(terms, self.lin.num_parameters))
        rows = None
        if chosen is not None and self.kind == "inducing":
            rows = torch.stack([chosen // self.lin.num_outputs, chosen % self.lin.num_outputs], 1)
        return Reduction(curvature, self.prior, mean, values, trace, rounding, rows)

    def _pivots(self) -> Int[Tensor, " K"]:
        """Return the rows of K chosen by a greedy pivoted Cholesky: fewer than K if its range is exhausted."""
        kernel = TangentKernel(self.lin, self.prior)
        return cholesky(kernel, self.rank, memory_budget=_bytes(kernel, 2 * self.rank)).pivots

    def _drawn(self) -> Int[Tensor, " M"]:
        """Return random rows of K, without repetition."""
        terms, source = self.lin.num_data * self.lin.num_outputs, self.generator
        order = torch.randperm(terms, generator=source, device=None if source is None else source.device)
        return order[: self.candidates].to(self.lin.theta.device)

    def _basis(self, rows: Float[Tensor, "D M"]) -> Float[Tensor, "D K"]:
        """Return an orthonormal basis of whitened rows of J: of all of them, or of their leading combinations."""
        R = rows.div_(self.root)
        products = gram(R, R).cpu()
        if R.shape[1] > self.rank:
            values, vectors = torch.linalg.eigh(products)
            independent = values > max(R.shape) * torch.finfo(R.dtype).eps * values[-1]
            scaled = vectors[:, independent] / values[independent].sqrt()
            R = combine(R, scaled[:, -self.rank :].to(R.device))
            products = gram(R, R).cpu()
        return independent_basis(R, products)

    def _leading(self) -> Float[Tensor, "D K"]:
        """Return a basis that contains the leading eigenvectors of A^-½GA^-½."""
        columns = _sketch_columns(self.lin.num_parameters, self.rank)
        sketch = nystrom(
            self.whitened, columns, generator=self.generator, memory_budget=_bytes(self.whitened, 3 * columns)
        )
        return sketch.U

    def _rotate(self, basis: Float[Tensor, "D M"]) -> tuple[Float[Tensor, " K"], Float[Tensor, "D K"]]:
        """Return g, descending and in float64, and W with WᵀA^-½GA^-½W = diag(g), by blocks of products with G."""
        G, count = self.whitened, basis.shape[1]
        longer = max(self.lin.num_parameters, self.lin.num_data * self.lin.num_outputs)
        width = columns_at_a_time(count, 4 * longer * basis.element_size(), self.lin.memory.room())
        blocks = [gram(basis, G._matmul(part(basis, i, min(count, i + width)))) for i in range(0, count, width)]
        reduced = torch.cat(blocks, 1)
        values, vectors = torch.linalg.eigh((reduced + reduced.mT) / 2)
        leading = slice(max(0, count - self.rank), None)
        return values[leading].flip(0).clamp_min(0), combine(basis, vectors[:, leading].flip(1))


def _sketch_columns(weights: int, rank: int) -> int:
    """Return the number of columns of a sketch for this many leading features."""
    # Half as many more as the features (Halko, Martinsson & Tropp 2011) leave 3–8 % more than the eigenvectors do where
    # the spectrum falls slowly, and ten more 20–40 % (`benchmarks.many_points`).
    return min(weights, rank + max(10, rank // 2))


def _bytes(op: Any, vectors: int) -> int:
    """Return the bytes of this many vectors."""
    return vectors * op.shape[-1] * op.dtype.itemsize


def _checked_counts(lin: Linearization, rank: Any, points: Any, features: str, candidates: Any) -> tuple[int, int]:
    """Return K, and how many rows or columns it is chosen from; raise ValueError if memory has no room for them."""
    if (rank is None) == (points is None):
        raise ValueError("pass the number of features, rank=100, or the inputs points=Z whose rows of J they are.")
    D, terms = lin.num_parameters, lin.num_data * lin.num_outputs
    given = features != "inducing" or candidates is not None
    refuse(points is not None and given, "points=Z are the features themselves: leave out features and candidates.")
    refuse(candidates is not None and features != "random", f'candidates need features="random", not {features!r}.')
    if points is not None:
        rank = lin.jacobian(points).shape[-2]
    checked_whole("rank", rank, 1, min(D, terms), "a whole number of features")
    drawn = min(terms, 4 * rank) if candidates is None else checked_whole("candidates", candidates, rank, terms)
    vectors = {"inducing": 3 * rank, "leading": 3 * _sketch_columns(D, rank), "random": drawn + 2 * rank}[features]
    numbers = vectors / rank * D + (2 * terms if features == "inducing" and points is None else 0)
    room, needed = max(SMALL_BYTES, lin.memory.room()), int(numbers * rank * lin.theta.element_size())
    if needed > room:
        fits = int(room / (numbers * lin.theta.element_size()))
        raise ValueError(f"{rank} features need {needed:,} bytes, the memory budget has {room:,}: room for {fits}.")
    return rank, drawn
