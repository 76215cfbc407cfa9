"""How often the host waits for the device: it hands out work in advance as long as it asks for no number back.

Counted by torch's own warnings, `torch.cuda.set_sync_debug_mode`. What a long call asks for at its beginning and its
end is left out: the difference between a longer run and a shorter one, over the steps between them.
"""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops import linalg

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def waits(call: Callable[[], Any]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def waits_a_step(run: Callable[[int], Any], first: int = 5, last: int = 15) -> float:
    run(first)
    return (waits(lambda: run(last)) - waits(lambda: run(first))) / (last - first)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=CUDA)


def generator() -> torch.Generator:
    return torch.Generator(CUDA).manual_seed(0)


def network(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "dense":
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().to(CUDA), normal(12, 4)
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 3)
    return nn.Sequential(*layers).double().to(CUDA), normal(12, 1, 6, 6)


def classification(kind: str = "dense", **options: Any) -> co.operators.Linearization:
    model, x = network(kind)
    return co.linearize(model, (x, torch.randint(3, (12,), device=CUDA)), "classification", **options)


OPERATORS: dict[str, Callable[[co.operators.Linearization], Any]] = {
    "GGN": co.GGN,
    "GGN of draws": lambda lin: co.GGN(lin, mc_samples=2, generator=generator()),
    "EmpiricalFisher": co.EmpiricalFisher,
    "Jacobian": lambda lin: lin.jacobian(),
    "transposed Jacobian": lambda lin: lin.jacobian().mT,
    "Gradients": lambda lin: lin.gradients(),
    "TangentKernel": co.TangentKernel,
    "KFAC": co.KFAC,
    "EKFAC": co.EKFAC,
    "DiagonalGGN": co.DiagonalGGN,
    "BlockDiagonal": co.BlockDiagonal,
    "Subnetwork": lambda lin: co.Subnetwork(co.GGN(lin), torch.arange(9, device=CUDA)),
    "precision": lambda lin: co.laplace(lin, co.GGN, 1.0, check_mode=False).precision,
    "precision, Kronecker": lambda lin: co.laplace(lin, co.KFAC, 1.0, check_mode=False).precision,
    "sum": lambda lin: co.GGN(lin) + 2.0 * co.DiagonalGGN(lin),
}


@pytest.mark.parametrize("kind", ["dense", "convolutional"])
def test_a_product_does_not_wait(kind: str) -> None:
    for engine in ("auto", "autodiff", "layerwise") if kind == "dense" else ("layerwise",):
        lin = classification(kind, engine=engine)
        for name, make in OPERATORS.items():
            op = make(lin)
            assert waits(lambda op=op: repr(op)) == 0, name
            for V in (normal(op.shape[1], 3), normal(op.shape[1])):
                _ = op @ V, op @ V  # what is kept is made by these
                assert waits(lambda op=op, V=V: op @ V) == 0, (engine, name, V.shape)


def test_a_pass_over_the_data_waits_once_to_learn_whether_they_changed() -> None:
    for make in (lambda: co.GGN(classification(engine="streamed")), lambda: co.Hessian(classification())):
        op = make()
        V = normal(op.shape[1], 3)
        _ = op @ V, op @ V
        assert waits(lambda op=op, V=V: op @ V) == 1


def symmetric(lowest: float) -> Tensor:
    root = normal(200, 200)
    return root @ root.mT / 200 + lowest * torch.eye(200, dtype=torch.float64, device=CUDA)


def iterations(k: int) -> dict[str, Callable[[int], Any]]:
    """Calls that take a number of iterations, with k right-hand sides or probes."""
    A, B = linalg.Dense(symmetric(1e-2), psd=True), normal(200, k)
    indefinite, sketch = linalg.Dense(symmetric(-2.0)), linalg.nystrom(A, 20, shift=1e-2, generator=generator())
    P = sketch.preconditioner(1e-2)
    return {
        "cg": lambda n: linalg.cg(A, B, maxiter=n, rtol=1e-14),
        "cg, column by column": lambda n: linalg.cg(A, B, maxiter=n, rtol=1e-14, block=False),
        "cg, preconditioned": lambda n: linalg.cg(A, B, maxiter=n, rtol=1e-14, preconditioner=P),
        "cg, refined": lambda n: linalg.cg(A.to(torch.float32), B.float(), maxiter=n, rtol=1e-14, refine=True),
        "minres": lambda n: linalg.minres(indefinite, B, maxiter=n, rtol=1e-14),
        "minres, preconditioned": lambda n: linalg.minres(A, B, maxiter=n, rtol=1e-14, preconditioner=P),
        "lsmr": lambda n: linalg.lsmr(indefinite, B, maxiter=n, rtol=1e-14),
        "dual_descent": lambda n: linalg.dual_descent(
            A, B, maxiter=n, rtol=1e-14, batch_size=20, generator=generator()
        ),
        "lanczos": lambda n: linalg.lanczos(A, n, generator=generator()),
        "spectral_density": lambda n: linalg.spectral_density(A, steps=n, probes=k + 1, generator=generator()),
        "apply_function": lambda n: linalg.apply_function(A, torch.exp, B, maxiter=n, rtol=1e-14),
    }


@pytest.mark.parametrize("k", [1, 4])
def test_an_iteration_waits_at_most_twice(k: int) -> None:
    for name, run in iterations(k).items():
        assert waits_a_step(run) <= 2, name


class Precisions(nn.Module):
    """Notes whether its convolution may be computed in TF32."""

    seen: ClassVar[set[bool]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(1, 2, 3), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        Precisions.seen.add(torch.backends.cudnn.allow_tf32)
        return self.head(self.layer(x).flatten(1))


def test_convolutions_are_in_full_precision_and_products_in_less_are_told() -> None:
    x, y = torch.randn(5, 1, 6, 6, device=CUDA), torch.arange(5, device=CUDA) % 3
    assert torch.backends.cudnn.allow_tf32
    model = Precisions().to(CUDA)
    co.GGN(co.linearize(model, (x, y), "classification")) @ torch.ones(119, device=CUDA)
    assert Precisions.seen == {False} and torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.warns(UserWarning, match="rounded to TF32, three digits") as caught:
            co.linearize(model, (x, y), "classification")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert caught[0].filename == __file__


STEPS: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda density, name=name: getattr(co.sampling, name)(density, 1e-3)
        for name in ("sgld", "sghmc", "sgnht", "baoa", "lmc", "hmc", "pcn")
    },
    "optimizer": lambda density: co.sampling.optimizer(torch.optim.Adam, density),
    "scheduled": lambda density: co.sampling.sgld(density, co.sampling.Cosine(1e-3, 10)),
    "preconditioned": lambda density: co.sampling.sgld(density, 1e-3, preconditioner=normal(51).abs() + 0.1),
}


def waits_of_steps(name: str, many: bool = False) -> int:
    """Waits of five steps of a sampler, or of three chains of it, after the first."""
    model, x = network("dense")
    batch = x, torch.randint(3, (12,), device=CUDA)
    sampler = STEPS[name](co.sampling.log_posterior(model, "classification", data_size=12))
    transition = co.sampling.chains(sampler, 3) if many else sampler
    state, _ = transition.update(transition.init(dict(model.named_parameters()), generator=generator()), batch)

    def steps(state: Any = state) -> None:
        for _ in range(5):
            state, _ = transition.update(state, batch)

    return waits(steps)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_a_sampler_does_not_wait(name: str, many: bool) -> None:
    if not (many and name == "optimizer"):
        assert waits_of_steps(name, many) == 0
