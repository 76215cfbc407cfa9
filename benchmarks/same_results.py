"""Are public results unchanged?   python -m benchmarks.same_results --save before.json; ... --compare before.json

A fixed list of public calls with fixed seeds, in float64 and on one thread: values, reasons and numbers of products.
Run it before and after a change of structure: it prints every difference, and any difference makes the exit status 1.
Values may differ by 1e-8 relatively, since rounding depends on the order of sums; counts and reasons must be equal.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import curvops as co
from benchmarks.digits import Images
from benchmarks.layers import fit, perceptron
from curvops import linalg
from curvops.cli.problems import flat, geometric, log_spaced, powers, step, symmetric

ROUNDING = 1e-8
N = 300


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrices() -> dict[str, Tensor]:
    spectra = {
        "k⁻²": powers(N, -2),
        "0.9ᵏ": geometric(N, 0.9),
        "step": step(N, 30, 100, 1),
        "flat": flat(N, 1, 3),
        "κ = 1e6": log_spaced(N, 1e6),
        "indefinite": flat(N, -1, 3),
    }
    return {name: symmetric(values, 7) for name, values in spectra.items()}


Call = Callable[[], Any]


def of_matrix(A: Tensor, definite: bool) -> Iterator[tuple[str, Call]]:
    """Calls of linear algebra on one symmetric matrix, with the promise that it is positive definite or without."""
    B = torch.randn(N, 3, generator=seeded(1), dtype=torch.float64)
    tall = torch.cat([A, A[: N // 2]])
    shift = 1e-2 if definite else 0.0
    for rtol in (1e-4, 1e-9):
        yield f"minres {rtol:g}", lambda rtol=rtol: linalg.minres(A, B, rtol=rtol)
        yield f"lsmr {rtol:g}", lambda rtol=rtol: linalg.lsmr(tall, tall @ B, rtol=rtol)
        yield f"solve {rtol:g}", lambda rtol=rtol: linalg.solve(A, B, method="minres", rtol=rtol)
        if definite:
            yield f"cg {rtol:g}", lambda rtol=rtol: linalg.cg(A, B, rtol=rtol)
            yield f"cg by columns {rtol:g}", lambda rtol=rtol: linalg.cg(A, B, rtol=rtol, block=False)
            yield f"refined cg {rtol:g}", lambda rtol=rtol: linalg.cg(A.float(), B.float(), rtol=rtol, refine=True)
    for which in ("LA", "SA", "LM"):
        yield f"eigsh {which}", lambda which=which: linalg.eigsh(A, 4, which, rtol=1e-7, generator=seeded())
    yield "lanczos", lambda: linalg.lanczos(A, 30, generator=seeded()).T
    yield "svds", lambda: linalg.svds(tall, 4, rtol=1e-7, generator=seeded())
    yield "trace", lambda: linalg.trace(A, rtol=0.02, generator=seeded())
    for method in ("hutchinson", "hutch++", "xtrace"):
        yield f"trace {method}", lambda m=method: linalg.trace(A, method=m, max_matvecs=60, generator=seeded())
    yield "diagonal", lambda: linalg.diagonal(A, max_matvecs=60, generator=seeded())
    yield "frobenius", lambda: linalg.frobenius_norm(A, max_matvecs=60, generator=seeded())
    yield "density", lambda: linalg.spectral_density(A, probes=4, steps=20, generator=seeded())
    yield "exp", lambda: linalg.apply_function(A, torch.exp, B, rtol=1e-8)
    if not definite:
        return
    yield "dual descent", lambda: linalg.dual_descent(A + torch.eye(N), B, maxiter=300, rtol=1e-2, generator=seeded())
    for budget in (40, 150):
        yield (
            f"logdet {budget}",
            lambda b=budget: linalg.logdet(A, shift=shift, max_matvecs=b, rtol=1e-3, generator=seeded()),
        )
        yield (
            f"effective dimension {budget}",
            lambda b=budget: linalg.effective_dimension(A, shift, max_matvecs=b, rtol=1e-3, generator=seeded()),
        )
    yield "xnystrace", lambda: linalg.trace(A, method="xnystrace", max_matvecs=60, generator=seeded())
    yield "nystrom", lambda: linalg.nystrom(A, 40, shift=shift, generator=seeded()) @ B
    yield "cholesky", lambda: linalg.cholesky(A, 40)
    yield "sqrt", lambda: linalg.sqrt(A, B, rtol=1e-6, lower_bound=1e-7)
    yield "inverse_sqrt", lambda: linalg.inverse_sqrt(A, B, rtol=1e-4, lower_bound=1e-7)
    yield "low_rank", lambda: linalg.low_rank(linalg.Dense(A), 20, generator=seeded()).to_dense()


def of_network() -> Iterator[tuple[str, Call]]:
    """Calls on the curvatures of a small trained network."""
    g = seeded(3)
    x = torch.randn(60, 5, generator=g, dtype=torch.float64)
    y = (x[:, :3] + 0.3 * torch.randn(60, 3, generator=g, dtype=torch.float64)).argmax(1)
    torch.manual_seed(0)
    model = fit(perceptron(5, 24, 24, 3).double(), Images(x, y), prior_precision=1.0, steps=300, rate=1e-2)
    lin = co.linearize(model, (x, y), "classification")
    v = torch.randn(lin.num_parameters, 3, generator=g, dtype=torch.float64)
    test = torch.randn(4, 5, generator=g, dtype=torch.float64)
    curvatures: dict[str, Callable[[], Any]] = {
        "GGN": lambda: co.GGN(lin),
        "GGN, one sample": lambda: co.GGN(lin, mc_samples=1, generator=seeded()),
        "empirical Fisher": lambda: co.EmpiricalFisher(lin),
        "diagonal": lambda: co.DiagonalGGN(lin),
        "KFAC": lambda: co.KFAC(lin),
        "EKFAC": lambda: co.EKFAC(lin),
        "blocks": lambda: co.BlockDiagonal(lin),
        "low rank": lambda: co.low_rank(co.GGN(lin), 12, generator=seeded()),
        "subnetwork": lambda: co.Subnetwork(co.GGN(lin), torch.arange(0, lin.num_parameters, 7)),
    }
    for name, make in curvatures.items():
        yield f"{name} product", lambda make=make: (lambda A: A @ v[: A.shape[-1]])(make())
        yield f"{name} + 1 solve", lambda make=make: (lambda A: A.add_diagonal(1.0).solve(v[: A.shape[-1]]))(make())
        if name == "subnetwork":
            continue
        post = co.laplace(lin, make(), prior_precision=1.0, check_mode=False)
        yield f"{name} variance", lambda post=post: post.predict(test).variance
        yield f"{name} evidence", lambda post=post: post.log_evidence(generator=seeded())
        yield f"{name} samples", lambda post=post: post.sample(3, generator=seeded())
    yield "hessian product", lambda: co.Hessian(lin) @ v
    yield "kernel", lambda: co.TangentKernel(lin, x=test).to_dense()


def told(result: Any) -> dict[str, Any]:
    """Numbers, reasons and counts of a result, as JSON has them."""
    if isinstance(result, Tensor):
        return {"value": digest(result)}
    names = ("value", "x", "values", "T", "S", "density", "stderr", "bias_bound", "factor")
    found = {name: digest(v) for name in names if isinstance(v := getattr(result, name, None), Tensor)}
    for name in ("matvecs", "iterations", "samples", "reason", "reasons"):
        if (v := getattr(result, name, None)) is not None:
            found[name] = [r.name for r in v] if name == "reasons" else getattr(v, "name", v)
    return found


def digest(tensor: Tensor) -> list[float]:
    """A few numbers that any change shows in: the norm, and two sums with fixed weights."""
    flat = tensor.detach().double().flatten()
    weights = torch.linspace(-1, 2, max(1, len(flat)), dtype=torch.float64).cos()[: len(flat)]
    return [float(flat.norm()), float(weights @ flat), float(weights @ flat.abs())]


def all_results() -> Iterator[tuple[str, dict[str, Any]]]:
    calls = [
        (f"{name}: {what}", call)
        for name, A in matrices().items()
        for what, call in of_matrix(A, definite=name != "indefinite")
    ]
    for name, call in [*calls, *of_network()]:
        try:
            yield name, told(call())
        except Exception as error:
            yield name, {"raised": type(error).__name__}


def same(old: Any, new: Any) -> bool:
    """Equal, numbers to rounding."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        scale = max((abs(v) for v in old if isinstance(v, float) and math.isfinite(v)), default=0.0)
        pairs = zip(old, new)
        return all(
            abs(a - b) <= ROUNDING * scale if isinstance(a, float) and math.isfinite(a) else a == b or a != a != b
            for a, b in pairs
        )
    return bool(old == new)


def main() -> int:
    """Save the results, or compare with saved ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_results", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--save", type=Path, metavar="FILE")
    what.add_argument("--compare", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = dict(all_results())
    if options.save:
        options.save.write_text(json.dumps(results, indent=0))
        return 0
    before, differ = json.loads(options.compare.read_text()), 0
    for name in sorted(before.keys() | results.keys()):
        old, new = before.get(name, {}), results.get(name, {})
        for field in sorted(old.keys() | new.keys()):
            if not same(old.get(field), new.get(field)):
                differ += 1
                print(f"{name}, {field}: {old.get(field)} before, {new.get(field)} now")
    print(f"{len(results)} calls, {differ} differences")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
