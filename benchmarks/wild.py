"""Other people's architectures under the library, row by row:   make wild

For every architecture of `wild_models`, with random weights and six points in float64: the seconds that `co.linearize`
takes, a product of the GGN in gradients and its relative error beside double backward passes, the exact diagonal and
KFAC in gradients, and the seconds of two predictive variances. A step that fails is a row with its message. Each
architecture runs in a process of its own; one that takes more than the limit is stopped, and its row says so.

    .venv-wild/bin/python -m benchmarks.wild
    .venv-wild/bin/python -m benchmarks.wild --row 17      # one architecture, as JSON
"""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvops as co
from benchmarks.machine import run_apart
from benchmarks.study_page import Found, Study, part
from benchmarks.tables import table
from benchmarks.timing import clock, seconds
from benchmarks.wild_models import JOBS, Job

TOLERANCE = {"torch.float64": 1e-8, "torch.float32": 1e-4}
ROWS = [(package, name) for package, jobs in JOBS.items() for name in jobs]
STEPS = ("product", "diagonal", "KFAC", "prediction")


def reference_product(job: Job, v: Tensor) -> Tensor:
    """Return Jᵀ H J v by autograd alone: J v by double backward or in forward mode, Jᵀ by another backward pass."""
    names, tensors = zip(*((n, p) for n, p in job.model.named_parameters() if p.requires_grad))
    sizes = [p.numel() * (2 if p.is_complex() else 1) for p in tensors]
    parts = [_like(part, p) for part, p in zip(v.split(sizes), tensors)]

    def outputs(*values: Tensor) -> Tensor:
        return functional_call(job.model, dict(zip(names, values)), *_arguments(job))

    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):  # those with second derivatives
        f = outputs(*tensors)
        try:
            u = torch.zeros_like(f, requires_grad=True)
            pulled = torch.autograd.grad(f, tensors, u, create_graph=True, allow_unused=True)
            there = [(g, part) for g, part in zip(pulled, parts) if g is not None]
            Jv = torch.autograd.grad([g for g, _ in there], u, [part for _, part in there])[0]
        except RuntimeError as error:  # torch has no second derivative of a hard sigmoid, but a forward mode
            if "not implemented" not in str(error):
                raise
            Jv = torch.func.jvp(outputs, tensors, tuple(parts))[1]
        if job.classifies:
            p = f.detach().softmax(-1)
            Jv = p * (Jv - (p * Jv).sum(-1, keepdim=True))
        back = torch.autograd.grad(outputs(*tensors), tensors, Jv, allow_unused=True)
    whole = [torch.zeros_like(p) if g is None else g for g, p in zip(back, tensors)]
    return torch.cat([(torch.view_as_real(g) if g.is_complex() else g).flatten() for g in whole]).detach()


def _like(part: Tensor, p: Tensor) -> Tensor:
    """Return numbers in the shape of a parameter, pairs of them if it is complex."""
    return torch.view_as_complex(part.view(*p.shape, 2)) if p.is_complex() else part.view_as(p)


def gradient(job: Job) -> Callable[[], None]:
    """Return the function that computes one gradient of the summed loss."""
    (args, kwargs), parameters = _arguments(job), [p for p in job.model.parameters() if p.requires_grad]

    def compute() -> None:
        f = job.model(*args, **kwargs)
        if job.classifies:
            loss = nn.functional.cross_entropy(f.flatten(0, -2), job.targets.flatten(), reduction="sum")
        else:
            loss = (f - job.targets).square().sum() / 2
        torch.autograd.grad(loss, parameters, allow_unused=True)

    return compute


def _arguments(job: Job) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model is called with, by position and by name."""
    inputs = job.inputs if job.collate is None else job.collate(job.inputs)
    return ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})


LONG = 2.0
"""A first run of so many seconds counts: what it does once is little of it, and others would take as long."""


def least(work: Callable[[], Any], runs: int = 3) -> float:
    """Return the least time of a few runs, in seconds, after one that is not counted, unless it is long."""
    first = seconds(work)
    return first if first > LONG else min(seconds(work) for _ in range(runs))


def row(package: str, name: str) -> dict[str, Any]:
    """Measure one architecture."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"package": package, "name": name, "messages": {}}
    try:
        job = JOBS[package][name]()
        job.model.eval()
        if job.dtype == torch.float64:
            job = job._replace(model=_double(job.model), inputs=_double(job.inputs), targets=_double(job.targets))
        found["dtype"] = str(job.dtype)
        found["weights"] = sum(p.numel() for p in job.model.parameters() if p.requires_grad)
        unit = least(gradient(job))
    except Exception as error:
        found["messages"]["the model itself"] = _message(error)
        return found
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            likelihood = "classification" if job.classifies else co.likelihoods.Gaussian(1.0)
            data = job.inputs, job.targets
            lin, found["linearize"] = clock(lambda: co.linearize(job.model, data, likelihood, collate=job.collate))
        except Exception as error:
            found["messages"]["linearize"] = _message(error)
            return found
        for step, measure in zip(STEPS, (_product, _diagonal, _kfac, _prediction)):
            try:
                found.update(measure(job, lin, unit))
            except Exception as error:
                found["messages"][step] = _message(error)
            gc.collect()
    return found | {"warnings": sum(w.category.__module__ == "curvops.errors" for w in caught)}


def _product(job: Job, lin: Any, unit: float) -> dict[str, float]:
    G = co.GGN(lin)
    v = torch.randn(lin.num_parameters, dtype=job.dtype)
    truth = reference_product(job, v)
    error = float((G @ v - truth).norm() / truth.norm())
    _ = G @ v  # the second product builds the engine of later ones
    return {"error": error, "product": least(lambda: G @ v) / unit}


def _diagonal(job: Job, lin: Any, unit: float) -> dict[str, float]:
    return {"diagonal": least(lambda: co.DiagonalGGN(lin), 1) / unit}


def _kfac(job: Job, lin: Any, unit: float) -> dict[str, float]:
    return {"KFAC": least(lambda: co.KFAC(lin), 1) / unit}


def _prediction(job: Job, lin: Any, unit: float) -> dict[str, float]:
    two = {key: value[:2] for key, value in job.inputs.items()} if isinstance(job.inputs, dict) else job.inputs[:2]
    post = co.laplace(lin, co.KFAC, prior_precision=1.0, check_mode=False)
    variance = post.predict(two).variance
    assert bool(variance.isfinite().all()) and bool((variance >= 0).all())
    return {"prediction": least(lambda: post.predict(two).variance, 1)}


def _double(value: Any) -> Any:
    """Return tensors, mappings of tensors or a module in double precision."""
    if isinstance(value, nn.Module):
        for p in value.parameters():
            p.data = p.data.to(torch.complex128 if p.is_complex() else torch.float64)
        return value.double()
    if isinstance(value, dict):
        return {name: _double(part) for name, part in value.items()}
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def measure(limit: int) -> Found:
    """Measure every architecture in a process of its own; what was measured before an interruption is kept."""
    return {"rows": [part("wild", f"{i:02d}", lambda i=i: _apart(i, limit)) for i in range(len(ROWS))]}


def _apart(index: int, limit: int) -> dict[str, Any]:
    package, name = ROWS[index]
    print(f"{package}: {name}", file=sys.stderr)
    try:
        return run_apart("benchmarks.wild", "--row", index, limit=limit)[-1]
    except subprocess.TimeoutExpired:
        message = f"stopped after {limit} s"
    except subprocess.CalledProcessError as error:
        message = f"ended with status {error.returncode}"
    return {"package": package, "name": name, "messages": {"all": message}}


def rows(index: int) -> Iterator[dict[str, Any]]:
    """Measure one architecture in this process."""
    yield row(*ROWS[index])


def text(found: Found) -> str:
    """Return the table, and the messages of what failed below it."""
    measured = list(found["rows"])
    lines, notes = [], []
    for r in measured:
        wrong = not _is_right(r)
        fails = dict(r["messages"]) | ({"product": f"the relative error is {r['error']:.1e}"} if wrong else {})
        cells = [f"{r['product']:.2f}" if "product" in r and not wrong else "–"]
        cells += [f"{r[step]:.1f}" if step in r else "–" for step in ("diagonal", "KFAC")]
        cells += [_time(r["prediction"]) if "prediction" in r else "–"]
        weights = f"{r['weights']:,}" if "weights" in r else "–"
        lines.append(
            [
                f"{r['package']}: {r['name']}",
                weights,
                _time(r["linearize"]) if "linearize" in r else "–",
                *cells,
                str(r.get("warnings", "–")),
            ]
        )
        notes += [f"- {r['package']}, {r['name']}, {step}: {message}" for step, message in fails.items()]
    right = sum(not r["messages"] and "error" in r and _is_right(r) for r in measured)
    head = ["architecture", "weights", "linearize", "product", "diagonal", "KFAC", "prediction", "warnings"]
    worst = max(r["error"] for r in measured if "error" in r and _is_right(r) and r["dtype"] == "torch.float64")
    says = f"{right} of {len(measured)} architectures run through every step. "
    says += f"The largest relative error of a product is {worst:.0e}."
    failed = ["", "What failed, with its message:", "", *notes] if notes else []
    return "\n".join([says, "", table(head, lines), *failed])


def _is_right(r: Any) -> bool:
    """Return whether the product, if there is one, agrees with autograd."""
    return bool(r.get("error", 0.0) <= TOLERANCE[r.get("dtype", "torch.float64")])


def _time(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


STUDY = Study(
    name="wild",
    description=__doc__,
    measure=measure,
    sections={"wild": text},
    page="docs/wild.md",
    options={"limit": (60, "seconds that one architecture may take")},
    rows={"row": rows},
)

if __name__ == "__main__":
    STUDY.run()
