"""The matrices: spectra by name, the GGN of a small digits network, or what a user's function returns."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor, nn

import curvops as co
from curvops.cli.bench.counted import Counted
from curvops.cli.demo.digits import load_digits
from curvops.linalg import Damped, Dense

EXACT_SIZE = 4000
DIGITS = "digits-ggn"
DIGITS_PRIOR = 0.1


class BenchError(ValueError):
    """What was asked for cannot be run; the message is one line with the choices."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A = G + shift I, right-hand sides B (n, K), and what is known beforehand.

    ``lower`` is a known lower bound of A's spectrum, 0 for none. ``definite`` is False where A is known to be
    indefinite: of a user's matrix one may hope, since failures come with their reason. ``diagonal`` is G's where it is
    cheap, ``layers`` its diagonal blocks. ``text`` says what it is, for the table's heading.
    """

    name: str
    text: str
    G: Counted
    shift: float
    B: Tensor
    lower: float = 0.0
    definite: bool = True
    diagonal: Tensor | None = None
    layers: LinearOperator | None = None

    @cached_property
    def A(self) -> LinearOperator:
        """The matrix itself."""
        return self.G.add_diagonal(self.shift) if self.shift else self.G

    @property
    def kind(self) -> str:
        """What a method may rely on: "psd", "symmetric" or "any"."""
        if not self.G.symmetric:
            return "any"
        return "psd" if self.definite else "symmetric"

    def residual(self, x: Tensor) -> float:
        """The worst ‖b − Ax‖/‖b‖, not counted."""
        before = self.G.counter.count
        A = self.A if x.dtype == self.B.dtype else self.A.to(x.dtype)
        left = (self.B.to(x.dtype) - A._matmul(x)).norm(dim=0) / self.B.to(x.dtype).norm(dim=0)
        self.G.counter.count = before
        return float(left.nan_to_num(torch.inf).max())

    @cached_property
    def dense(self) -> Tensor | None:
        """A in float64 by n products that are not counted, None where it is too large."""
        n = self.B.shape[0]
        if n > EXACT_SIZE:
            return None
        before = self.G.counter.count
        eye = torch.eye(n, dtype=self.B.dtype, device=self.B.device)
        dense = torch.cat([self.A._matmul(part) for part in eye.split(256, dim=1)], 1).double()
        self.G.counter.count = before
        return (dense + dense.mT) / 2

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """Trace, diagonal and log-determinant of A by the dense matrix; those that exist."""
        if self.dense is None:
            return {}
        diagonal = self.dense.diagonal()
        L, info = torch.linalg.cholesky_ex(self.dense)
        found = {"trace": diagonal.sum(), "diagonal": diagonal}
        return found | ({} if bool(info != 0) else {"logdet": 2 * L.diagonal().log().sum()})


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of G by number, and the shift of A = G + shift I."""

    values: Callable[[int], Tensor]
    shift: float
    text: str


def _index(n: int) -> Tensor:
    return torch.arange(1, n + 1, dtype=torch.float64)


def _log_spaced(kappa: float) -> Callable[[int], Tensor]:
    return lambda n: kappa ** -((_index(n) - 1) / max(n - 1, 1))


def _clusters(n: int) -> Tensor:
    centres = torch.tensor([1.0, 10.0, 50.0, 200.0], dtype=torch.float64)
    return centres[torch.arange(n) * 4 // n] + 1e-3 * _index(n) / n


SPECTRA: dict[str, Spectrum] = {
    "decaying": Spectrum(lambda n: _index(n) ** -2, 1e-4, "eigenvalues k⁻² + 1e-4"),
    "exponential": Spectrum(lambda n: 0.9 ** (_index(n) - 1), 1e-6, "eigenvalues 0.9ᵏ + 1e-6"),
    "step": Spectrum(lambda n: 100 * (_index(n) <= max(1, n // 10)).double(), 1.0, "a tenth at 101, the rest at 1"),
    "clustered": Spectrum(_clusters, 0.0, "four tight clusters, at 1, 10, 50, 200"),
    "flat": Spectrum(lambda n: 1 + 2 * _index(n) / n, 0.0, "eigenvalues 1 to 3"),
    "kappa1e4": Spectrum(_log_spaced(1e4), 0.0, "log-spaced from 1 to 1e-4"),
    "kappa1e6": Spectrum(_log_spaced(1e6), 0.0, "log-spaced from 1 to 1e-6"),
    "kappa1e8": Spectrum(_log_spaced(1e8), 0.0, "log-spaced from 1 to 1e-8"),
    "indefinite": Spectrum(
        lambda n: torch.where(_index(n) == n, -0.243, 1 + 2 * _index(n) / n), 0.0, "1 to 3, and one -0.243"
    ),
}
NAMES = (*SPECTRA, DIGITS)


def build(name: str, size: int, columns: int, dtype: torch.dtype, seed: int) -> Problem:
    """The problem of this name, or of a ``module:function``.

    Raises:
        BenchError: no such name, module or function, or the function returned something else.
    """
    generator = torch.Generator().manual_seed(seed)
    if ":" in name:
        return _users(name)
    if name == DIGITS:
        return _digits(size, columns, dtype, generator)
    if name not in SPECTRA:
        raise BenchError(f"no problem {name!r}; choose from {', '.join(NAMES)}, or a module:function of yours.")
    spectrum = SPECTRA[name]
    values = spectrum.values(size)
    Q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    dense = (Q * values) @ Q.mT
    lowest = float(values.min()) + spectrum.shift
    G = Dense(((dense + dense.mT) / 2).to(dtype), psd=bool((values >= 0).all()))
    B = torch.randn(columns, size, generator=generator, dtype=torch.float64).to(dtype).mT
    return Problem(
        name, spectrum.text, Counted(G), spectrum.shift, B, max(lowest, 0.0), lowest > 0, G.tensor.diagonal()
    )


def _digits(size: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Problem:
    """The GGN of a network 64-w-10 with about ``size`` weights, at weights trained for a few seconds."""
    width = max(1, round((size - 10) / 75))
    data = load_digits(train=300).train
    torch.manual_seed(int(generator.initial_seed()))
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10)).to(dtype)
    x, y = data.x.to(dtype), data.y
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        penalty = sum((p.square().sum() for p in network.parameters()), start=x.new_zeros(()))
        (nn.functional.cross_entropy(network(x), y, reduction="sum") + DIGITS_PRIOR / 2 * penalty).backward()
        optimizer.step()
    lin = co.linearize(network.eval(), (x, y), "classification")
    n = lin.num_parameters
    B = torch.randn(columns, n, generator=generator, dtype=torch.float64).to(dtype).mT
    text = f"GGN of a digits network 64-{width}-10 with {len(x)} points, prior precision {DIGITS_PRIOR}"
    diagonal = co.DiagonalGGN(lin).entries
    return Problem(
        DIGITS, text, Counted(co.GGN(lin)), DIGITS_PRIOR, B, DIGITS_PRIOR, True, diagonal, co.BlockDiagonal(lin)
    )


def _users(name: str) -> Problem:
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        raise BenchError(f"cannot import {module_name!r} for the problem {name!r}: {_line(error)}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name]
        known = ", ".join(own) or "none"
        raise BenchError(f"module {module_name!r} has no function {function_name!r}; it has: {known}.")
    try:
        returned = function()
    except Exception as error:  # likewise
        raise BenchError(f"{name} failed: {_line(error)}") from error
    return _checked(name, returned)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _checked(name: str, returned: Any) -> Problem:
    """What a user's function returned, as a problem."""
    wanted = f"{name} must return (operator, right-hand sides)"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise BenchError(f"{wanted}, got {type(returned).__name__}.")
    A, B = returned
    if not isinstance(A, Tensor | LinearOperator) or not isinstance(B, Tensor):
        raise BenchError(
            f"{wanted}: a tensor or LinearOperator and a tensor, got {type(A).__name__} and {type(B).__name__}."
        )
    if len(A.shape) != 2 or A.shape[0] != A.shape[1] or not A.dtype.is_floating_point:
        raise BenchError(f"{wanted}: the operator must be a square floating matrix, got {tuple(A.shape)}, {A.dtype}.")
    if B.ndim not in (1, 2) or B.shape[0] != A.shape[0] or B.dtype != A.dtype or B.device != A.device:
        raise BenchError(
            f"{wanted}: the right-hand sides must be ({A.shape[0]},) or ({A.shape[0]}, K), {A.dtype} on {A.device}; "
            f"got {tuple(B.shape)}, {B.dtype} on {B.device}."
        )
    if not bool(torch.isfinite(B).all()):
        raise BenchError(f"{wanted}: the right-hand sides hold NaN or Inf.")
    wide = B.detach().reshape(len(B), -1)
    text = f"{type(A).__name__} of {name}"
    if isinstance(A, Damped) and A.shift.ndim == 0:
        shift = float(A.shift)
        lower = shift if getattr(A.base, "psd", False) else 0.0
        return Problem(name, text, Counted(A.base), shift, wide, lower)
    if isinstance(A, Tensor):
        A = Dense(A.detach())
    return Problem(name, text, Counted(A), 0.0, wide)
