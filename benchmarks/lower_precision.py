"""Products from tensors in bfloat16 compared with float32: bytes kept, speed, and error by layer.

`python -m benchmarks.lower_precision` measures three networks, and the errors by parameter. One thread, CPU
time: the lowest of interleaved repetitions, in units of loss gradients on the same data.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import curvops as co
from benchmarks.study_page import Study
from benchmarks.tables import tables

CLASSES, BATCH, REPEATS = 10, 128, 9


class Transformer(nn.Module):
    """Tokens, two encoder layers, the mean over positions, a head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.embedding, self.body = nn.Embedding(50, width), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.embedding(ids)).mean(1))
        return found


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return each network with its inputs."""
    torch.manual_seed(0)
    mlp = [nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, CLASSES)]
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, CLASSES)]
    return {
        "MLP": (nn.Sequential(*mlp), torch.randn(1000, 784)),
        "CNN": (nn.Sequential(*first, *second), torch.randn(256, 1, 28, 28)),
        "transformer": (Transformer().eval(), torch.randint(0, 50, (200, 16))),
    }


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure() -> dict[str, Any]:
    """By network and number of vectors the times and bytes, and by network the errors of each parameter."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", co.errors.LowerPrecisionWarning)
    rows, errors = [], {}
    for name, (model, X) in networks().items():
        y = torch.arange(len(X)) % CLASSES
        data = list(zip(X.split(BATCH), y.split(BATCH), strict=True))

        def gradient(model: nn.Module = model, data: list[tuple[Tensor, Tensor]] = data) -> None:
            for x, t in data:
                cross_entropy(model(x), t, reduction="sum").backward()

        full = co.linearize(model, data, "classification", engine="layerwise")
        low = co.linearize(model, data, "classification", compute_dtype=torch.bfloat16)
        streamed = co.linearize(model, data, "classification", engine="streamed")
        A, B, S = co.GGN(full), co.GGN(low), co.GGN(streamed)
        for K in (1, 8):
            V = torch.randn(full.num_parameters, K)
            runs = [lambda V=V, G=G: G @ V for G in (A, B, S)] + [gradient]
            for run in runs[:2] * 2:
                run()
            times = [[seconds(run) for run in runs] for _ in range(REPEATS)]
            a, b, s, g = (min(column) for column in zip(*times, strict=True))
            cost = {"float32": a / g / K, "bfloat16": b / g / K, "streamed": s / g / K}
            sizes = {"bytes": full.passes.kept_bytes, "bytes in half": low.products.kept_bytes}
            rows.append({"network": name, "K": K, "speed": a / b, **cost, **sizes, "error": low.plan.product_error})
        v = torch.randn(full.num_parameters)
        exact, rounded = (full.unflatten(G @ v) for G in (A, B))
        errors[name] = {key: float((rounded[key] - value).norm() / value.norm()) for key, value in exact.items()}
    return {"rows": rows, "errors": errors}


def text(found: Any) -> str:
    heads = ["network", "kept in float32", "in bfloat16", "error", "speed, K = 1", "speed, K = 8"]
    heads += ["float32", "bfloat16", "streamed"]
    of_network: dict[str, list[Any]] = {}
    for row in found["rows"]:
        of_network.setdefault(row["network"], []).append(row)
    rows = []
    for name, (one, eight) in of_network.items():
        cells = [f"{one[size] / 1e6:.1f} MB" for size in ("bytes", "bytes in half")] + [f"{one['error']:.1e}"]
        cells += [f"{row['speed']:.2f}" for row in (one, eight)]
        cells += [f"{one[kind]:.2f}" for kind in ("float32", "bfloat16", "streamed")]
        rows.append([name, *cells])
    gradients = tables(heads, rows, ["network", "float32", "bfloat16", "streamed"])
    shares = [f"{one['bfloat16'] / one['streamed']:.2f}" for one, _ in of_network.values()]
    spread = [f"{name} {min(e.values()):.0e} to {max(e.values()):.0e}" for name, e in found["errors"].items()]
    return (
        f"{tables(heads, rows, heads[:6])}\n\nGradients a product, for one vector:\n\n{gradients}\n\n"
        f"From tensors in bfloat16 a product takes {', '.join(shares)} of the time of a streamed one. The relative "
        f"errors of its parts, parameter by parameter: {', '.join(spread)}."
    )


STUDY = Study(
    name="lower_precision",
    description=__doc__,
    measure=measure,
    sections={"lower precision": text},
    page="docs/engines.md",
)


if __name__ == "__main__":
    STUDY.run()
