"""Families of normal distributions over the weights: their draws, densities and covariances.

Each is a zero-mean normal distribution of the vector of all weights, described by a few tensors; the mean is kept
separately. The table `FAMILIES` names them: a new family is one class and one row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import checked_whole
from curvops.linalg import Dense, Diagonal, DirectSum, Kronecker, LowRank, Operator
from curvops.sampling.state import NoiseSource, Structure

Tensors = Mapping[str, Tensor]
LOG_2PI = math.log(2 * math.pi)


class GaussianFamily(ABC):
    """A family of covariances Σ on vectors (d,) with a given structure."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    @abstractmethod
    def start(self, structure: Structure, scale: float, like: Tensor, source: NoiseSource) -> dict[str, Tensor]:
        """Return the tensors of N(0, scale² I), or of a nearby member of the family."""

    def noise(self, structure: Structure, k: int, like: Tensor, source: NoiseSource) -> Float[Tensor, "k m"]:
        """Draw the standard normal numbers for k draws, by default one for each weight."""
        return source.normal(like.new_empty(k * len(like))).view(k, -1)

    @abstractmethod
    def transform(self, tensors: Tensors, structure: Structure, noise: Float[Tensor, "k m"]) -> Float[Tensor, "k d"]:
        """Transform standard normal numbers to draws z of N(0, Σ), differentiably in the tensors."""

    @abstractmethod
    def log_density(self, tensors: Tensors, structure: Structure, z: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        """Return log N(z; 0, Σ) in nats."""

    @abstractmethod
    def misfits(
        self, structure: Structure, residual: Float[Tensor, "k m"], noise: Float[Tensor, "k m"]
    ) -> dict[str, Tensor]:
        """Estimate the relative error of the precision, restricted to the parts that the family can make zero.

        With the residual u = Tᵀ∇ log(q/p) of draws z = T ε, the mean of u εᵀ is TᵀHT − I for the mean Hessian H of
        −log p (Stein 1981), which is the relative error of q's precision. The squares of an error add up over all
        dimensions but the first.
        """

    @abstractmethod
    def covariance(self, tensors: Tensors, structure: Structure, order: Tensor) -> tuple[Operator, Operator | None]:
        """Return Σ, and Σ⁻¹ if it has a separate form, with entry i at position order[i] of the vector."""


class DiagonalFamily(GaussianFamily):
    """The family Σ = diag(e^{2 s})."""

    def start(self, structure: Structure, scale: float, like: Tensor, source: NoiseSource) -> dict[str, Tensor]:
        return {"log_scale": torch.full_like(like, math.log(scale))}

    def transform(self, tensors: Tensors, structure: Structure, noise: Float[Tensor, "k m"]) -> Float[Tensor, "k d"]:
        return noise * tensors["log_scale"].exp()

    def log_density(self, tensors: Tensors, structure: Structure, z: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        s = tensors["log_scale"]
        return _standard(z / s.exp(), s.sum())

    def misfits(
        self, structure: Structure, residual: Float[Tensor, "k m"], noise: Float[Tensor, "k m"]
    ) -> dict[str, Tensor]:
        return {"log_scale": (residual * noise).mean(0)}

    def covariance(self, tensors: Tensors, structure: Structure, order: Tensor) -> tuple[Operator, Operator | None]:
        variances = (2 * tensors["log_scale"][order]).exp()
        return Diagonal(variances), Diagonal(1 / variances)


class DenseFamily(GaussianFamily):
    """The family Σ = L Lᵀ, L lower triangular with a positive diagonal e^s."""

    def start(self, structure: Structure, scale: float, like: Tensor, source: NoiseSource) -> dict[str, Tensor]:
        return {"factor": torch.diag(torch.full_like(like, math.log(scale)))}

    def transform(self, tensors: Tensors, structure: Structure, noise: Float[Tensor, "k m"]) -> Float[Tensor, "k d"]:
        return noise @ triangle(tensors["factor"]).mT

    def log_density(self, tensors: Tensors, structure: Structure, z: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        factor = tensors["factor"]
        white = torch.linalg.solve_triangular(triangle(factor), z.mT, upper=False).mT
        return _standard(white, factor.diagonal().sum())

    def misfits(
        self, structure: Structure, residual: Float[Tensor, "k m"], noise: Float[Tensor, "k m"]
    ) -> dict[str, Tensor]:
        return {"factor": residual.mT @ noise / len(noise)}

    def covariance(self, tensors: Tensors, structure: Structure, order: Tensor) -> tuple[Operator, Operator | None]:
        rows = triangle(tensors["factor"])[order]
        return Dense(rows @ rows.mT, psd=True), None


class LowRankDiagonalFamily(GaussianFamily):
    """The family Σ = U Uᵀ + diag(e^{2 s}), U (d, r) (Ong, Nott & Smith 2018)."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def start(self, structure: Structure, scale: float, like: Tensor, source: NoiseSource) -> dict[str, Tensor]:
        small = 0.1 * scale / self.rank**0.5  # at U = 0 the mean of its gradient is zero
        vectors = small * source.normal(like.new_empty(len(like) * self.rank)).view(-1, self.rank)
        return {"log_scale": torch.full_like(like, math.log(scale)), "vectors": vectors}

    def noise(self, structure: Structure, k: int, like: Tensor, source: NoiseSource) -> Float[Tensor, "k m"]:
        return source.normal(like.new_empty(k * (len(like) + self.rank))).view(k, -1)

    def transform(self, tensors: Tensors, structure: Structure, noise: Float[Tensor, "k m"]) -> Float[Tensor, "k d"]:
        s, U = tensors["log_scale"], tensors["vectors"]
        return noise[:, : len(s)] * s.exp() + noise[:, len(s) :] @ U.mT

    def log_density(self, tensors: Tensors, structure: Structure, z: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        s, U = tensors["log_scale"], tensors["vectors"]
        W, white = U / s.exp().unsqueeze(1), z / s.exp()
        inner, _ = torch.linalg.cholesky_ex(
            torch.eye(self.rank, dtype=W.dtype, device=W.device) + W.mT @ W
        )  # at least 1
        projected = torch.linalg.solve_triangular(inner, (white @ W).mT, upper=False)
        return _standard(white, s.sum() + inner.diagonal().log().sum()) + 0.5 * projected.square().sum(0)

    def misfits(
        self, structure: Structure, residual: Float[Tensor, "k m"], noise: Float[Tensor, "k m"]
    ) -> dict[str, Tensor]:
        d = noise.shape[1] - self.rank
        u = residual[:, :d]
        return {"log_scale": (u * noise[:, :d]).mean(0), "vectors": u.mT @ noise[:, d:] / len(noise)}

    def covariance(self, tensors: Tensors, structure: Structure, order: Tensor) -> tuple[Operator, Operator | None]:
        U = tensors["vectors"][order]
        return LowRank(U, U.new_ones(self.rank)).add_diagonal((2 * tensors["log_scale"][order]).exp()), None


class KroneckerFamily(GaussianFamily):
    """The family Σ = (L Lᵀ) ⊗ (R Rᵀ) for each tensor, on its first dimension and the others; L Lᵀ for a vector.

    It is the matrix normal distribution of Louizos & Welling 2016. Tensors are independent of each other.
    """

    def start(self, structure: Structure, scale: float, like: Tensor, source: NoiseSource) -> dict[str, Tensor]:
        tensors = {}
        for i, p, q, _ in factors(structure):
            # The right factor of a vector would be 1 × 1, a second scale in addition to the left factor.
            of_each = math.log(scale) / (1 if q == 1 else 2)
            tensors[f"left.{i}"] = torch.diag(like.new_full((p,), of_each))
            if q > 1:
                tensors[f"right.{i}"] = torch.diag(like.new_full((q,), of_each))
        return tensors

    def transform(self, tensors: Tensors, structure: Structure, noise: Float[Tensor, "k m"]) -> Float[Tensor, "k d"]:
        return self._scaled(tensors, structure, noise, lambda factor, block: triangle(factor) @ block)

    def log_density(self, tensors: Tensors, structure: Structure, z: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        def whiten(factor: Tensor, block: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(triangle(factor), block, upper=False)

        white = self._scaled(tensors, structure, z, whiten)
        log_root = z.new_zeros(())
        for i, p, q, _ in factors(structure):
            log_root = log_root + q * tensors[f"left.{i}"].diagonal().sum()
            if q > 1:
                log_root = log_root + p * tensors[f"right.{i}"].diagonal().sum()
        return _standard(white, log_root)

    def misfits(
        self, structure: Structure, residual: Float[Tensor, "k m"], noise: Float[Tensor, "k m"]
    ) -> dict[str, Tensor]:
        errors = {}
        for i, p, q, entries in factors(structure):
            u, Z = (rows[:, entries].unflatten(1, (p, q)) for rows in (residual, noise))
            errors[f"left.{i}"] = (u @ Z.mT).mean(0) / q
            if q > 1:
                errors[f"right.{i}"] = (u.mT @ Z).mean(0) / p
        return errors

    def covariance(self, tensors: Tensors, structure: Structure, order: Tensor) -> tuple[Operator, Operator | None]:
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)  # the new position of each entry of the vector
        blocks, inverses, positions = [], [], []
        for i, _, q, entries in factors(structure):
            left = triangle(tensors[f"left.{i}"])
            right = triangle(tensors[f"right.{i}"]) if q > 1 else left.new_ones(1, 1)
            blocks.append(Kronecker((left @ left.mT).unsqueeze(0), (right @ right.mT).unsqueeze(0)))
            inverse_left, inverse_right = (torch.cholesky_inverse(factor).unsqueeze(0) for factor in (left, right))
            inverses.append(Kronecker(inverse_left, inverse_right))
            positions.append(place[entries])
        return DirectSum(*blocks, positions=positions), DirectSum(*inverses, positions=positions)

    def _scaled(
        self, tensors: Tensors, structure: Structure, rows: Tensor, apply: Callable[[Tensor, Tensor], Tensor]
    ) -> Float[Tensor, "k d"]:
        """Apply L from the left and R from the right, tensor by tensor."""
        blocks = []
        for i, p, q, entries in factors(structure):
            block = apply(tensors[f"left.{i}"], rows[:, entries].unflatten(1, (p, q)))
            if q > 1:
                block = apply(tensors[f"right.{i}"], block.mT).mT
            blocks.append(block.flatten(1))
        return torch.cat(blocks, 1)


FAMILIES: dict[str, type[GaussianFamily]] = {
    "diagonal": DiagonalFamily,
    "dense": DenseFamily,
    "low_rank_diagonal": LowRankDiagonalFamily,
    "kronecker": KroneckerFamily,
}


def family_of(name: str, rank: object) -> GaussianFamily:
    """Return the family of this name; raise ValueError for a rank if the family has none."""
    kind = FAMILIES[name]
    if kind is LowRankDiagonalFamily:
        return LowRankDiagonalFamily(10 if rank is None else checked_whole("rank", rank, 1))
    if rank is not None:
        raise ValueError(f"rank={rank!r} needs family='low_rank_diagonal'; {name!r} has no rank: leave it out.")
    return kind()


def triangle(factor: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return the lower triangle with the exponential of its diagonal."""
    return factor.tril(-1) + torch.diag(factor.diagonal().exp())


def factors(structure: Structure) -> Iterator[tuple[int, int, int, slice]]:
    """Yield each tensor's number, its shape (p, q) as a matrix (q = 1 for a vector), and its part of the vector."""
    start = 0
    for i, shape in enumerate(structure.shapes):
        p, q = shape[0] if shape else 1, shape[1:].numel()
        yield i, p, q, slice(start, start + p * q)
        start += p * q


def _standard(white: Float[Tensor, "k d"], log_root: Tensor) -> Float[Tensor, " k"]:
    """Return the log density of z = Σ^½ w in nats, from w and log det Σ^½."""
    return -0.5 * (white.square() + LOG_2PI).sum(1) - log_root
