"""Whether a GPU gives the CPU's numbers: the tests marked `gpu`, then networks in float64 and float32, seeds, TF32."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import curvops as co
from benchmarks.gpu.networks import build
from benchmarks.gpu.products import vectors
from benchmarks.gpu.stage import Row, Stage
from benchmarks.networks import Problem

ROOT = Path(__file__).parents[2]
WITHIN = {torch.float64: 1e-10, torch.float32: 1e-4}
"""How far the relative difference between the devices may be, by dtype."""
NETWORKS = ("mlp", "cnn", "resnet", "vit")
"""Small networks of each kind: what they compute does not depend on their size."""
SHARE = 0.6
"""The share of the stage's time that the tests may take."""


def measure(stage: Stage) -> None:
    """Compare the devices, and run the tests marked `gpu` in a process of their own."""
    for name in NETWORKS[:2] if stage.toy else NETWORKS:
        for dtype in WITHIN:
            stage.row(f"{name}, {dtype}", lambda name=name, dtype=dtype: beside_cpu(stage, name, dtype))  # type: ignore[misc]
    stage.row("one seed, two runs", lambda: seeds(stage))
    for name in ("mlp", "cnn"):
        stage.row(f"TF32, {name}", lambda name=name: tf32(stage, name))  # type: ignore[misc]
    stage.row("tests marked gpu", lambda: tests(stage))


def problem(name: str, dtype: torch.dtype, device: torch.device) -> Problem:
    """Return a small network with its data in a dtype, on a device."""
    found = build(name, 10, toy=True, device=torch.device("cpu"))
    return Problem(name, 10, found.model.to(device, dtype), found.inputs.to(device, dtype), found.targets.to(device))


def answers(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Return by name what is compared, each computed when it is called."""
    lin = co.linearize(problem.model, problem.batches(2), "classification")
    G, V = co.GGN(lin), vectors(problem, 2).to(lin.theta.dtype)
    v = V[:, 0]
    K = co.KFAC(lin)
    post = co.laplace(lin, co.KFAC, 1.0, check_mode=False)
    return {
        "GGN @ V": lambda: G @ V,
        "EmpiricalFisher @ v": lambda: co.EmpiricalFisher(lin) @ v,
        "DiagonalGGN": lambda: co.DiagonalGGN(lin).diagonal(),
        "KFAC @ V": lambda: K @ V,
        "KFAC, solve": lambda: K.add_diagonal(1.0).solve(V),
        "GGN, cg": lambda: co.linalg.cg(G.add_diagonal(10.0), v, rtol=1e-12 if v.dtype == torch.float64 else 1e-6).x,
        "predict, mean": lambda: post.predict(problem.inputs[:3]).mean,
        "predict, variance": lambda: post.predict(problem.inputs[:3]).variance,
        "log evidence": lambda: post.log_evidence(mode="map").value.reshape(1),
    }


def beside_cpu(stage: Stage, name: str, dtype: torch.dtype) -> Row:
    """Return the relative differences between the device and the CPU; raise AssertionError beyond what is allowed."""
    here = answers(problem(name, dtype, torch.device("cpu")))
    there = answers(problem(name, dtype, stage.device))
    differences = {}
    for what, call in here.items():
        expected, found = call().double(), there[what]()
        if found.device.type != stage.device.type:
            raise AssertionError(f"{what} is on {found.device}")
        differences[what] = float((found.double().cpu() - expected).norm() / expected.norm())
    beyond = {what: value for what, value in differences.items() if not value <= WITHIN[dtype]}
    if beyond:
        raise AssertionError(f"beyond {WITHIN[dtype]}: {beyond}; all: {differences}")
    return {"differences": differences}


def seeds(stage: Stage) -> Row:
    """Return whether one seed gives one result twice."""
    found = problem("mlp", torch.float32, stage.device)
    lin = co.linearize(found.model, found.batches(), "classification")
    post = co.laplace(lin, co.KFAC, 1.0, check_mode=False)

    def both(call: Callable[[torch.Generator], Tensor]) -> bool:
        one, two = (call(torch.Generator(stage.device).manual_seed(3)) for _ in range(2))
        return bool(torch.equal(one, two))

    same: dict[str, bool] = {
        "draws": both(lambda generator: post.sample(3, generator=generator)),
        "trace": both(lambda generator: co.linalg.trace(co.GGN(lin), max_matvecs=20, generator=generator).value),
        "Fisher": both(lambda generator: co.GGN(lin, mc_samples=2, generator=generator) @ torch.ones_like(lin.theta)),
    }
    if not all(same.values()):
        raise AssertionError(f"one seed gave two results: {same}")
    return {"same": same}


def tf32(stage: Stage, name: str) -> Row:
    """Return what TF32 does to a product, to a solution's residual as reported and as it is, and to an interval."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    exact = co.GGN(co.linearize(*model_and_data(problem(name, torch.float64, stage.device)), "classification"))
    found: dict[str, Any] = {}
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.allow_tf32 = precision == "high"
            lin = co.linearize(*model_and_data(problem(name, torch.float32, stage.device)), "classification")
            G, v = co.GGN(lin), torch.ones_like(lin.theta)
            product = G @ v
            solution = co.linalg.cg(G.add_diagonal(1.0), v, rtol=1e-6)
            residual = v.double() - exact.add_diagonal(1.0) @ solution.x.double()
            trace = co.linalg.trace(G, max_matvecs=40, generator=torch.Generator(stage.device).manual_seed(0))
            found[precision] = {
                "error of a product": float((product.double() - exact @ v.double()).norm() / product.double().norm()),
                "residual as reported": float(solution.relative_residuals.max()),
                "residual": float(residual.norm() / v.double().norm()),
                "reason": solution.reasons[0].name,
                "iterations": solution.iterations,
                "trace": [float(end) for end in trace.interval()],
            }
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
    return found


def model_and_data(problem: Problem) -> tuple[Any, Any]:
    """Return the model and its batches."""
    return problem.model, problem.batches()


def tests(stage: Stage) -> Row:
    """Run the tests marked `gpu`; return how many passed, and each that failed with the end of its message."""
    marked = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "pytest.mark.gpu" in path.read_text("utf-8")]
    if stage.toy:
        marked = [path for path in marked if path.name == "test_randomness.py"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-o", "addopts=--import-mode=importlib --strict-markers", "-p", "no:cacheprovider"]
        plugin = ["-p", "tests.cuda.stand_in"] if "tests.cuda.stand_in" in sys.modules else []
        command = [
            sys.executable,
            "-m",
            "pytest",
            *options,
            *plugin,
            "-m",
            "gpu",
            f"--junitxml={report}",
            *map(str, marked),
        ]
        limit = max(10.0, min(SHARE * stage.limit, stage.left - 5))
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=limit, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"not done after {limit:.0f} s: {str(error.stdout)[-1500:]}") from None
        if not report.exists():
            raise AssertionError(f"pytest did not run: {(done.stdout + done.stderr)[-1500:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {}
    for case in cases:
        for problem_found in [*case.findall("failure"), *case.findall("error")]:
            failed[f"{case.get('classname')}::{case.get('name')}"] = (problem_found.get("message") or "")[-600:]
    if failed:
        raise AssertionError(f"{len(failed)} of {len(cases)} failed: {failed}"[:12000])
    return {"passed": len(cases), "ended": done.stdout.strip().splitlines()[-1:]}
