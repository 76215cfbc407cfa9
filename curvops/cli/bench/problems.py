"""The problems by name: spectra with random eigenvectors, and the GGN of a small digits network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import curvops as co
from curvops.cli.bench import spectra
from curvops.cli.bench.counted import Counted
from curvops.cli.bench.own import users
from curvops.cli.bench.problem import BenchError, Problem
from curvops.cli.demo.digits import load_digits
from curvops.cli.demo.network import fit, perceptron
from curvops.linalg import Dense

DIGITS = "digits-ggn"
TALL = "tall"
DIGITS_PRIOR = 0.1


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues of G by number, and the shift of A = G + shift I."""

    values: Callable[[int], Tensor]
    shift: float
    text: str


SPECTRA: dict[str, Eigenvalues] = {
    "decaying": Eigenvalues(lambda n: spectra.powers(n, -2), 1e-4, "eigenvalues k⁻² + 1e-4"),
    "exponential": Eigenvalues(lambda n: spectra.geometric(n, 0.9), 1e-6, "eigenvalues 0.9ᵏ + 1e-6"),
    "step": Eigenvalues(lambda n: spectra.step(n, max(1, n // 10), 100, 0), 1.0, "a tenth at 101, the rest at 1"),
    "clustered": Eigenvalues(
        lambda n: spectra.clusters(n, (1, 10, 50, 200)), 0.0, "four tight clusters, at 1, 10, 50, 200"
    ),
    "flat": Eigenvalues(lambda n: spectra.flat(n, 1 + 2 / n, 3), 0.0, "eigenvalues 1 to 3"),
    "kappa1e4": Eigenvalues(lambda n: spectra.log_spaced(n, 1e4), 0.0, "log-spaced from 1 to 1e-4"),
    "kappa1e6": Eigenvalues(lambda n: spectra.log_spaced(n, 1e6), 0.0, "log-spaced from 1 to 1e-6"),
    "kappa1e8": Eigenvalues(lambda n: spectra.log_spaced(n, 1e8), 0.0, "log-spaced from 1 to 1e-8"),
    "indefinite": Eigenvalues(
        lambda n: torch.cat([spectra.flat(n, 1 + 2 / n, 3)[:-1], torch.tensor([-0.243]).double()]),
        0.0,
        "1 to 3, and one -0.243",
    ),
}
NAMES = (*SPECTRA, DIGITS, TALL)


def build(name: str, size: int, columns: int, dtype: torch.dtype, seed: int) -> Problem:
    """The problem of this name, or of a ``module:function``.

    Raises:
        BenchError: no such name, module or function, or the function returned something else.
    """
    generator = torch.Generator().manual_seed(seed)
    if ":" in name:
        return users(name)
    if name == DIGITS:
        return _digits(size, columns, dtype, generator)
    if name == TALL:
        return _tall(size, columns, dtype, generator)
    if name not in SPECTRA:
        raise BenchError(f"no problem {name!r}; choose from {', '.join(NAMES)}, or a module:function of yours.")
    spectrum = SPECTRA[name]
    values = spectrum.values(size)
    dense = spectra.symmetric(values, generator).to(dtype)
    lowest = float(values.min()) + spectrum.shift
    G = Dense(dense, psd=bool((values >= 0).all()))
    B = _right_hand_sides(size, columns, dtype, generator)
    diagonal = G.tensor.diagonal()
    return Problem(
        name, spectrum.text, Counted(G), spectrum.shift, B, max(lowest, 0.0), lowest > 0, diagonal, tensor=G.tensor
    )


def _right_hand_sides(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(columns, rows, generator=generator, dtype=torch.float64).to(dtype).mT


def _tall(size: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Problem:
    """Least squares with twice as many rows as columns and random right-hand sides."""
    U, V = (
        torch.linalg.qr(torch.randn(rows, size, generator=generator, dtype=torch.float64)).Q
        for rows in (2 * size, size)
    )
    dense = ((U * spectra.log_spaced(size, 1e2)) @ V.mT).to(dtype)
    text = "least squares, singular values log-spaced from 1 to 1e-2"
    B = _right_hand_sides(2 * size, columns, dtype, generator)
    return Problem(TALL, text, Counted(Dense(dense)), 0.0, B, tensor=dense)


def _digits(size: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Problem:
    """The GGN of a network 64-w-10 with about ``size`` weights, at weights trained for a few seconds."""
    width = max(1, round((size - 10) / 75))
    data = load_digits(train=300).train.to(dtype)
    torch.manual_seed(int(generator.initial_seed()))
    network = fit(perceptron(64, width, 10).to(dtype), data, DIGITS_PRIOR, steps=100, rate=0.02)
    lin = co.linearize(network, (data.x, data.y), "classification")
    n = lin.num_parameters
    text = f"GGN of a digits network 64-{width}-10 with {len(data)} points, prior precision {DIGITS_PRIOR}"
    diagonal, layers = co.DiagonalGGN(lin).entries, co.BlockDiagonal(lin)
    B = _right_hand_sides(n, columns, dtype, generator)
    return Problem(DIGITS, text, Counted(co.GGN(lin)), DIGITS_PRIOR, B, DIGITS_PRIOR, True, diagonal, layers)
