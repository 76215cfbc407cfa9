"""Fully connected networks of infinite width as gpytorch kernels: the NNGP and the tangent kernel in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.constraints import Interval
from gpytorch.priors import Prior
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.argument_types import Variances
from curvops.checks import check_choice, checked_number, checked_whole, refuse
from curvops.gp.operator_kernel import OperatorKernel
from curvops.linalg import Dense
from curvops.network.data.inputs import require_finite

KINDS = ("nngp", "ntk")


class InfiniteWidthKernel(OperatorKernel):
    """The kernel of a fully connected network whose hidden layers are infinitely wide: its NNGP or its tangent kernel.

    The network is z¹ = σ_w W¹x/√d + σ_b b¹, zˡ⁺¹ = σ_w Wˡ⁺¹φ(zˡ)/√n + σ_b bˡ⁺¹ with all W and b ~ N(0, 1), in the
    limit n → ∞; its outputs are independent, each with this kernel. With u, v ~ N(0, Kˡ(x, x')),

        K¹ = σ_w² x·x'/d + σ_b²,    Kˡ⁺¹ = σ_w² E[φ(u) φ(v)] + σ_b²
        Θ¹ = K¹,                    Θˡ⁺¹ = Kˡ⁺¹ + σ_w² E[φ'(u) φ'(v)] Θˡ

    "nngp" is K, the covariance of outputs; "ntk" is Θ, with all layers and biases trained.

    With `prior_precision=co.sampling.ntk_precision(model, σ_w, σ_b)`, the kernel J A⁻¹Jᵀ of a network of finite width
    (`co.TangentKernel` or `LinearizedKernel`) is the empirical kernel that converges to Θ, and the outputs have the
    prior covariance K. In neural_tangents it is `stax.serial` of `Dense(n, W_std=σ_w, b_std=σ_b)`.

    The variances σ_w² and σ_b² are gpytorch parameters, which are trained by marginal likelihood. Gradients in the
    inputs are also right at coincident points; for a rectifier's tangent kernel, which has a kink there, they are the
    mean of both sides. Matrices are curvops operators, as for `LinearizedKernel`, with the solves and determinants of
    curvops.

    Args:
        depth: the number of hidden layers, at least 0.
        activation: φ: "relu", "erf", "gelu" (the exact one, x Φ(x)) or "identity".
        kind: "nngp" or "ntk".
        weight_variance: the initial σ_w², a positive number, or depth + 1 of them, one per layer from the inputs on. A
            tensor determines the parameter's dtype; numbers get torch's default, whose rounding `.double()` keeps.
        bias_variance: the initial σ_b², in the same form; 0 is a network without biases.
        weight_variance_prior: a gpytorch prior of σ_w².
        weight_variance_constraint: a gpytorch constraint of σ_w²; None is `Positive()`.
        bias_variance_prior: a gpytorch prior of σ_b².
        bias_variance_constraint: a gpytorch constraint of σ_b²; None is `Positive()`.
        batch_shape: as in gpytorch's `Kernel`.
        active_dims: as in gpytorch's `Kernel`.

    Inputs are (..., n, d) and (..., m, d), the matrix (..., n, m), with any leading dimensions that broadcast. It costs
    some 20 passes over the matrix for each layer of depth, and for "relu" also d of them.

    Raises:
        TypeError, ValueError: an argument is of another kind; the number of variances is not that of the layers; inputs
            have no dimension, hold NaN or infinite values, or have batches that do not broadcast.

    Source: Neal 1996; Lee et al. 2018 (NNGP); Jacot et al. 2018 (NTK). The expectations: Cho and Saul 2009, Williams
    1998, Tsuchida et al. 2021.

    Examples:
        >>> import curvops as co
        >>> kernel = co.gp.InfiniteWidthKernel(weight_variance=2.0, bias_variance=0.0)
        >>> kernel(torch.eye(2)).to_dense().detach()  # for orthogonal points: Θ¹ = 0, K² = 1/π
        tensor([[2.0000, 0.3183],
                [0.3183, 2.0000]])
    """

    def __init__(
        self,
        depth: int = 1,
        activation: str = "relu",
        kind: str = "ntk",
        *,
        weight_variance: Variances = 2.0,
        bias_variance: Variances = 1.0,
        weight_variance_prior: Prior | None = None,
        weight_variance_constraint: Interval | None = None,
        bias_variance_prior: Prior | None = None,
        bias_variance_constraint: Interval | None = None,
        batch_shape: torch.Size | None = None,
        active_dims: Sequence[int] | None = None,
    ) -> None:
        super().__init__(batch_shape=batch_shape, active_dims=active_dims)
        self.depth = checked_whole("depth", depth, 0)
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("kind", kind, KINDS)
        self.activation, self.kind = activation, kind
        start = self._start("weight_variance", weight_variance)
        self._add_parameter("weight_variance", start, weight_variance_prior, weight_variance_constraint)
        self.has_bias = isinstance(bias_variance, bool) or not isinstance(bias_variance, Real) or bias_variance != 0
        without = not self.has_bias and (bias_variance_prior or bias_variance_constraint)
        refuse(without, "a prior or a constraint for the bias variance needs biases: pass bias_variance=1.0.")
        if self.has_bias:
            start = self._start("bias_variance", bias_variance)
            self._add_parameter("bias_variance", start, bias_variance_prior, bias_variance_constraint)

    def _start(self, name: str, variances: Any) -> Float[Tensor, "*batch L"]:
        """Return variances, one for all layers or one for each, in a given tensor's dtype or torch's default."""
        several = variances.flatten().tolist() if isinstance(variances, Tensor | np.ndarray) else variances
        values = [several] if isinstance(several, str) or not isinstance(several, Sequence) else list(several)
        layers = self.depth + 1
        refuse(len(values) not in (1, layers), f"{name} holds {len(values)} numbers: expected one, or {layers}.")
        checked = [checked_number(name, value, kind="a number or a sequence of them") for value in values]
        like = variances if isinstance(variances, Tensor) and variances.is_floating_point() else torch.empty(0)
        return like.new_tensor(checked).expand(*self.batch_shape, -1).clone()

    @property
    def weight_variance(self) -> Float[Tensor, "*batch L"]:
        """The weight variance σ_w², one number or one per layer."""
        return self._value("weight_variance")

    @weight_variance.setter
    def weight_variance(self, value: Any) -> None:
        self._set_value("weight_variance", value)

    @property
    def bias_variance(self) -> Float[Tensor, "*batch L"]:
        """The bias variance σ_b², one number or one per layer; 0 without biases."""
        return self._value("bias_variance") if self.has_bias else torch.zeros_like(self.weight_variance[..., :1])

    @bias_variance.setter
    def bias_variance(self, value: Any) -> None:
        self._set_value("bias_variance", value)

    def extra_repr(self) -> str:
        """Return depth, activation and kind, which torch prints among a module's parts."""
        return f"depth={self.depth}, activation={self.activation!r}, kind={self.kind!r}"

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> LinearOperator | Tensor:
        """Return the kernel's matrix (..., n, m), or its diagonal (..., n)."""
        for x in (x1,) if x2 is x1 else (x1, x2):
            require_finite("inputs", x)
        layers = *self.batch_shape, self.depth + 1
        weights, biases = (
            variance.expand(layers)[..., None, None].unbind(-3)
            for variance in (self.weight_variance, self.bias_variance)
        )
        cov = _first_layer(x1, x2, weights[0], biases[0], diag, self.activation == "relu")
        expectations, tangent = ACTIVATIONS[self.activation], cov.c
        for weight, bias in zip(weights[1:], biases[1:]):
            expected = expectations(cov)
            itself = (Covariance(variance, variance, variance, torch.zeros_like(variance)) for variance in cov[:2])
            a, b = (weight * expectations(pair).product for pair in itself)
            c = weight * expected.product + bias
            r = cov.r if expected.gap is None else _next_distance(a, b, bias, expected.gap)
            cov, tangent = Covariance(a + bias, b + bias, c, r), c + weight * expected.slope * tangent
        entries = tangent if self.kind == "ntk" else cov.c
        return entries.squeeze(-1) if diag else Dense(entries, psd=x1.shape == x2.shape and torch.equal(x1, x2))


def _first_layer(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor, diag: bool, distances: bool) -> Covariance:
    """Return the covariance of the first layer's outputs; with `diag` that of the i-th points, (..., n, 1)."""
    first, second = (_augmented(x, weight, bias) for x in (x1, x2))
    a, b = (vectors.square().sum(-1, keepdim=True) for vectors in (first, second))
    if diag:
        c = (first * second).sum(-1, keepdim=True)
    else:
        b, c = b.mT, first @ second.mT
        c = (c + c.mT) / 2 if x1 is x2 else c
    if not distances:
        return Covariance(a, b, c, torch.zeros_like(c))
    first, second = _unit(first), _unit(second)
    if diag:
        return Covariance(a, b, c, root((first - second).square().sum(-1, keepdim=True)))
    return Covariance(a, b, c, torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist"))


def _augmented(x: Tensor, weight: Tensor, bias: Tensor) -> Float[Tensor, "*b n e"]:
    """Return the vectors (σ_w x/√d, σ_b) of e = d + 1 numbers, whose inner products are K¹."""
    x = x.to(torch.promote_types(x.dtype, weight.dtype))
    scaled = (weight / x.shape[-1]).sqrt() * x
    return torch.cat([scaled, root(bias).expand_as(scaled[..., :1])], -1)


def _unit(vectors: Tensor) -> Tensor:
    """Return the vectors' directions; zero has none and stays unchanged."""
    length = root(vectors.square().sum(-1, keepdim=True))
    return vectors / length.masked_fill(length == 0, 1)


def _next_distance(a: Tensor, b: Tensor, bias: Tensor, gap: Tensor) -> Tensor:
    """Return r for variances a + σ_b² and b + σ_b² and covariance √(ab)(1 − gap) + σ_b², without cancellation."""
    middle, lengths = root(a) * root(b), root((a + bias) * (b + bias))
    some = lengths.masked_fill(lengths == 0, 1)
    return root(2 * (bias * (root(a) - root(b)).square() / (some + bias + middle) + middle * gap) / some)


# E[φ(u) φ(v)] and E[φ'(u) φ'(v)] for zero-mean Gaussian u, v in closed form, one row of `ACTIVATIONS` per φ. No formula
# takes a difference of close numbers when u and v nearly coincide, and all derivatives are finite there.


class Covariance(NamedTuple):
    """The variances a and b of u and v, their covariance c, and r² = 2 − 2c/√(ab), of which c keeps too few digits."""

    a: Float[Tensor, "*b n #m"]
    b: Float[Tensor, "*b #n m"]
    c: Float[Tensor, "*b n m"]
    r: Float[Tensor, "*#b #n #m"]
    """The distance |u/√a − v/√b| for vectors with these inner products; only `relu` reads it."""


class Expectations(NamedTuple):
    """The values E[φ(u) φ(v)], E[φ'(u) φ'(v)] and, if r is used, 1 − E[φ(u) φ(v)]/√(E[φ(u)²] E[φ(v)²])."""

    product: Tensor
    slope: Tensor
    gap: Tensor | None = None


def identity(cov: Covariance) -> Expectations:
    """Return the expectations for φ(u) = u, the products of a linear network."""
    return Expectations(cov.c, torch.ones_like(cov.c))


def relu(cov: Covariance) -> Expectations:
    """Return the expectations for φ(u) = max(u, 0): √(ab)(sin θ + (π − θ) cos θ)/2π and (π − θ)/2π, cos θ = c/√(ab).

    The angle θ = 2 arcsin(r/2) keeps all its digits when points nearly coincide. There E[φ'φ'] has a kink, like
    |x − x'|, whose derivative at the tip is set to 0, the mean over directions.

    Source: Cho and Saul 2009, the arc-cosine kernels of order 1 and 0; Kahan 2006 for the angle.
    """
    same = 64 * torch.finfo(cov.r.dtype).eps  # closer directions count as equal: their difference has no direction
    r = cov.r.masked_fill(cov.r <= same, 0)
    half = root((1 - r * r / 4).masked_fill(r * r >= 4 * (1 - same), 0))  # cos(θ/2)
    theta, sine, cosine = 2 * torch.atan2(r / 2, half), r * half, 1 - r * r / 2
    product = root(cov.a) * root(cov.b) * (sine + (math.pi - theta) * cosine) / (2 * math.pi)
    gap = r * r / 2 - (sine - theta * cosine) / math.pi
    return Expectations(product, (math.pi - theta) / (2 * math.pi), gap)


def erf(cov: Covariance) -> Expectations:
    """Return the expectations for φ(u) = erf(u).

    They are (2/π) arcsin(2c/√((1+2a)(1+2b))) and (4/π)/√((1+2a)(1+2b) − 4c²).

    Source: Williams 1998, equation 11; the second is its derivative in c.
    """
    width = (1 + 2 * (cov.a + cov.b) + 4 * _determinant(cov)).sqrt()
    return Expectations(2 / math.pi * torch.atan2(2 * cov.c, width), 4 / math.pi / width)


def gelu(cov: Covariance) -> Expectations:
    """Return the expectations for φ(u) = u Φ(u), Φ the normal distribution function.

    With Δ = (1+a)(1+b) − c² and the density D = 1/(2π√Δ), E[φφ] = c P + D (ab − c² + c²/(1+a) + c²/(1+b)) and
    E[φ'φ'] = P + c D (1/(1+a) + 1/(1+b) + 1/Δ), where P = 1/4 + arcsin(c/√((1+a)(1+b)))/2π is the probability that two
    normal variables lie below u and v.

    Source: Tsuchida, Pearce, van der Heide, Roosta and Gallagher 2021; here by integration by parts.
    """
    a, b, c, _ = cov
    determinant = _determinant(cov)
    delta = 1 + (a + b) + determinant
    density, shares = 1 / (2 * math.pi * delta.sqrt()), 1 / (1 + a) + 1 / (1 + b)
    below = 0.25 + torch.atan2(c, delta.sqrt()) / (2 * math.pi)
    product = c * below + density * (determinant + c * c * shares)
    return Expectations(product, below + c * density * (shares + 1 / delta))


ACTIVATIONS: dict[str, Callable[[Covariance], Expectations]] = {
    "relu": relu,
    "erf": erf,
    "gelu": gelu,
    "identity": identity,
}


def root(x: Tensor) -> Tensor:
    """Return √x, with the derivative 0 at 0."""
    none = x <= 0
    return x.masked_fill(none, 1).sqrt().masked_fill(none, 0)


def _determinant(cov: Covariance) -> Tensor:
    """Return ab − c², clamped if rounding makes it negative (u and v nearly coincide)."""
    return (cov.a * cov.b - cov.c * cov.c).clamp(min=0)
