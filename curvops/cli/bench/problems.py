"""The problems by name: spectra with random eigenvectors, the GGN of a small digits network, and users' own."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor, nn

import curvops as co
from curvops.cli.bench.problem import BenchError, CountingOperator, Problem
from curvops.cli.digits import load_digits
from curvops.linalg import Damped, Dense

DIGITS = "digits-ggn"
TALL = "tall"
DIGITS_PRIOR, DIGITS_POINTS = 0.1, 300
Seed = int | torch.Generator
"""A number, or a function that draws it from a generator."""


def powers(n: int, exponent: float | int) -> Tensor:
    """Return k^exponent for k = 1, ..., n."""
    return torch.arange(1, n + 1, dtype=torch.float64) ** exponent


def geometric(n: int, ratio: float) -> Tensor:
    """Return the n values 1, ratio, ratio², ...."""
    return ratio ** torch.arange(n, dtype=torch.float64)


def log_spaced(n: int, kappa: float | int) -> Tensor:
    """Return n values from 1 down to 1/kappa, evenly spaced in their logarithm."""
    return torch.logspace(0, -math.log10(kappa), n, dtype=torch.float64)


def flat(n: int, low: float | int, high: float | int) -> Tensor:
    """Return n evenly spaced values."""
    return torch.linspace(low, high, n, dtype=torch.float64)


def step(n: int, large: int, high: float | int, low: float | int) -> Tensor:
    """Return ``large`` values of ``high`` and n − ``large`` values of ``low``."""
    return torch.cat([torch.full((large,), high, dtype=torch.float64), torch.full((n - large,), low).double()])


def clusters(n: int, centres: Sequence[float | int], width: float = 1e-3) -> Tensor:
    """Return n values in equal clusters, spread over ``width`` above each centre; the first get the remainder."""
    sizes = [len(part) for part in torch.arange(n).tensor_split(len(centres))]
    return torch.cat([centre + width * flat(size, 0, 1) for centre, size in zip(centres, sizes)])


def rotation(n: int, seed: Seed = 0) -> Tensor:
    """Draw a random orthogonal matrix (n, n), float64."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q


def symmetric(eigenvalues: Tensor, seed: Seed = 0) -> Tensor:
    """Make a dense symmetric matrix with these eigenvalues and random eigenvectors, in their dtype."""
    Q = rotation(len(eigenvalues), seed)
    A = (Q * eigenvalues.double()) @ Q.mT
    return ((A + A.mT) / 2).to(eigenvalues.dtype)


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues of G as a function of their number, and the shift of A = G + shift I."""

    values: Callable[[int], Tensor]
    shift: float
    text: str


def _kappa(exponent: int) -> Eigenvalues:
    return Eigenvalues(lambda n: log_spaced(n, 10.0**exponent), 0.0, f"log-spaced from 1 to 1e-{exponent}")


def _indefinite(n: int) -> Tensor:
    return torch.cat([flat(n, 1 + 2 / n, 3)[:-1], torch.tensor([-0.243]).double()])


FOUR = (1, 10, 50, 200)
SPECTRA: dict[str, Eigenvalues] = {
    "decaying": Eigenvalues(lambda n: powers(n, -2), 1e-4, "eigenvalues k⁻² + 1e-4"),
    "exponential": Eigenvalues(lambda n: geometric(n, 0.9), 1e-6, "eigenvalues 0.9ᵏ + 1e-6"),
    "step": Eigenvalues(lambda n: step(n, max(1, n // 10), 100, 0), 1.0, "a tenth at 101, the rest at 1"),
    "clustered": Eigenvalues(lambda n: clusters(n, FOUR), 0.0, "four tight clusters, at 1, 10, 50, 200"),
    "flat": Eigenvalues(lambda n: flat(n, 1 + 2 / n, 3), 0.0, "eigenvalues 1 to 3"),
    **{f"kappa1e{exponent}": _kappa(exponent) for exponent in (4, 6, 8)},
    "indefinite": Eigenvalues(_indefinite, 0.0, "1 to 3, and one -0.243"),
}
NAMES = (*SPECTRA, DIGITS, TALL)


def build(name: str, size: int, columns: int, dtype: torch.dtype, seed: int) -> Problem:
    """Build the problem of this name, or of a ``module:function``.

    Args:
        name: One of `NAMES`, or a user's ``module:function``, which determines matrix, dtype and right-hand sides.
        size: The number of rows; for the digits network approximate.
        columns: The number of right-hand sides.
        dtype: The dtype of matrix and right-hand sides.
        seed: The seed of eigenvectors and right-hand sides.

    Raises:
        BenchError: There is no such module or function, or the function returned something else.
    """
    if ":" in name:
        return load_user_problem(name)
    generator = torch.Generator().manual_seed(seed)
    if name in (DIGITS, TALL):
        return (_digits if name == DIGITS else _tall)(size, columns, dtype, generator)
    spectrum = SPECTRA[name]
    values, shift = spectrum.values(size), spectrum.shift
    dense, lowest = symmetric(values, generator).to(dtype), float(values.min()) + shift
    G = Dense(dense, psd=bool((values >= 0).all()))
    B = _right_hand_sides(size, columns, dtype, generator)
    bounds = (max(lowest, 0.0), lowest > 0, G.tensor.diagonal())
    return Problem(name, spectrum.text, CountingOperator(G), shift, B, *bounds, tensor=G.tensor)


def _right_hand_sides(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(columns, rows, generator=generator, dtype=torch.float64).to(dtype).mT


def _tall(size: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Problem:
    """Make a least-squares problem with twice as many rows as columns and random right-hand sides."""
    draws = (torch.randn(rows, size, generator=generator, dtype=torch.float64) for rows in (2 * size, size))
    U, V = (torch.linalg.qr(draw).Q for draw in draws)
    dense = ((U * log_spaced(size, 1e2)) @ V.mT).to(dtype)
    text = "least squares, singular values log-spaced from 1 to 1e-2"
    B = _right_hand_sides(2 * size, columns, dtype, generator)
    return Problem(TALL, text, CountingOperator(Dense(dense)), 0.0, B, tensor=dense)


def _digits(size: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Problem:
    """Make the GGN of a network 64-w-10 with about ``size`` weights, trained for a few seconds."""
    width = max(1, round((size - 10) / 75))
    from sklearn.model_selection import train_test_split  # of the extra, as the digits themselves

    images, labels = load_digits()
    x, _, y, _ = train_test_split(images, labels, train_size=DIGITS_POINTS, stratify=labels, random_state=0)
    x = x.to(dtype)
    torch.manual_seed(int(generator.initial_seed()))
    network = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10)).to(dtype)
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        penalty = DIGITS_PRIOR / 2 * sum(p.square().sum() for p in network.parameters())
        ((nn.functional.cross_entropy(network(x), y, reduction="sum") + penalty) / len(x)).backward()
        optimizer.step()
    lin = co.linearize(network.eval(), (x, y), "classification")
    text = f"GGN of a digits network 64-{width}-10 with {len(x)} points, prior precision {DIGITS_PRIOR}"
    diagonal, layers = co.DiagonalGGN(lin).entries, co.BlockDiagonal(lin)
    B = _right_hand_sides(lin.num_parameters, columns, dtype, generator)
    G = CountingOperator(co.GGN(lin))
    return Problem(DIGITS, text, G, DIGITS_PRIOR, B, DIGITS_PRIOR, True, diagonal, layers)


def import_module_here(name: str) -> Any:
    """Import a module, which may be in the working directory."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)


def load_user_problem(name: str) -> Problem:
    """Call a user's ``module:function``, which may be in the working directory, and make a problem from its result.

    Raises:
        BenchError: There is no such module or function, or it fails or returns something else.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = import_module_here(module_name)
    except Exception as error:  # a user's module may fail in any way
        raise BenchError(f"cannot import {module_name!r} for the problem {name!r}: {_line(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name]
        known = ", ".join(own) or "none"
        raise BenchError(f"module {module_name!r} has no function {function_name!r}; it has: {known}.")
    try:
        returned = function()
    except Exception as error:  # for the same reason
        raise BenchError(f"{name} failed: {_line(error)}") from error
    return _check(name, returned)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _check(name: str, returned: Any) -> Problem:
    """Make a problem from a user's operator and right-hand sides."""
    wanted = f"{name} must return (operator, right-hand sides)"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise BenchError(f"{wanted}, got {type(returned).__name__}.")
    A, B = returned
    if not isinstance(A, Tensor | LinearOperator) or not isinstance(B, Tensor):
        kinds = f"{type(A).__name__} and {type(B).__name__}"
        raise BenchError(f"{wanted}: a tensor or LinearOperator and a tensor, got {kinds}.")
    if len(A.shape) != 2 or not A.dtype.is_floating_point or not all(A.shape):
        raise BenchError(f"{wanted}: the operator must be a floating matrix, got {tuple(A.shape)}, {A.dtype}.")
    if B.ndim not in (1, 2) or B.shape[0] != A.shape[0] or B.dtype != A.dtype or B.device != A.device:
        raise BenchError(
            f"{wanted}: the right-hand sides must be ({A.shape[0]},) or ({A.shape[0]}, K), {A.dtype} on {A.device}; "
            f"got {tuple(B.shape)}, {B.dtype} on {B.device}."
        )
    if not bool(torch.isfinite(B).all()):
        raise BenchError(f"{wanted}: the right-hand sides hold NaN or Inf.")
    wide, text = B.detach().reshape(len(B), -1), f"{type(A).__name__} of {name}"
    if isinstance(A, Damped) and A.shift.ndim == 0:
        shift = float(A.shift)
        lower = shift if getattr(A.base, "psd", False) else 0.0
        return Problem(name, text, CountingOperator(A.base), shift, wide, lower)
    tensor = A.detach() if isinstance(A, Tensor) else None
    return Problem(name, text, CountingOperator(A if tensor is None else Dense(tensor)), 0.0, wide, tensor=tensor)
