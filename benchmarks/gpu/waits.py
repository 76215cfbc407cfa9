"""How often the host waits for the device: for each product, each iteration of a solver, each step of a sampler."""

from __future__ import annotations

from benchmarks.gpu.stage import Stage


def measure(stage: Stage) -> None:
    """Count what torch reports, `torch.cuda.set_sync_debug_mode`; without a CUDA device there is nothing to count."""
    if stage.device.type != "cuda":
        stage.row("waits", lambda: {"skipped": "no CUDA device"})
        return
    from tests.cuda import test_waits as counted

    for kind in ("dense", "convolutional"):
        lin = counted.classification(kind)
        for name, make in counted.OPERATORS.items():

            def product(make: object = make, lin: object = lin) -> dict[str, float]:
                operator = make(lin)  # type: ignore[operator]
                V = counted.normal(operator.shape[1], 3)
                _ = operator @ V, operator @ V
                return {"waits": counted.waits(lambda: operator @ V), "allowed": 0}

            stage.row(f"a product, {kind}: {name}", product)
    for name, run in counted.iterations(4).items():
        stage.row(f"an iteration: {name}", lambda run=run: {"waits": counted.waits_a_step(run), "allowed": 2})  # type: ignore[misc]
    for name in counted.STEPS:
        stage.row(f"a step: {name}", lambda name=name: {"waits": counted.waits_of_steps(name), "allowed": 0})  # type: ignore[misc]
