"""Repriorisation of white weights: of the readout by a linear regression, or of all by the empirical tangent kernel.

For the last features Ψ and Y ~ N(Ψω, λ I), ω ~ N(0, I), column by column, the posterior of the readout's weights is
N(μ, Σ), Σ = (I + κΨᵀΨ)⁻¹ and μ = κΣΨᵀY with κ = 1/λ. T(φ) = μ + R φ with R Rᵀ = Σ; each form has its own root R and
factorises its own matrix. All are differentiable in Ψ any number of times, even if singular values coincide, since they
factorise by Cholesky. `TangentMap` changes all weights alike, with its exact log-determinant.
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
from curvops.network.data.inputs import Inputs, copy
from curvops.network.likelihoods import Categorical, Likelihood
from curvops.network.model.last_layer import layer_of_outputs
from curvops.operators import Linearization
from curvops.sampling.state import identity, long_dot

ReadoutFeatures = Float[Tensor, "n p"]
ReadoutWeights = Float[Tensor, "p k"]


@dataclass(frozen=True, eq=False)
class RepriorProblem:
    """A network, all its data, their likelihood and the prior N(0, A⁻¹) of its weights θ = A^-½ v.

    `inputs` are kept batch by batch, `targets` and `weights` for all points together; `scale` is A^-½ by name. Blocks
    of v are called white, because their prior is N(0, I). `root` are the square roots of the points' weights in the
    Gaussian model that defines T, 0 for points that do not count, or None if all are 1; `goal` are its targets times
    `root`: for classes one-hot rows minus 1/C.
    """

    model: Model
    inputs: tuple[Inputs, ...]
    targets: Tensor
    weights: Float[Tensor, " N"] | None
    likelihood: Likelihood
    scale: Blocks
    root: Float[Tensor, "N 1"] | None
    goal: Float[Tensor, "N C"]

    @classmethod
    def of(cls, lin: Linearization, precision: Float[Tensor, "*D"]) -> RepriorProblem:
        """Build the problem from a linearisation's model, data and likelihood; the data are copied."""
        batches, model, dtype = list(lin.data), lin.model, lin.theta.dtype
        targets = goal = torch.cat([batch.targets for batch in batches])
        weighted = [batch.weights for batch in batches if batch.weights is not None]
        weights, root = torch.cat(weighted) if weighted else None, None
        by_target = weights is not None and weights.ndim > 1
        refuse(by_target, "reprior takes one sample weight for each point, not one for each target.")
        scale = model.selection.unflatten(precision.detach().rsqrt().expand_as(lin.theta).clone())
        counted = lin.likelihood.counted(targets, weights)
        if isinstance(lin.likelihood, Categorical):
            assert model.layout is not None and counted is not None
            C = model.layout.num_outputs
            if not targets.is_floating_point():
                goal = nn.functional.one_hot(targets.long().masked_fill(~counted, 0), C)
            goal = goal.to(dtype) - 1 / C
        if counted is not None and not (weights is None and bool(counted.all())):
            root = (counted.to(dtype) if weights is None else weights * counted).sqrt().unsqueeze(1)
            goal = root * goal
        inputs = tuple(copy(batch.inputs) for batch in batches)
        return cls(model, inputs, targets, weights, lin.likelihood, scale, root, goal)

    @property
    def log_scale(self) -> Float[Tensor, ""]:
        """The log-determinant log det A^-½, in float64."""
        return torch.stack([scale.double().log().sum() for scale in self.scale.values()]).sum()

    def theta(self, white: Mapping[str, Tensor]) -> Blocks:
        """Return the weights θ of the model."""
        return {name: scale * white[name] for name, scale in self.scale.items()}

    def white(self, theta: Mapping[str, Tensor]) -> Blocks:
        """Return white weights v, the inverse of `theta`."""
        return {name: theta[name] / scale for name, scale in self.scale.items()}

    def outputs(self, white: Mapping[str, Tensor]) -> Float[Tensor, "N C"]:
        """Return f for all data, by one forward pass."""
        values = self.theta(white)
        return torch.cat([self.model(values, inputs) for inputs in self.inputs])

    def log_likelihood(self, outputs: Float[Tensor, "N C"]) -> Float[Tensor, ""]:
        """Return Σ_n log p(y_n | f_n) in nats, summed in float64."""
        return self.likelihood.log_prob(outputs, self.targets, self.weights).double().sum()

    def weigh(self, rows: Float[Tensor, "N k"]) -> Float[Tensor, "N k"]:
        """Multiply the row of each point by the square root of its weight."""
        return rows if self.root is None else self.root * rows


def log_normal(white: Mapping[str, Tensor]) -> Float[Tensor, ""]:
    """Return log N(v; 0, I), in float64."""
    squares = torch.stack([long_dot(block.flatten(), block.flatten()) for block in white.values()]).sum()
    return -0.5 * (squares + math.log(2 * math.pi) * sum(block.numel() for block in white.values()))


def factor(root: Float[Tensor, "m k"], share: float) -> Float[Tensor, "m m"]:
    """Return L with L Lᵀ = I + κAAᵀ, A = root; NaN if it fails, so that a far proposal is rejected without an error."""
    L, info = torch.linalg.cholesky_ex(torch.add(identity(len(root), root), root @ root.mT, alpha=share))
    return L.masked_fill((info != 0)[..., None, None], math.nan)


def solve_triangle(
    triangle: Float[Tensor, "m m"], block: Float[Tensor, "m k"], upper: bool = False
) -> Float[Tensor, "m k"]:
    """Solve a triangular system."""
    return torch.linalg.solve_triangular(triangle, block, upper=upper)


def log_size(triangle: Float[Tensor, "m m"]) -> Float[Tensor, ""]:
    """Return log|det| of a triangular matrix, in float64."""
    return triangle.diagonal().double().abs().log().sum()


REMEDY = "make the network end with an nn.Linear whose output it returns, or change all weights alike with form='ntk'"


@dataclass(frozen=True, eq=False)
class Readout:
    """A linear readout f = s_w h Wᵀ + s_b b: inputs h of a layer, its weight W (C, d), bias b (C,) or none, factors s.

    An `nn.Linear` has s = 1; a custom layer may scale its parameters.
    """

    layer: nn.Module
    names: tuple[str, ...]
    """The name of the weight, and that of the bias if there is one."""
    factors: tuple[float, ...] = ()

    def matrix(self, white: Mapping[str, Tensor]) -> Float[Tensor, "p C"]:
        """Join the readout's blocks into one matrix."""
        weight, *bias = self.names
        return torch.cat([white[weight].mT, *(white[name].unsqueeze(0) for name in bias)])

    def blocks(self, matrix: Float[Tensor, "p C"]) -> Blocks:
        """Split a matrix into the readout's blocks, the inverse of `matrix`."""
        weight, *bias = self.names
        return {weight: matrix[: len(matrix) - len(bias)].mT, **dict.fromkeys(bias, matrix[-1])}


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
    layer = model.module.get_submodule(last) if last is not None else layer_of_outputs(model, inputs)
    if layer is None:
        raise ValueError(f"the model has no linear readout: no single layer's output is the model's output; {REMEDY}.")
    path = model.paths[layer]
    where = f"the readout {path or 'of the model itself'!r} ({type(layer).__name__})"
    parameters = sorted(layer.named_parameters(recurse=False), key=lambda named: -named[1].ndim)  # the weight first
    if [p.ndim for _, p in parameters] not in ([2], [2, 1]):
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in parameters) or "no parameters"
        raise ValueError(f"{where} has {shapes}; expected a weight (C, d) and at most a bias (C,): {REMEDY}.")
    names = tuple(f"{path}.{name}" if path else name for name, _ in parameters)
    frozen = [name for name in names if name not in model.selection.names]
    refuse(frozen, f"{where}: {frozen} are to be sampled but require no gradient; call requires_grad_().")
    return Readout(layer, names, _factors(layer, names, model, inputs, where))


@torch.no_grad()
def _factors(layer: nn.Module, names: tuple[str, ...], model: Model, inputs: Inputs, where: str) -> tuple[float, ...]:
    """Return the factors of a readout, measured at random weights and checked; two forward passes per parameter."""
    drawn = torch.Generator(model.theta.device).manual_seed(0)
    probes = {name: torch.empty_like(model.values[name]).normal_(generator=drawn) for name in names}

    def run(*chosen: str) -> tuple[Tensor, Tensor]:
        """Return the layer's inputs and the outputs with the probes of these parameters, and zeros for the others."""
        changed = {name: probe if name in chosen else torch.zeros_like(probe) for name, probe in probes.items()}
        arguments, f = inputs_of(layer, model, model.values | changed, inputs)
        return arguments[0], f

    h, offset = run()
    W, *biases = probes.values()
    if h.shape != (len(offset), W.shape[1]) or offset.shape[1] != W.shape[0]:
        raise ValueError(f"{where} does not return the model's output, {tuple(offset.shape)}: {REMEDY}.")
    factors, total = [], offset
    for name, product in zip(names, [h @ W.mT, *(b.expand_as(offset) for b in biases)]):
        found = float((run(name)[1].double() * product).sum() / product.double().square().sum())
        factors.append(1.0 if abs(found - 1) < 8 * model.eps else found)  # rounding only
        total = total + factors[-1] * product
    together = run(*names)[1]
    slack = model.eps**0.5 * (together.abs().max() + h.abs().max())
    linear = ((together - total).abs() <= slack).all() & (offset.abs() <= slack).all()  # False for NaN
    if not bool(linear) or 0.0 in factors:
        raise ValueError(
            f"{where} is not linear in its parameters, is called several times, or another operation follows it: the "
            f"outputs are not its inputs times its weight plus its bias; {REMEDY}."
        )
    return tuple(factors)


class MappedWeights(NamedTuple):
    """The image T(φ) of white weights, log|det ∂T/∂φ|, and the outputs for all data at T(φ)."""

    white: Blocks
    logdet: Float[Tensor, ""]
    outputs: Float[Tensor, "N C"]


@dataclass(frozen=True, eq=False)
class Change(ABC):
    """A change of variables φ -> v of white weights, by the problem's Gaussian model of its targets, at λ = `level`."""

    problem: RepriorProblem
    level: float

    @property
    def share(self) -> float:
        """The number κ = 1/λ, 0 for λ = ∞, at which the data change nothing."""
        return 1 / self.level

    @abstractmethod
    def forward(self, phi: Mapping[str, Tensor]) -> MappedWeights:
        """Return T(φ), its log-determinant and the network's outputs there."""

    @abstractmethod
    def inverse(self, white: Mapping[str, Tensor]) -> Blocks:
        """Return the φ with T(φ) = v."""

    def map(self, phi: Mapping[str, Tensor]) -> Blocks:
        """Return v = T(φ)."""
        return self.forward(phi).white


@dataclass(frozen=True, eq=False)
class ReadoutMap(Change):
    """A change of variables of the readout's blocks; all other blocks are unchanged.

    It is block-triangular, so its determinant is that of the readout's block (Hron et al. 2022, section 3). Each
    method costs one forward pass.
    """

    readout: Readout

    def features(self, white: Mapping[str, Tensor]) -> Float[Tensor, "N p"]:
        """Return Ψ = [s_w h a_w^-½, s_b a_b^-½] for all data, whose product with the readout's white weights is f.

        It does not depend on these; the column of the bias is last. One forward pass.
        """
        problem, readout = self.problem, self.readout
        values = problem.theta(white)
        rows = [inputs_of(readout.layer, problem.model, values, inputs)[0][0] for inputs in problem.inputs]
        scales = [s * problem.scale[name][0] for name, s in zip(readout.names, readout.factors)]
        weighted = torch.cat(rows) * scales[0]
        return torch.cat([weighted, *(scale.expand(len(weighted), 1) for scale in scales[1:])], 1)

    def forward(self, phi: Mapping[str, Tensor]) -> MappedWeights:
        """Return T(φ), its log-determinant −k log det L, and the outputs."""
        features, readout = self.features(phi), self.readout.matrix(phi)
        weighted = self.problem.weigh(features)
        L = factor(self.root(weighted), self.share)
        omega = self.image(L, weighted, readout)
        white = {**phi, **self.readout.blocks(omega)}
        return MappedWeights(white, -readout.shape[-1] * log_size(L), features @ omega)

    def inverse(self, white: Mapping[str, Tensor]) -> Blocks:
        """Return φ; the blocks of the readout have a closed form."""
        weighted = self.problem.weigh(self.features(white))
        L = factor(self.root(weighted), self.share)
        return {**white, **self.readout.blocks(self.preimage(L, weighted, self.readout.matrix(white)))}

    def condition(self, white: Mapping[str, Tensor]) -> float:
        """Return the condition number of the matrix that is factorised at these weights, in float64; it may be NaN."""
        root = self.root(self.problem.weigh(self.features(white))).double()
        values = torch.linalg.eigvalsh(identity(len(root), root) + self.share * (root @ root.mT)).clamp_min(1)
        return float(values[-1] / values[0])

    @abstractmethod
    def root(self, features: ReadoutFeatures) -> Tensor:
        """Return A, such that I + κAAᵀ = LLᵀ is factorised and det Σ^½ = 1/det L."""

    @abstractmethod
    def image(self, L: Tensor, features: ReadoutFeatures, phi: ReadoutWeights) -> ReadoutWeights:
        """Return ω = T(φ)."""

    @abstractmethod
    def preimage(self, L: Tensor, features: ReadoutFeatures, omega: ReadoutWeights) -> ReadoutWeights:
        """Return the φ with T(φ) = ω."""


class FeatureSpaceMap(ReadoutMap):
    """The map T(φ) = L⁻ᵀ(κL⁻¹ΨᵀY + φ), with the Cholesky factor L Lᵀ = I + κΨᵀΨ, (p, p); O(np² + p³) operations."""

    def root(self, features: ReadoutFeatures) -> Tensor:
        return features.mT

    def image(self, L: Tensor, features: ReadoutFeatures, phi: ReadoutWeights) -> ReadoutWeights:
        inner = self.share * solve_triangle(L, features.mT @ self.problem.goal) + phi
        return solve_triangle(L.mT, inner, upper=True)

    def preimage(self, L: Tensor, features: ReadoutFeatures, omega: ReadoutWeights) -> ReadoutWeights:
        """Return Lᵀω − κL⁻¹ΨᵀY."""
        return L.mT @ omega - self.share * solve_triangle(L, features.mT @ self.problem.goal)


class DataSpaceMap(ReadoutMap):
    """The map T with the root R = I − κΨᵀL⁻ᵀB⁻¹Ψ, L Lᵀ = S = I + κΨΨᵀ (n, n), B = L + I (Andrews 1968).

    It takes O(n²p + n³) operations.

    R Rᵀ = Σ; the symmetric root of Σ differs from R by a rotation. It would need an eigendecomposition of S, which
    automatic differentiation cannot differentiate if two eigenvalues are equal, for example if a point occurs twice.
    """

    def root(self, features: ReadoutFeatures) -> Tensor:
        return features

    def image(self, L: Tensor, features: ReadoutFeatures, phi: ReadoutWeights) -> ReadoutWeights:
        """Return φ + κΨᵀL⁻ᵀ(L⁻¹Y − B⁻¹Ψφ)."""
        change = solve_triangle(L, self.problem.goal) - solve_triangle(L + identity(len(L), L), features @ phi)
        return phi + features.mT @ (self.share * solve_triangle(L.mT, change, upper=True))

    def preimage(self, L: Tensor, features: ReadoutFeatures, omega: ReadoutWeights) -> ReadoutWeights:
        """Return v + κΨᵀB⁻ᵀΨv for v = ω − κΨᵀS⁻¹Y."""
        mean = solve_triangle(L.mT, solve_triangle(L, self.problem.goal), upper=True)
        gap = omega - features.mT @ (self.share * mean)
        back = solve_triangle((L + identity(len(L), L)).mT, features @ gap, upper=True)
        return gap + features.mT @ (self.share * back)


class Tangents(NamedTuple):
    """The linearisation at φ: J (m, D), L Lᵀ = I + κJJᵀ, α = (JJᵀ + λI)⁻¹(y − f), and Jᵀα."""

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


@dataclass(frozen=True, eq=False)
class TangentMap(Change):
    """The change of variables T(φ) = φ + Jᵀ(JJᵀ + λI)⁻¹(y − f(φ)) of all white weights, with J at φ.

    For large λ it is close to the identity and one to one. For small λ it may fold: two φ have the same image, and a
    chain in φ would count that θ twice. `inverse(map(φ))` then finds another φ.

    The derivative needs second derivatives of the network, and the gradient of its determinant needs third ones, in
    reverse mode.
    """

    def forward(self, phi: Mapping[str, Tensor]) -> MappedWeights:
        """Return T(φ), its exact log-determinant and the outputs; forms J (N·C, D) and a matrix (D, D)."""
        v = self._flat(phi)
        at = self._tangents(v, self.level)
        white = self._blocks(v + at.step)
        H: Tensor = jacrev(self._slope(at.alpha))(v)
        Q, R = torch.linalg.qr(H + identity(len(v), v))  # not LU, which torch computes wrongly for chains on threads
        further = self._other_terms(v, at, solve_triangle(R, Q.mT @ at.J.mT, upper=True))
        return MappedWeights(white, log_size(R) + further, self.problem.outputs(white))

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
        """Estimate log|det ∂T/∂φ|: log|det(I + H_α)| from products, and its other terms, m × m, exactly.

        Quadrature is that of I + H_α if that is positive definite, otherwise of its square.
        """
        v = self._flat(phi).detach()
        at = Tangents(*(tensor.detach() for tensor in self._tangents(v, self.level)))
        slope = self._slope(at.alpha)
        product = vmap(lambda vector: grad(lambda w: slope(w) @ vector)(v), in_dims=1, out_dims=1)
        curved: Any = CurvedIdentity(v, product=product)
        accuracy = 1e-2 * math.sqrt(torch.finfo(v.dtype).eps)
        solution = minres(curved, at.J.mT, rtol=accuracy)
        if not solution.accepted:
            raise ConvergenceError(solution, accuracy)
        options: dict[str, Any] = {"rtol": rtol, "max_matvecs": max_matvecs, "generator": generator}
        for operator, power in ((curved, 1.0), (curved @ curved, 0.5)):
            lowest = eigsh(operator, 1, which="SA", rtol=0.05, generator=generator)
            bound = float(lowest.values - lowest.residuals)
            if bound > 0:
                estimate = power * logdet(operator, lower_bound=0.9 * bound, **options)
                estimate = replace(estimate, matvecs=estimate.matvecs + lowest.matvecs)
                return estimate + self._other_terms(v, at, solution.x)
        raise ValueError(f"I + H is singular to the accuracy of {lowest.matvecs} products: raise reg.")

    def _flat(self, blocks: Mapping[str, Tensor]) -> Float[Tensor, " D"]:
        return torch.cat([blocks[name].flatten() for name in self.problem.model.selection.names])

    def _blocks(self, v: Float[Tensor, " D"]) -> Blocks:
        return self.problem.model.selection.unflatten(v)

    def _outputs(self, v: Float[Tensor, " D"]) -> Float[Tensor, " m"]:
        return self.problem.weigh(self.problem.outputs(self._blocks(v))).flatten()

    def _slope(self, alpha: Float[Tensor, " m"]) -> Callable[[Tensor], Tensor]:
        """Return the gradient of Σ_i α_i f_i as a function of v, whose derivative is H_α."""
        return grad(lambda w: self._outputs(w) @ alpha)

    def _tangents(self, v: Float[Tensor, " D"], level: float) -> Tangents:
        J: Tensor = jacrev(self._outputs)(v)
        L = factor(J, 1 / level)
        gap = (self.problem.goal.flatten() - self._outputs(v)).unsqueeze(1)
        alpha = solve_triangle(L.mT, solve_triangle(L, gap), upper=True).squeeze(1) / level
        return Tangents(J, L, alpha, J.mT @ alpha)

    def _map_vector(self, v: Float[Tensor, " D"], level: float) -> Float[Tensor, " D"]:
        return v + self._tangents(v, level).step

    def _other_terms(self, v: Float[Tensor, " D"], at: Tangents, solved: Float[Tensor, "D m"]) -> Float[Tensor, ""]:
        """Return −log det(I + κJJᵀ) + log|det(I − κRX)|, with the rows (∇²f_i Jᵀα)ᵀ of R and X = (I + H_α)⁻¹Jᵀ."""
        R: Tensor = jacrev(lambda w: jacrev(self._outputs)(w) @ at.step)(v)
        mixed = identity(len(R), R) - self.share * (R @ solved)
        return log_size(torch.linalg.qr(mixed)[1]) - 2 * log_size(at.L)
