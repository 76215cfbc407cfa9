"""Repriorisation of white weights: of the readout by a linear regression, or of all by the empirical tangent kernel.

For the last features Ψ and Y ~ N(Ψω, λ I), ω ~ N(0, I), column by column, the posterior of the readout's weights is
N(μ, Σ), Σ = λ(λI + ΨᵀΨ)⁻¹ and μ = ΣΨᵀY/λ. T(φ) = μ + R φ with R Rᵀ = Σ; each form has its own root R and factorises its
own matrix. All are differentiable in Ψ any number of times, even if singular values coincide, since they factorise by
Cholesky. `TangentMap` changes all weights alike, with its exact log-determinant.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from curvops.checks import refuse
from curvops.errors import ConvergenceError
from curvops.linalg import Estimate, Operator, eigsh, logdet, minres
from curvops.network import Blocks, Model
from curvops.network.data.inputs import Inputs
from curvops.network.model.last_layer import layer_of_outputs
from curvops.sampling.reprior_problem import RepriorProblem

ReadoutFeatures = Float[Tensor, "n p"]
Targets = Float[Tensor, "n k"]
ReadoutWeights = Float[Tensor, "p k"]
MappedReadout = tuple[ReadoutWeights, Float[Tensor, ""]]
"""The weights ω = T(φ), and log|det ∂T/∂φ|."""


@dataclass(frozen=True)
class Identity:
    """The identity map T, the limit λ = ∞, at which the data change nothing."""

    def forward(self, features: ReadoutFeatures, targets: Targets, phi: ReadoutWeights) -> MappedReadout:
        """Return φ itself."""
        return phi, phi.new_zeros((), dtype=torch.float64)

    def inverse(self, features: ReadoutFeatures, targets: Targets, omega: ReadoutWeights) -> ReadoutWeights:
        """Return ω itself."""
        return omega


@dataclass(frozen=True)
class FeatureSpace:
    """The map T(φ) = L⁻ᵀ(L⁻¹ΨᵀY + √λ φ), with the Cholesky factor L Lᵀ = λI + ΨᵀΨ, (p, p); O(np² + p³) operations."""

    level: float

    def forward(self, features: ReadoutFeatures, targets: Targets, phi: ReadoutWeights) -> MappedReadout:
        """Return T(φ) and k Σ_i log(√λ / L_ii)."""
        L = factor(features.mT @ features, self.level)
        inner = solve_triangle(L, features.mT @ targets) + math.sqrt(self.level) * phi
        return solve_triangle(L.mT, inner, upper=True), log_root(L, self.level, phi.shape[-1])

    def inverse(self, features: ReadoutFeatures, targets: Targets, omega: ReadoutWeights) -> ReadoutWeights:
        """Return (Lᵀω − L⁻¹ΨᵀY)/√λ."""
        L = factor(features.mT @ features, self.level)
        return (L.mT @ omega - solve_triangle(L, features.mT @ targets)) / math.sqrt(self.level)


@dataclass(frozen=True)
class DataSpace:
    """The map T with the root R = I − ΨᵀL⁻ᵀB⁻¹Ψ, L Lᵀ = S = λI + ΨΨᵀ (n, n), B = L + √λ I (Andrews 1968).

    It takes O(n²p + n³) operations.

    R Rᵀ = Σ; the symmetric root of Σ differs from R by a rotation. It would need an eigendecomposition of S, which
    automatic differentiation cannot differentiate if two eigenvalues are equal, for example if a point occurs twice.
    """

    level: float

    def forward(self, features: ReadoutFeatures, targets: Targets, phi: ReadoutWeights) -> MappedReadout:
        """Return φ + ΨᵀL⁻ᵀ(L⁻¹Y − B⁻¹Ψφ) and k Σ_i log(√λ / L_ii)."""
        L = factor(features @ features.mT, self.level)
        change = solve_triangle(L, targets) - solve_triangle(self._shifted(L), features @ phi)
        omega = phi + features.mT @ solve_triangle(L.mT, change, upper=True)
        return omega, log_root(L, self.level, phi.shape[-1])

    def inverse(self, features: ReadoutFeatures, targets: Targets, omega: ReadoutWeights) -> ReadoutWeights:
        """Return v + ΨᵀB⁻ᵀΨv/√λ for v = ω − ΨᵀS⁻¹Y."""
        L = factor(features @ features.mT, self.level)
        gap = omega - features.mT @ solve_triangle(L.mT, solve_triangle(L, targets), upper=True)
        back = solve_triangle(self._shifted(L).mT, features @ gap, upper=True)
        return gap + features.mT @ back / math.sqrt(self.level)

    def _shifted(self, L: Tensor) -> Tensor:
        return L + math.sqrt(self.level) * torch.eye(len(L), dtype=L.dtype, device=L.device)


Conjugate = Identity | FeatureSpace | DataSpace
"""A change of variables ω = T(φ) at features Ψ and targets Y, with its log-determinant in float64 and its inverse."""


def factor(gram: Float[Tensor, "m m"], level: float) -> Float[Tensor, "m m"]:
    """Return L with L Lᵀ = gram + λI; NaN if it fails, so that a far proposal is rejected without an error."""
    L, info = torch.linalg.cholesky_ex(gram + level * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return L.masked_fill((info != 0)[..., None, None], math.nan)


def solve_triangle(
    triangle: Float[Tensor, "m m"], block: Float[Tensor, "m k"], upper: bool = False
) -> Float[Tensor, "m k"]:
    """Solve a triangular system."""
    return torch.linalg.solve_triangular(triangle, block, upper=upper)


def log_root(L: Float[Tensor, "m m"], level: float, columns: int) -> Float[Tensor, ""]:
    """Return log det Σ^½ of all columns, in float64."""
    return columns * (0.5 * math.log(level) - L.diagonal().double().log()).sum()


def condition(root: Float[Tensor, "r m"], level: float) -> float:
    """Return the condition number of λI + AᵀA, with A = root, from the smaller of AᵀA and AAᵀ in float64."""
    A = root.double()
    r, m = A.shape
    values = torch.linalg.eigvalsh(A.mT @ A if m <= r else A @ A.mT).clamp_min(0)
    lowest = float(values[0]) if m <= r else 0.0
    return (float(values[-1]) + level) / (lowest + level)


REMEDY = "make the network end with an nn.Linear whose output it returns, or change all weights alike with form='ntk'"


@dataclass(frozen=True, eq=False)
class Readout:
    """A linear readout f = s_w h Wᵀ + s_b b: inputs h of a layer, its weight W (C, d), bias b (C,) or none, factors s.

    An `nn.Linear` has s = 1; a custom layer may scale its parameters.
    """

    path: str
    layer: nn.Module
    weight: str
    bias: str | None
    factors: tuple[float, float]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weight and the bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def features(
        self, model: Model, values: Mapping[str, Tensor], inputs: Inputs, scale: Mapping[str, Tensor]
    ) -> Float[Tensor, "n p"]:
        """Return Ψ = [s_w h a_w^-½, s_b a_b^-½], whose product with the white weights is f; the bias is last."""
        h = inputs_of(self.layer, model, values, inputs)[0][0]
        columns = self.factors[0] * h * scale[self.weight][0]
        if self.bias is None:
            return columns
        return torch.cat([columns, (self.factors[1] * scale[self.bias][:1]).expand(len(h), 1)], 1)

    def matrix(self, white: Mapping[str, Tensor]) -> Float[Tensor, "p C"]:
        """Join the readout's blocks into one matrix."""
        W = white[self.weight].mT
        return W if self.bias is None else torch.cat([W, white[self.bias].unsqueeze(0)])

    def blocks(self, matrix: Float[Tensor, "p C"]) -> Blocks:
        """Split a matrix into the readout's blocks, the inverse of `matrix`."""
        if self.bias is None:
            return {self.weight: matrix.mT}
        return {self.weight: matrix[:-1].mT, self.bias: matrix[-1]}


def inputs_of(
    layer: nn.Module, model: Model, values: Mapping[str, Tensor], inputs: Inputs
) -> tuple[list[Tensor], Tensor]:
    """Return the arguments of each call of the layer, as rows (n, d), and the model's outputs."""
    arguments: list[Any] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments.extend([*args, *kwargs.values()])

    with model.lock:
        handle = layer.register_forward_pre_hook(note, with_kwargs=True)
        try:
            outputs = model(values, inputs)
        finally:
            handle.remove()
    return [x.flatten(1) if isinstance(x, Tensor) and x.ndim > 1 else x for x in arguments], outputs


def find_readout(model: Model, inputs: Inputs, last: str | None) -> Readout:
    """Find the layer named `last`, or the one whose output the model returns; check that it is a linear readout.

    Raises TypeError if the model is not a module or `last` is not a name, and ValueError for a layer that is not a
    linear readout of the model: shared, called several times, partly frozen, or followed by another operation.
    """
    if model.module is None:
        raise TypeError("reprior finds the readout of an nn.Module; for a pair (function, params) use form='ntk'.")
    path, layer = _layer(model, inputs, last)
    where = f"the readout {path or 'of the model itself'!r} ({type(layer).__name__})"
    parameters = dict(layer.named_parameters(recurse=False))
    at = {name: f"{path}.{name}" if path else name for name in parameters}
    matrices = [name for name in parameters if parameters[name].ndim == 2]
    vectors = [name for name in parameters if parameters[name].ndim == 1]
    if len(matrices) != 1 or len(vectors) > 1 or len(parameters) != len(matrices) + len(vectors):
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in parameters.items()) or "no parameters"
        raise ValueError(f"{where} has {shapes}; expected a weight (C, d) and at most a bias (C,): {REMEDY}.")
    frozen = [at[name] for name in parameters if at[name] not in model.selection.names]
    refuse(frozen, f"{where}: {frozen} are to be sampled but require no gradient; call requires_grad_().")
    readout = Readout(path, layer, at[matrices[0]], at[vectors[0]] if vectors else None, (1.0, 1.0))
    return _with_factors(readout, model, inputs, where)


def _layer(model: Model, inputs: Inputs, last: Any) -> tuple[str, nn.Module]:
    """Return the module of this name, or the one whose output the model returns, with its name."""
    assert model.module is not None
    layer = model.module.get_submodule(last) if last is not None else layer_of_outputs(model, inputs)
    if layer is None:
        raise ValueError(f"the model has no linear readout: no single layer's output is the model's output; {REMEDY}.")
    return next(name for name, module in model.module.named_modules() if module is layer), layer


@torch.no_grad()
def _with_factors(readout: Readout, model: Model, inputs: Inputs, where: str) -> Readout:
    """Return the readout with its factors, measured at random weights and checked; two forward passes per parameter."""
    values = model.values
    drawn = torch.Generator(model.theta.device).manual_seed(0)
    probes = {
        name: torch.randn(values[name].shape, generator=drawn, dtype=model.theta.dtype, device=model.theta.device)
        for name in readout.names
    }
    zeros = {name: torch.zeros_like(probe) for name, probe in probes.items()}

    def outputs(**changed: Tensor) -> tuple[Tensor, Tensor]:
        arguments, f = inputs_of(readout.layer, model, {**values, **zeros, **changed}, inputs)
        return arguments[0], f

    h, offset = outputs()
    W = probes[readout.weight]
    if h.shape != (len(offset), W.shape[1]) or offset.shape[1] != W.shape[0]:
        raise ValueError(f"{where} does not return the model's output, {tuple(offset.shape)}: {REMEDY}.")
    expected = {readout.weight: h @ W.mT}
    if readout.bias is not None:
        expected[readout.bias] = probes[readout.bias].expand_as(offset)
    factors, total = [], torch.zeros_like(offset)
    for name, product in expected.items():
        response = outputs(**{name: probes[name]})[1].double()
        factor = float((response * product).sum() / product.double().square().sum())
        factors.append(1.0 if abs(factor - 1) < 8 * model.eps else factor)  # rounding only
        total = total + factors[-1] * product
    together = outputs(**probes)[1]
    slack = model.eps**0.5 * (together.abs().max() + h.abs().max())
    linear = ((together - total).abs() <= slack).all() & (offset.abs() <= slack).all()  # False for NaN
    if not bool(linear) or 0.0 in factors:
        raise ValueError(
            f"{where} is not linear in its parameters, is called several times, or another operation follows it: the "
            f"outputs are not its inputs times its weight plus its bias; {REMEDY}."
        )
    return Readout(readout.path, readout.layer, readout.weight, readout.bias, (factors[0], (*factors, 1.0)[1]))


class MappedWeights(NamedTuple):
    """The image T(φ) of white weights, log|det ∂T/∂φ|, and the outputs for all data at T(φ)."""

    white: Blocks
    logdet: Float[Tensor, ""]
    outputs: Float[Tensor, "N C"]


@dataclass(frozen=True, eq=False)
class Change(ABC):
    """A change of variables φ -> v of white weights, by a Gaussian model of `targets`.

    `root` are the square roots of the points' weights, None if all are 1.
    """

    problem: RepriorProblem
    targets: Float[Tensor, "N C"]
    root: Float[Tensor, "N 1"] | None

    @abstractmethod
    def forward(self, phi: Mapping[str, Tensor]) -> MappedWeights:
        """Return T(φ), its log-determinant and the network's outputs there."""

    @abstractmethod
    def inverse(self, white: Mapping[str, Tensor]) -> Blocks:
        """Return the φ with T(φ) = v."""

    def map(self, phi: Mapping[str, Tensor]) -> Blocks:
        """Return v = T(φ)."""
        return self.forward(phi).white

    def weigh(self, rows: Float[Tensor, "N k"]) -> Float[Tensor, "N k"]:
        """Multiply the row of each point by the square root of its weight."""
        return rows if self.root is None else self.root * rows


@dataclass(frozen=True, eq=False)
class ReadoutMap(Change):
    """A change of variables of the readout's blocks by `conjugate`; all other blocks are unchanged.

    It is block-triangular, so its determinant is that of the readout's block (Hron et al. 2022, section 3). Each
    method costs one forward pass.
    """

    readout: Readout
    conjugate: Conjugate

    def features(self, white: Mapping[str, Tensor]) -> Float[Tensor, "N p"]:
        """Return Ψ for all data, which does not depend on the readout's blocks. One forward pass."""
        problem = self.problem
        values = problem.theta(white)
        batches = (self.readout.features(problem.model, values, inputs, problem.scale) for inputs in problem.inputs)
        return torch.cat(list(batches))

    def forward(self, phi: Mapping[str, Tensor]) -> MappedWeights:
        """Return T(φ), its log-determinant and the outputs."""
        features = self.features(phi)
        omega, logdet = self.conjugate.forward(*self._regression(features), self.readout.matrix(phi))
        return MappedWeights({**phi, **self.readout.blocks(omega)}, logdet, features @ omega)

    def inverse(self, white: Mapping[str, Tensor]) -> Blocks:
        """Return φ; the blocks of the readout have a closed form."""
        omega = self.conjugate.inverse(*self._regression(self.features(white)), self.readout.matrix(white))
        return {**white, **self.readout.blocks(omega)}

    def _regression(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features and targets of the regression."""
        return self.weigh(features), self.weigh(self.targets)


class Tangents(NamedTuple):
    """The linearisation at φ: J (m, D), the Cholesky factor L of JJᵀ + λI, α = (JJᵀ + λI)⁻¹(y − f), and Jᵀα."""

    J: Float[Tensor, "m D"]
    L: Float[Tensor, "m m"]
    alpha: Float[Tensor, " m"]
    step: Float[Tensor, " D"]


class CurvedIdentity(Operator):
    """The operator I + Σ_i α_i ∇²f_i (D, D) at φ, symmetric and possibly indefinite, by double backward passes."""

    symmetric = True

    def _size(self) -> torch.Size:
        return torch.Size((len(self._args[0]), len(self._args[0])))

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        return block + self._kwargs["product"](block)


class SquaredIdentity(CurvedIdentity):
    """The operator (I + Σ_i α_i ∇²f_i)², positive semidefinite."""

    psd = True

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        return super()._product(super()._product(block))


@dataclass(frozen=True, eq=False)
class TangentMap(Change):
    """The change of variables T(φ) = φ + Jᵀ(JJᵀ + λI)⁻¹(y − f(φ)) of all white weights, with J at φ.

    For large λ it is close to the identity and one to one. For small λ it may fold: two φ have the same image, and a
    chain in φ would count that θ twice. `inverse(map(φ))` then finds another φ.

    The derivative needs second derivatives of the network, and the gradient of its determinant needs third ones, in
    reverse mode.
    """

    level: float

    def forward(self, phi: Mapping[str, Tensor]) -> MappedWeights:
        """Return T(φ), its exact log-determinant and the outputs; forms J (N·C, D) and a matrix (D, D)."""
        v = self._flat(phi)
        at = self._tangents(v, self.level)
        white = self._blocks(v + at.step)
        outputs = self.problem.outputs(white)
        return MappedWeights(white, self._logdet(v, at), outputs)

    def map(self, phi: Mapping[str, Tensor]) -> Blocks:
        """Return T(φ), at the cost of a forward pass and J."""
        return self._blocks(self._map_vector(self._flat(phi), self.level))

    @torch.no_grad()
    def inverse(self, white: Mapping[str, Tensor]) -> Blocks:
        """Return φ, by Newton's method from a large λ down to its actual value; raise ValueError if this fails."""
        goal = self._flat(white)
        level = max(self.level, float(self._tangents(goal, self.level).J.square().sum()))
        v, gap = goal, 0.0
        enough = 1e-2 * math.sqrt(torch.finfo(goal.dtype).eps) * (1 + float(goal.abs().max()))
        while gap <= enough:
            v, gap = self._newton(goal, v, level)
            if gap <= enough and level == self.level:
                return self._blocks(v)
            level = max(self.level, level / 4)
        raise ValueError(
            f"no φ with T(φ) equal to these weights was found: Newton's method leaves a gap of {gap:.2e}. Raise reg, "
            "use a wider network, start from a φ (normal(1)) instead of weights, or use the readout's form."
        )

    def _newton(self, goal: Tensor, v: Tensor, level: float) -> tuple[Tensor, float]:
        """Take damped Newton steps towards T(φ) = goal; return φ and the largest entry of the gap."""
        gap = goal - self._map_vector(v, level)
        for _ in range(20):
            step = torch.linalg.solve(jacrev(lambda w: self._map_vector(w, level))(v), gap)
            share, left = 1.0, gap
            while share > 1e-4:
                left = goal - self._map_vector(v + share * step, level)
                if bool(left.norm() < gap.norm()):
                    break
                share /= 2
            else:
                break
            v, gap = v + share * step, left
        return v, float(gap.abs().max())

    def estimated_logdet(
        self,
        phi: Mapping[str, Tensor],
        rtol: float,
        max_matvecs: int | None,
        generator: torch.Generator | None,
    ) -> Estimate:
        """Estimate log|det ∂T/∂φ|: log|det(I + H_α)| from products, and its other terms, m × m, exactly."""
        v = self._flat(phi).detach()
        at = Tangents(*(tensor.detach() for tensor in self._tangents(v, self.level)))
        product = self._curvature_product(v, at.alpha)
        curved = CurvedIdentity(v, product=product)
        accuracy = 1e-2 * math.sqrt(torch.finfo(v.dtype).eps)
        solution = minres(curved, at.J.mT, rtol=accuracy)
        if not solution.accepted:
            raise ConvergenceError(solution, accuracy)
        mixed = self._identity(at) - self._mixed_rows(v, at) @ solution.x / self.level
        exact = self._kernel_term(at) + _log_size(torch.linalg.qr(mixed)[1])
        return _by_quadrature(v, product, rtol, max_matvecs, generator) + exact

    def _flat(self, blocks: Mapping[str, Tensor]) -> Float[Tensor, " D"]:
        return torch.cat([blocks[name].flatten() for name in self.problem.model.selection.names])

    def _blocks(self, v: Float[Tensor, " D"]) -> Blocks:
        return self.problem.model.selection.unflatten(v)

    def _outputs(self, v: Float[Tensor, " D"]) -> Float[Tensor, " m"]:
        return self.weigh(self.problem.outputs(self._blocks(v))).flatten()

    def _tangents(self, v: Float[Tensor, " D"], level: float) -> Tangents:
        J: Tensor = jacrev(self._outputs)(v)
        L = factor(J @ J.mT, level)
        gap = (self.weigh(self.targets).flatten() - self._outputs(v)).unsqueeze(1)
        alpha = solve_triangle(L.mT, solve_triangle(L, gap), upper=True).squeeze(1)
        return Tangents(J, L, alpha, J.mT @ alpha)

    def _map_vector(self, v: Float[Tensor, " D"], level: float) -> Float[Tensor, " D"]:
        return v + self._tangents(v, level).step

    def _logdet(self, v: Float[Tensor, " D"], at: Tangents) -> Float[Tensor, ""]:
        """Return −log det(I + JJᵀ/λ) + log|det(I + H_α)| + log|det(I − R(I + H_α)⁻¹Jᵀ/λ)|, in float64."""

        def weighted_outputs(w: Float[Tensor, " D"]) -> Float[Tensor, ""]:
            return self._outputs(w) @ at.alpha

        H: Tensor = jacrev(grad(weighted_outputs))(v)
        curved = H + torch.eye(len(v), dtype=v.dtype, device=v.device)
        Q, R = torch.linalg.qr(curved)  # not LU, which torch computes wrongly for many chains on several threads
        mixed = (
            self._identity(at) - self._mixed_rows(v, at) @ solve_triangle(R, Q.mT @ at.J.mT, upper=True) / self.level
        )
        return self._kernel_term(at) + _log_size(R) + _log_size(torch.linalg.qr(mixed)[1])

    def _kernel_term(self, at: Tangents) -> Float[Tensor, ""]:
        return len(at.L) * math.log(self.level) - 2 * at.L.diagonal().double().log().sum()

    def _mixed_rows(self, v: Float[Tensor, " D"], at: Tangents) -> Float[Tensor, "m D"]:
        """Return R, whose rows are (∇²f_i Jᵀα)ᵀ."""
        R: Tensor = jacrev(lambda w: jacrev(self._outputs)(w) @ at.step)(v)
        return R

    def _identity(self, at: Tangents) -> Tensor:
        return torch.eye(len(at.L), dtype=at.L.dtype, device=at.L.device)

    def _curvature_product(self, v: Float[Tensor, " D"], alpha: Float[Tensor, " m"]) -> Callable[[Tensor], Tensor]:
        slope = grad(lambda w: self._outputs(w) @ alpha)
        return vmap(lambda vector: grad(lambda w: slope(w) @ vector)(v), in_dims=1, out_dims=1)


def _log_size(R: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Return log|det R| of a triangular matrix, in float64."""
    return R.diagonal().double().abs().log().sum()


def _by_quadrature(
    v: Float[Tensor, " D"],
    product: Callable[[Tensor], Tensor],
    rtol: float,
    max_matvecs: int | None,
    generator: torch.Generator | None,
) -> Estimate:
    """Estimate log|det(I + H)| by quadrature of I + H if that is positive definite, otherwise of its square."""
    for operator, share in ((CurvedIdentity(v, product=product), 1.0), (SquaredIdentity(v, product=product), 0.5)):
        lowest = eigsh(operator, 1, which="SA", rtol=0.05, generator=generator)
        bound = float(lowest.values - lowest.residuals)
        if bound > 0:
            estimate = share * logdet(
                operator, lower_bound=0.9 * bound, rtol=rtol, max_matvecs=max_matvecs, generator=generator
            )
            return replace(estimate, matvecs=estimate.matvecs + lowest.matvecs)
    raise ValueError(f"I + H is singular to the accuracy of {lowest.matvecs} products: raise reg.")
