"""Estimators of other libraries for the benchmark's quantities.

linear_operator and CoLA do not report their errors; matfree (0.6 and later) gives a standard error.
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from importlib import import_module
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.cli.bench.methods import BenchEstimator
from curvops.cli.bench.problem import Problem
from curvops.linalg import Estimate

STEPS = 20  # depth of linear_operator's quadrature by default, and of the log-determinants here


class Foreign(LinearOperator):
    """The problem's matrix as linear_operator sees a class of its own: by products alone."""

    def __init__(self, first: Tensor, problem: Problem) -> None:
        super().__init__(first, problem=problem)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self._kwargs["problem"].A._matmul(rhs.contiguous())

    def _size(self) -> torch.Size:
        return self._kwargs["problem"].A.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return self


def _estimate(value: Any, problem: Problem, before: int, stderr: Any = math.nan, samples: int = 2) -> Estimate:
    number, error = (torch.tensor(float(x), dtype=torch.float64) for x in (value, stderr))
    return Estimate(number, error, samples, problem.G.counter.count - before)


def _linear_operator(problem: Problem, P: Any, budget: int, generator: torch.Generator) -> Estimate:
    settings = import_module("linear_operator.settings")
    before, probes = problem.G.counter.count, max(1, budget // STEPS)
    torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
    with (
        warnings.catch_warnings(),
        settings.num_trace_samples(probes),
        settings.max_cholesky_size(1),
        settings.fast_computations(log_prob=True),  # BoTorch turns them off for all that run after its import
        settings.max_cg_iterations(STEPS),
    ):
        warnings.simplefilter("ignore")
        value = Foreign(problem.B[:1], problem).logdet()
    return _estimate(value, problem, before)


def _matfree(quantity: str, problem: Problem, P: Any, budget: int, generator: torch.Generator) -> Estimate:
    jax = import_module("jax")
    jax.config.update("jax_enable_x64", True)
    stochtrace, decomp, funm = (import_module(f"matfree.{name}") for name in ("stochtrace", "decomp", "funm"))
    shares = {"trace": 1, "logdet": STEPS, "xtrace": 2}
    before, probes = problem.G.counter.count, max(2, budget // shares[quantity])
    signs = torch.randint(2, (probes, len(problem.B)), generator=generator).mul(2).sub(1).double().numpy()
    shape = jax.ShapeDtypeStruct((len(problem.B),), signs.dtype)

    def multiply(v: Any) -> Any:
        vector = torch.tensor(v, dtype=problem.B.dtype, device=problem.B.device)
        return problem.A._matmul(vector.unsqueeze(1)).squeeze(1).double().cpu().numpy()

    def matvec(v: Any) -> Any:
        return jax.pure_callback(multiply, shape, v, vmap_method="sequential")

    name = "leave_one_out" if quantity == "xtrace" else "monte_carlo"
    if quantity == "logdet":
        integrand = funm.monte_carlo_funm_sym_logdet(decomp.tridiag_sym(STEPS))
    else:
        integrand = getattr(stochtrace, f"{name}_{quantity}")()
    estimate = getattr(stochtrace, f"estimator_{name}_mean_and_sem")(integrand, lambda key: jax.numpy.asarray(signs))
    value, stderr = estimate(matvec, jax.random.PRNGKey(0))
    return _estimate(value, problem, before, stderr, probes)


def _cola(problem: Problem, P: Any, budget: int, generator: torch.Generator) -> Estimate:
    """CoLA's Hutchinson takes whole batches of 100 probes: smaller budgets are overdrawn."""
    cola = import_module("cola")
    before = problem.G.counter.count
    torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
    A = cola.ops.LinearOperator(problem.B.dtype, tuple(problem.A.shape), matmat=problem.A._matmul)
    value = cola.linalg.trace(A, cola.linalg.Hutch(tol=2e-3, max_iters=max(1, budget // 100), rand="rademacher"))
    return _estimate(value, problem, before)


PEERS: dict[str, BenchEstimator] = {
    "linear_operator-logdet": BenchEstimator(_linear_operator, "logdet", "psd", module="linear_operator"),
    "matfree-trace": BenchEstimator(partial(_matfree, "trace"), "trace", "any", module="matfree"),
    "matfree-xtrace": BenchEstimator(partial(_matfree, "xtrace"), "trace", "any", module="matfree"),
    "matfree-logdet": BenchEstimator(partial(_matfree, "logdet"), "logdet", "psd", module="matfree"),
    "cola-trace": BenchEstimator(_cola, "trace", "any", module="cola"),
}
