"""The matrices of the benchmark: spectra with random eigenvectors, the GGN of a digits network, and users' own."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from linear_operator import LinearOperator
from torch import Tensor, nn

import curvops as co
from curvops.cli.demo import load_digits
from curvops.linalg import Damped, Dense, Operator
from curvops.linalg.solvers.solve import seems_symmetric

KINDS = ("square", "symmetric", "positive semidefinite")
"""Kinds of matrix, each of which includes those after it."""
DIGITS = "digits-ggn"
Seed = int | torch.Generator
"""A number, or a generator that draws it."""


class BenchError(ValueError):
    """Raised for a wrong choice of problems or methods; the message is one line with the possible choices."""


@dataclass
class Counter:
    """The number of products with single vectors so far; a block of K counts as K products."""

    count: int = 0


class CountingOperator(Operator):
    """A square operator that counts another operator's products in ``counter``.

    Its symmetry is determined once: from the tag of a curvops operator, and by two products for other operators.
    """

    def __init__(self, base: LinearOperator, counter: Counter | None = None, symmetric: bool | None = None) -> None:
        if symmetric is None:
            symmetric = base.symmetric if isinstance(base, Operator) else seems_symmetric(base)
        super().__init__(base, counter=Counter() if counter is None else counter, symmetric=symmetric)

    @property
    def base(self) -> LinearOperator:
        """The operator whose products are counted."""
        return self._args[0]

    @property
    def counter(self) -> Counter:
        """The number of products so far."""
        return self._kwargs["counter"]

    @property
    def symmetric(self) -> bool:
        return self._kwargs["symmetric"]

    @property
    def psd(self) -> bool:
        return bool(getattr(self.base, "psd", False))

    def _size(self) -> torch.Size:
        return self.base.shape

    def _product(self, block: Tensor) -> Tensor:
        self.counter.count += block.shape[-1]
        return self.base._matmul(block)

    def _transposed_product(self, block: Tensor) -> Tensor:
        self.counter.count += block.shape[-1]
        return self.base._t_matmul(block)


@dataclass(frozen=True, eq=False)
class Problem:
    """A matrix A = G + shift I (n, n) with right-hand sides B (n, K).

    ``lower`` is a known lower bound of A's spectrum, or 0. ``definite`` is False if A is known to be indefinite; a
    user's matrix counts as definite, since failures are reported with their reason. ``diagonal`` is the diagonal of G
    if it is cheap, ``layers`` its diagonal blocks.
    """

    name: str
    text: str
    G: CountingOperator
    shift: float
    B: Tensor
    lower: float = 0.0
    definite: bool = True
    diagonal: Tensor | None = None
    layers: LinearOperator | None = None

    @cached_property
    def A(self) -> LinearOperator:
        """The matrix as a counting operator."""
        return self.G.add_diagonal(self.shift) if self.shift else self.G

    @property
    def title(self) -> str:
        """The size of A and the number of right-hand sides, for headings."""
        n, sides = self.B.shape
        return f"n = {n:,}, {sides} right-hand side{'s' if sides > 1 else ''}"

    @property
    def kind(self) -> str:
        """The kind of A that a method may rely on, one of `KINDS`."""
        if not self.G.symmetric:
            return KINDS[0]
        return KINDS[2] if self.definite else KINDS[1]

    def uncounted(self, V: Tensor) -> Tensor:
        """Return A V without counting its products."""
        before = self.G.counter.count
        image = self.A._matmul(V)
        self.G.counter.count = before
        return image

    def residual(self, X: Tensor) -> float:
        """Return the worst ‖b − Ax‖/‖b‖ of the columns, without counting the products."""
        lengths = self.B.norm(dim=0).clamp_min(torch.finfo(self.B.dtype).tiny)
        return float(((self.B - self.uncounted(X)).norm(dim=0) / lengths).nan_to_num(torch.inf).max())

    @cached_property
    def dense(self) -> Tensor | None:
        """The matrix A in float64, by n products that are not counted; None if it is too large."""
        n = len(self.B)
        if n > 4000:
            return None
        dense = self.uncounted(torch.eye(n, dtype=self.B.dtype, device=self.B.device)).double()
        return (dense + dense.mT) / 2 if self.G.symmetric else dense

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """The true value of each quantity that exists and can be computed from the dense matrix."""
        if self.dense is None:
            return {}
        values = {"trace": self.dense.trace(), "diagonal": self.dense.diagonal()}
        L, info = torch.linalg.cholesky_ex(self.dense)
        return values | ({"logdet": 2 * L.diagonal().log().sum()} if self.G.symmetric and not info else {})


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
    sizes = [len(cluster) for cluster in torch.arange(n).tensor_split(len(centres))]
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


MINUS = torch.tensor([-0.243], dtype=torch.float64)
SPECTRA: dict[str, tuple[Callable[[int], Tensor], float, str]] = {
    "decaying": (lambda n: powers(n, -2), 1e-4, "eigenvalues k⁻² + 1e-4"),
    "exponential": (lambda n: geometric(n, 0.9), 1e-6, "eigenvalues 0.9ᵏ + 1e-6"),
    "step": (lambda n: step(n, max(1, n // 10), 100, 0), 1.0, "a tenth at 101, the rest at 1"),
    "clustered": (lambda n: clusters(n, (1, 10, 50, 200)), 0.0, "four tight clusters, at 1, 10, 50, 200"),
    "flat": (lambda n: flat(n, 1 + 2 / n, 3), 0.0, "eigenvalues 1 to 3"),
    "kappa1e4": (lambda n: log_spaced(n, 1e4), 0.0, "log-spaced from 1 to 1e-4"),
    "kappa1e6": (lambda n: log_spaced(n, 1e6), 0.0, "log-spaced from 1 to 1e-6"),
    "kappa1e8": (lambda n: log_spaced(n, 1e8), 0.0, "log-spaced from 1 to 1e-8"),
    "indefinite": (lambda n: torch.cat([flat(n, 1 + 2 / n, 3)[:-1], MINUS]), 0.0, "1 to 3, and one -0.243"),
}
"""Eigenvalues of G as a function of their number, the shift of A = G + shift I, and a description."""
NAMES = (*SPECTRA, DIGITS)


def build(name: str, size: int, columns: int, dtype: torch.dtype) -> Problem:
    """Build a problem.

    Args:
        name: One of `NAMES`, or a user's ``module:function``, which determines matrix, dtype and right-hand sides.
        size: The number of rows; for the digits network approximate.
        columns: The number of right-hand sides.
        dtype: The dtype of matrix and right-hand sides.

    Raises:
        BenchError: There is no such module or function, or the function returned something else.
    """
    if ":" in name:
        return _of_user(name)
    generator = torch.Generator().manual_seed(0)
    if name == DIGITS:
        return _digits(size, columns, dtype, generator)
    spectrum, shift, text = SPECTRA[name]
    values = spectrum(size)
    dense, lowest = symmetric(values, generator).to(dtype), float(values.min()) + shift
    G = CountingOperator(Dense(dense, psd=bool((values >= 0).all())))
    B = _right_hand_sides(size, columns, dtype, generator)
    return Problem(name, text, G, shift, B, max(lowest, 0.0), lowest > 0, dense.diagonal())


def _right_hand_sides(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(columns, rows, generator=generator, dtype=torch.float64).to(dtype).mT


def _digits(size: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Problem:
    """Make the GGN of a network 64-w-10 with about ``size`` weights, trained for a few seconds."""
    prior = 0.1
    width = max(1, round((size - 10) / 75))
    from sklearn.model_selection import train_test_split  # of the extra, as the digits themselves

    images, labels = load_digits()
    x, _, y, _ = train_test_split(images, labels, train_size=300, stratify=labels, random_state=0)
    x = x.to(dtype)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10)).to(dtype)
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        penalty = prior / 2 * sum(p.square().sum() for p in network.parameters())
        ((nn.functional.cross_entropy(network(x), y, reduction="sum") + penalty) / len(x)).backward()
        optimizer.step()
    lin = co.linearize(network.eval(), (x, y), "classification")
    text = f"GGN of a digits network 64-{width}-10 with {len(x)} points, prior precision {prior}"
    diagonal, layers = co.DiagonalGGN(lin).entries, co.BlockDiagonal(lin)
    B = _right_hand_sides(lin.num_parameters, columns, dtype, generator)
    return Problem(DIGITS, text, CountingOperator(co.GGN(lin)), prior, B, prior, True, diagonal, layers)


def _of_user(name: str) -> Problem:
    """Call a user's ``module:function``, which may be in the working directory, and make a problem from its result."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        A, B = getattr(importlib.import_module(module), function)()
        fits = tuple(A.shape) == 2 * tuple(B.shape[:1]) and A.dtype == B.dtype
    except Exception as error:  # a user's module may fail in any way
        raise BenchError(f"{name} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not fits:
        raise BenchError(
            f"{name} must return a square operator or tensor (n, n) and right-hand sides (n,) or (n, K) of its dtype, "
            f"got {tuple(A.shape)} {A.dtype} and {tuple(B.shape)} {B.dtype}."
        )
    B, text = B.detach().reshape(len(B), -1), f"{type(A).__name__} of {name}"
    if isinstance(A, Damped) and A.shift.ndim == 0:
        shift = float(A.shift)
        lower = shift if getattr(A.base, "psd", False) else 0.0
        return Problem(name, text, CountingOperator(A.base), shift, B, lower)
    if isinstance(A, Tensor):
        return Problem(name, text, CountingOperator(Dense(A.detach())), 0.0, B, diagonal=A.detach().diagonal())
    return Problem(name, text, CountingOperator(A), 0.0, B)
