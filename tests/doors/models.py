"""What is refused as a model, as its call and as a selection of its parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import curvops as co
from curvops.network import Model
from tests.doors.door import Door
from tests.network.definitions import chosen, normal
from tests.zoo_modules import Wired

X, Y = normal(7, 4, dtype=torch.float32), torch.tensor([0, 1, 2, 0, 1, 2, 0])


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def classifier(model: Any) -> co.operators.Linearization:
    return co.linearize(model, (X, Y), "classification")


def wired(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[], object]:
    """A linearisation of a model with this call."""
    return lambda: classifier(Wired(forward))


def outputs_of(change: Callable[[Tensor], Any]) -> Tensor:
    model = Model(Wired(lambda m, x: change(m.head(x))).eval())
    return model(model.values, torch.zeros(2, 4))


def not_finite(value: float) -> nn.Sequential:
    model = net()
    model[0].weight.data[0, 0] = value
    return model


class Keywords(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x) * mask


def called_with(inputs: Any) -> co.operators.Linearization:
    return co.linearize(Keywords(4, 3), (inputs, Y), "classification")


DOORS = [
    Door(
        "Model",
        rows={
            "itself": (lambda: Model(nn.Dropout()), r"the model \(Dropout\) is in train mode"),
            "no statistics": (
                lambda: Model(nn.BatchNorm1d(2, track_running_stats=False).eval()),
                "keeps no running statistics",
            ),
            "frozen NaN": (
                lambda: Model(not_finite(torch.nan), "2.*"),
                r"'0.weight' holds NaN or Inf; train again, or load other weights",
            ),
        },
    ),
    Door(
        "outputs of a model",
        rows={
            "tuple": (
                lambda: outputs_of(lambda h: (h, h)),
                TypeError,
                "returns tuple, not a tensor .* forward return one of them, or pass a tuple of likelihoods",
            ),
            "complex": (lambda: outputs_of(lambda h: h * 1j), TypeError, "returns torch.complex64"),
            "vector": (
                lambda: outputs_of(lambda h: h[:, 0]),
                r"shape \(2,\), expected \(N, C\): add outputs.unsqueeze\(1\) in the model, or.*x.unsqueeze\(0\)",
            ),
        },
    ),
    Door(
        "model of linearize",
        rows={
            "the last layer of TorchScript": (
                lambda: co.linearize(
                    torch.jit.script(nn.Sequential(net(), nn.Softmax(-1))),
                    (X, Y),
                    "classification",
                    parameters="last_layer",
                ),
                r"they come from Softmax.*; name its parameters, as parameters=\['",
            ),
            "a norm of a single point": (
                lambda: classifier(nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(8, 8), nn.Linear(8, 3))),
                "any size, and rejects a single point: Expected more than 1 value per channel",
            ),
            "random": (wired(lambda m, x: m.head(x) + torch.rand(3)), r"different outputs; call model.eval\(\)"),
            "rarely random": (wired(lambda m, x: dropout(m.head(x), 1e-09, m.training)), "random numbers; call.*eval"),
            "batch": (wired(lambda m, x: m.head(x - x.mean(0))), "depend on the other points of its batch"),
            "rows": (wired(lambda m, x: m.head(x)[:1]), r"2 points gave \(1, 3\)"),
            "infinite": (wired(lambda m, x: m.head(x) / 0), "outputs hold NaN or Inf; check its buffers"),
            "frozen": (
                lambda: classifier(Wired(lambda m, x: m.head(x)).requires_grad_(False)),
                "none requires a gradient",
            ),
        },
    ),
    Door(
        "call of a model",
        rows={
            "missing": (
                lambda: called_with({"x": X}),
                TypeError,
                r"forward\(x.*mask.*\) .*inputs 'x' \(missing a required argument: 'mask'\)",
            )
        },
    ),
    Door(
        "parameters",
        rows={
            "an index twice": (lambda: chosen(torch.tensor([2, 2])), "contain a position twice"),
            "whole numbers": (
                lambda: Model((lambda params, x: x, {"steps": torch.zeros(2, dtype=torch.long)})),
                TypeError,
                "'steps' is torch.int64; only floating-point ones",
            ),
            "flatten another shape": (
                lambda: chosen("head.*").flatten({"head.weight": torch.zeros(2, 3, 1), "head.bias": torch.zeros(3)}),
                r"'head.bias' must have shape \(2,\), got \(3,\)",
            ),
        },
    ),
]
