"""The density of the eigenvalues of a symmetric matrix known by its products.

>>> import torch
>>> from curvops.linalg import spectral_density
>>> A = torch.diag(torch.linspace(1.0, 2.0, 50))
>>> density = spectral_density(A, generator=torch.Generator().manual_seed(0))
>>> round(density.integral(), 6), density.reason.name
(1.0, 'CONVERGED')
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import Progress, columns_at_a_time, current_run
from curvops.checks import check_choice, check_options, checked_whole
from curvops.linalg.core.algorithm import algorithm
from curvops.linalg.core.probed import Limits, Probed, probing
from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import NEAR_ZERO, Given, Matrix, as_matrix, describe_square, is_psd
from curvops.linalg.spectra.lanczos import TWO_STEPS_VECTORS, LockStep
from curvops.summary import Summarised

Scale: TypeAlias = Literal["linear", "log"]


@dataclass(frozen=True, eq=False, repr=False)
class SpectralDensity(Summarised):
    """The density of eigenvalues, each a Gaussian of standard deviation ``bandwidth``, with a pointwise band.

    ``grid`` holds eigenvalues. On the log scale the grid is geometric, and the density and ``bandwidth`` are per unit
    of (natural) log λ. Eigenvalues at or below ``threshold``, including negative ones, are not shown: ``zero_mass`` is
    their share, and the density integrates to 1 − ``zero_mass``. On the linear scale ``zero_mass`` is 0, and for an
    operator that is tagged as positive semidefinite the density ends at λ = 0, where each Gaussian is folded. ``lower``
    and ``upper`` enclose the exact broadened density with probability ``level`` at each grid point, by Student's t over
    the probes (at the upper end of the logarithm), widened by the change of the density with a quarter less depth.
    ``nodes`` and ``weights`` are one Gauss rule per probe, with a node at 0 for eigenvalues known to be 0; each row of
    weights sums to 1, and padding has weight 0.
    ``reason`` is CONVERGED if that change is small compared with the band, and ITERATION_LIMIT or RANK_CAPPED if
    ``steps`` or the memory budget ended the depth first.

    Examples:
        >>> density = co.linalg.spectral_density(torch.diag(torch.linspace(0, 1, 50)), probes=2)
        >>> density.scale, density.grid.shape, round(density.integral(), 2)
        ('linear', torch.Size([1024]), 1.0)
    """

    grid: Float[Tensor, " G"]
    density: Float[Tensor, " G"]
    lower: Float[Tensor, " G"] = field(repr=False)
    upper: Float[Tensor, " G"] = field(repr=False)
    nodes: Float[Tensor, "P m"] = field(repr=False)
    weights: Float[Tensor, "P m"] = field(repr=False)
    scale: Scale
    bandwidth: float
    level: float
    threshold: float
    zero_mass: float
    matvecs: int
    reason: Reason

    def integral(self) -> float:
        """Integrate the density over its grid, in λ or log λ: 1 − ``zero_mass`` to about 1e-8."""
        x = self.grid.log() if self.scale == "log" else self.grid
        return float(torch.trapezoid(self.density, x))


@algorithm
def spectral_density(
    A: Matrix | Given,
    *,
    scale: Scale = "linear",
    probes: int = 10,
    steps: int = 100,
    grid_size: int = 1024,
    bandwidth: float | None = None,
    threshold: float | None = None,
    level: float = 0.95,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> SpectralDensity:
    """Estimate the density of the eigenvalues of symmetric A by stochastic Lanczos quadrature.

    Args:
        A: (n, n), symmetric.
        scale: "linear", for any symmetric A; "log", for wide positive spectra.
        probes: the number of random-sign vectors; the band narrows as 1/√probes, and a single probe has no band.
        steps: the largest depth of a Lanczos run, which ends earlier if more depth would not change the density.
            Details finer than about (largest − smallest)/steps need more steps.
        grid_size: the number of grid points; the grid extends six bandwidths beyond the Ritz values.
        bandwidth: the standard deviation of the broadening, in λ or log λ; by default 1 % of the range of Ritz values.
        threshold: on the log scale, the largest number that counts as zero, by default 100 eps ‖A‖.
        level: the probability of the pointwise band.
        generator: source of the probes.
        memory_budget: bytes for the Lanczos bases: fewer probes run at once, and one that is too deep is cut short.
            None is the rest of the budget of the linearisation behind A.
        progress: as in `cg`.

    Costs at most probes × steps products, and keeps as many vectors. If A is a curvature that has at most a quarter as
    many outputs as weights, these are vectors of outputs: probes estimate the eigenvalues of SᵀS for A = S Sᵀ, and the
    share of the remaining ones, which are zero, is exact.

    Returns:
        A SpectralDensity: the grid, the density on it and its band over probes.

    Raises:
        ValueError: A is not square or not symmetric, a product is not finite, no eigenvalue is above the threshold (log
            scale), or an option is out of range, such as a bandwidth finer than the grid.

    Source: Lin, Saad & Yang 2016; Ghorbani, Krishnan & Xiao 2019; the log density as in Papyan 2020.

    Examples:
        >>> A = torch.diag(torch.linspace(0, 1, 50))
        >>> density = co.linalg.spectral_density(A, probes=2, generator=torch.Generator().manual_seed(0))
        >>> bool(density.lower.max() <= density.density.max() <= density.upper.max())
        True
    """
    A = as_matrix(A)
    check_choice("scale", scale, ("linear", "log"))
    check_options(probes=probes, steps=steps, bandwidth=bandwidth, level=level)
    checked_whole("grid_size", grid_size, 32)
    n, S = describe_square(A).rows, getattr(A, "narrow_root", None)
    current_run().expect(probes * min(steps, n if S is None else S.shape[1]))
    with (
        torch.no_grad(),
        probing(A if S is None else S.mT @ S, generator, Limits(), TWO_STEPS_VECTORS) as probed,
    ):
        runs = _Probes(probed, n, probes, steps)
        rounding = NEAR_ZERO * runs.run.eps * max(runs.run.scale, torch.finfo(torch.float64).tiny)
        zero = rounding if threshold is None else float(threshold)
        view = _View(scale, zero, grid_size, bandwidth, folded=scale == "linear" and is_psd(A))
        runs.go(view, level)
    nodes, weights = runs.rules(runs.run.depth)
    if float(nodes.min()) < -rounding:  # the tag is wrong, and a fold would hide it
        view = replace(view, folded=False)
    # The density at full depth, and again at less depth, on one grid.
    x, width = view.grid(nodes, weights)
    densities = view.density(nodes, weights, x, width)
    change = (densities.mean(0) - view.density(*runs.rules(_less(runs.run.depth)), x, width).mean(0)).abs()
    if runs.complete:
        change = torch.zeros_like(change)
    half, value = _half_width(densities, level), densities.mean(0)
    # Squared components of eigenvectors are skewed to the right, so the upper end uses the logarithm of the mean.
    upper = torch.where(value > 0, value * torch.exp(half / value), half) + change
    lower = (value - half - change).clamp_min(0)
    zero_mass = float((weights * (nodes <= zero)).sum(1).mean()) if scale == "log" else 0.0
    device = describe_square(A).device
    return SpectralDensity(
        (x.exp() if scale == "log" else x).to(device),
        value.to(device),
        lower.to(device),
        upper.to(device),
        nodes.to(device),
        weights.to(device),
        scale=scale,
        bandwidth=width,
        level=level,
        threshold=zero,
        zero_mass=zero_mass,
        matvecs=runs.matvecs,
        reason=runs.reason,
    )


def _less(depth: int) -> int:
    return max(1, depth - max(2, depth // 4))


def _half_width(densities: Float[Tensor, "P G"], level: float) -> Float[Tensor, " G"]:
    from scipy.special import stdtrit  # a slow import that few calls need

    count = len(densities)
    if count == 1:
        return torch.full_like(densities[0], math.inf)
    return float(stdtrit(count - 1, 0.5 + level / 2)) * densities.std(0) / math.sqrt(count)


@dataclass(frozen=True)
class _View:
    """The variable in which densities are computed: the scale, its zero, the grid and the broadening."""

    scale: str
    threshold: float
    size: int
    bandwidth: float | None
    folded: bool = False
    """Whether no eigenvalue is below zero: what the broadening would put there is added to its mirror image."""

    def place(self, nodes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return nodes in the variable of the scale, and the weights of those that it can show."""
        if self.scale == "linear":
            return nodes.clamp_min(0) if self.folded else nodes, weights
        seen = nodes > self.threshold
        return torch.where(seen, nodes, 1.0).log(), torch.where(seen, weights, 0.0)

    def grid(self, nodes: Tensor, weights: Tensor) -> tuple[Float[Tensor, " G"], float]:
        """Return the grid in the variable of the scale, and the bandwidth."""
        places, present = self.place(nodes, weights)
        places = places[present > 0]
        if not len(places):
            raise ValueError(f"no eigenvalue is above the threshold {self.threshold:.3e}; use the linear scale.")
        low, high = float(places.min()), float(places.max())
        unit = 1.0 if self.scale == "log" else max(abs(low), abs(high)) or 1.0
        # A single eigenvalue has no range: its broadening is relative to its own size.
        spread = high - low if high - low > 1e-6 * unit else unit
        width = 0.01 * spread if self.bandwidth is None else self.bandwidth
        tails = 6 * width  # a Gaussian ends within so many of its widths
        first = low - tails
        first = max(first, 0.0) if self.folded else first
        x = torch.linspace(first, high + tails, self.size, dtype=torch.float64)
        if float(x[1] - x[0]) > width:
            needed = math.ceil((high - low + 2 * tails) / width) + 1
            raise ValueError(f"a bandwidth of {width:.3g} needs grid_size >= {needed}, got {self.size}.")
        return x, width

    def density(self, nodes: Tensor, weights: Tensor, x: Tensor, width: float) -> Float[Tensor, "P G"]:
        places, present = self.place(nodes, weights)
        rows = []
        for place, weight in zip(places, present):
            bells = torch.exp(-0.5 * ((x[:, None] - place) / width).square())
            if self.folded:
                bells = bells + torch.exp(-0.5 * ((x[:, None] + place) / width).square())
            bells = bells / (width * math.sqrt(2 * math.pi))
            rows.append(bells @ weight)
        return torch.stack(rows)


class _Probes:
    """Lanczos runs from random signs, as many at once as memory allows.

    The matrix multiplied may be smaller than the one asked about, which has ``n`` eigenvalues: the others are zero.
    """

    def __init__(self, probed: Probed, n: int, probes: int, steps: int) -> None:
        self.probed, self.probes = probed, probes
        rows, vector, memory = probed.facts.rows, probed.facts.vector_bytes, probed.limits.memory
        self.share = rows / n
        self.wanted = min(steps, rows)
        self.together = columns_at_a_time(probes, vector * (self.wanted + 2), memory)
        self.tridiagonals: list[Tensor] = []
        self.matvecs, self.reason = 0, Reason.CONVERGED
        self.complete = True
        self.run = LockStep.within(probed.multiply, probed.probes(self.together), 10, self.wanted, memory)
        self.run.extend(10)

    def go(self, view: _View, level: float) -> None:
        """Deepen the first probes until depth matters little, then run the others to the same depth."""
        if not self.run.deepen(lambda depth: max(2, depth // 8), lambda: self._is_settled(view, level)):
            self.reason = Reason.ITERATION_LIMIT if self.run.most == self.wanted else Reason.RANK_CAPPED
        depth = self.run.depth
        self._collect(self.run)
        while len(self.tridiagonals) < self.probes:
            count = min(self.together, self.probes - len(self.tridiagonals))
            self.run = LockStep(self.probed.multiply, self.probed.probes(count), depth)
            self.run.extend(depth)
            self._collect(self.run)

    def _collect(self, run: LockStep) -> None:
        run.check()
        self.tridiagonals += [run.tridiagonal(k) for k in range(run.K)]
        self.matvecs += run.matvecs
        self.complete &= bool(run.done.all())

    def _is_settled(self, view: _View, level: float) -> bool:
        run = self.run
        if bool(run.done.all()) or not run.finite:
            return True
        tridiagonals, less = [run.tridiagonal(k) for k in range(run.K)], _less(run.depth)
        now, before = self._rules(tridiagonals), self._rules([T[:less, :less] for T in tridiagonals])
        try:
            x, width = view.grid(*now)
        except ValueError:
            return False  # errors of the grid are raised at the end
        x = x[:: max(1, int(width / float(x[1] - x[0])))]  # no feature is finer than the bandwidth
        densities = view.density(*now, x, width)
        change = (densities.mean(0) - view.density(*before, x, width).mean(0)).abs().sum()
        half = _half_width(densities, level) * math.sqrt(run.K / self.probes)
        return bool(change <= 0.1 * half.sum()) and run.K > 1

    def rules(self, depth: int) -> tuple[Float[Tensor, "P m"], Float[Tensor, "P m"]]:
        """Return nodes and weights of every probe at this depth, or at its own depth if that is less."""
        return self._rules([T[:depth, :depth] for T in self.tridiagonals])

    def _rules(self, tridiagonals: list[Tensor]) -> tuple[Tensor, Tensor]:
        pairs = [torch.linalg.eigh(T) for T in tridiagonals]
        columns = [[values for values, _ in pairs], [V[0].square() for _, V in pairs]]
        nodes, weights = (torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True) for tensors in columns)
        if self.share == 1:
            return nodes, weights
        zero = torch.zeros(len(nodes), 1, dtype=nodes.dtype)
        return torch.cat([zero, nodes], 1), torch.cat([zero + 1 - self.share, self.share * weights], 1)
