"""What is refused as a model, as its call and as a selection of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, dropout

import curvops as co
from curvops.network.model.model import Model
from curvops.network.model.parameters import Selection, select
from tests.doors.door import Door
from tests.network.definitions import PARAMETERS, normal
from tests.zoo_modules import Wired

X, Y = normal(7, 4, dtype=torch.float32), torch.tensor([0, 1, 2, 0, 1, 2, 0])
MASK = normal(7, 3, dtype=torch.float32)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def classifier(model: Any) -> co.operators.Linearization:
    return co.linearize(model, (X, Y), "classification")


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


class Recurrent(nn.Module):
    """The last of two steps of a recurrent layer, which takes (t, n, c) unless told otherwise."""

    def __init__(self, kind: Any, unbatched: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer, self.head, self.unbatched = kind(4, 5, **options), nn.Linear(5, 3), unbatched

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.layer(x if self.unbatched else torch.stack([x, -x], 1))
        return self.head(steps if self.unbatched else steps[:, -1])


def chosen(spec: Any) -> Selection:
    trainable = [name for name in PARAMETERS if name != "body.bias"]
    return select(PARAMETERS, trainable, spec, ["head.weight", "head.bias"])


def selected(tensor: Tensor) -> Selection:
    return select({"one": torch.zeros(2), "other": tensor}, ["one", "other"], None, [])


DOORS = [
    Door(
        "Model",
        rows={
            "dropout": (
                lambda: Model(nn.Sequential(nn.Linear(2, 2), nn.Dropout())),
                ValueError,
                r"1 \(Dropout\) is in train mode.* call model.eval\(\) first",
            ),
            "batch norm": (
                lambda: Model(nn.Sequential(nn.BatchNorm1d(2))),
                ValueError,
                r"0 \(BatchNorm1d\) is in train mode",
            ),
            "itself": (lambda: Model(nn.Dropout()), ValueError, r"the model \(Dropout\) is in train mode"),
            "no statistics": (
                lambda: Model(nn.BatchNorm1d(2, track_running_stats=False).eval()),
                ValueError,
                "keeps no running statistics.*track_running_stats=True",
            ),
            "int": (
                lambda: Model(3),
                TypeError,
                r"must be an nn.Module or a pair \(function\(params, inputs\), params mapping\), got int",
            ),
            "number": (
                lambda: Model((lambda p, x: x, {"w": 3})),
                TypeError,
                r"must hold tensors by name; \['w'\] are not",
            ),
            "list": (lambda: Model((lambda p, x: x, [torch.zeros(2)])), TypeError, "got tuple"),
            "frozen NaN": (
                lambda: Model(not_finite(torch.nan), "2.*"),
                ValueError,
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
                "returns tuple, expected a tensor .* forward returns only the tensor of outputs",
            ),
            "integers": (
                lambda: outputs_of(lambda h: h.argmax(1, True)),
                TypeError,
                "returns torch.int64, expected a real floating-point tensor",
            ),
            "complex": (lambda: outputs_of(lambda h: h * 1j), TypeError, "returns torch.complex64"),
            "vector": (
                lambda: outputs_of(lambda h: h[:, 0]),
                ValueError,
                r"shape \(2,\), expected \(N, C\),.*; add outputs.unsqueeze\(1\)",
            ),
            "number": (
                lambda: outputs_of(lambda h: h.sum()),
                ValueError,
                r"shape \(\), expected \(N, C\), or \(N, ..., C\) with positions",
            ),
        },
    ),
    Door(
        "model of linearize",
        rows={
            "exported at one number of points": (
                lambda: classifier(torch.export.export(net(), (X,)).module()),
                ValueError,
                r"torch.export fixed this size: .*dynamic_shapes=\(\{0: torch.export.Dim.AUTO\},\)",
            ),
            "exported at one number of points, its last layer": (
                lambda: co.linearize(
                    torch.export.export(net(), (X,)).module(), (X, Y), "classification", parameters="last_layer"
                ),
                ValueError,
                "torch.export fixed this size",
            ),
            "an exported program": (
                lambda: classifier(torch.export.export(net(), (X,))),
                TypeError,
                r"got ExportedProgram. Pass program.module\(\).",
            ),
            "the last layer of TorchScript": (
                lambda: co.linearize(torch.jit.script(net()), (X, Y), "classification", parameters="last_layer"),
                ValueError,
                r"name its parameters by globs",
            ),
            "TorchScript with dropout": (
                lambda: classifier(torch.jit.script(nn.Sequential(net(), nn.Dropout()))),
                ValueError,
                r"call model.eval\(\)",
            ),
            "frozen TorchScript": (
                lambda: classifier(torch.jit.freeze(torch.jit.script(net().eval()))),
                ValueError,
                "selects nothing; .*the model has no parameters",
            ),
            "dropout": (
                lambda: classifier(nn.Sequential(nn.Linear(4, 3), nn.Dropout())),
                ValueError,
                r"1 \(Dropout\) is in train mode.*eval\(\)",
            ),
            "batch norm": (
                lambda: classifier(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))),
                ValueError,
                r"in train mode.*model.eval\(\)",
            ),
            "random": (
                lambda: classifier(Wired(lambda m, x: m.head(x) + torch.rand(3))),
                ValueError,
                r"different outputs; call model.eval\(\)",
            ),
            "rarely random": (
                lambda: classifier(Wired(lambda m, x: dropout(m.head(x), 1e-09, m.training))),
                ValueError,
                "random numbers; call.*eval",
            ),
            "a function": (
                lambda: classifier((lambda p, x: dropout(x @ p["w"], 0.4), {"w": torch.ones(4, 3)})),
                ValueError,
                "different outputs",
            ),
            "batch statistics": (
                lambda: classifier(Wired(lambda m, x: batch_norm(m.head(x), None, None, training=True))),
                ValueError,
                r"call model.eval\(\)",
            ),
            "batch": (
                lambda: classifier(Wired(lambda m, x: m.head(x - x.mean(0)))),
                ValueError,
                "depend on the other points of its batch",
            ),
            "points as steps": (
                lambda: classifier(Recurrent(nn.LSTM)),
                ValueError,
                r"batch of 4; .* with batch_first=True \(not so 'layer'\)",
            ),
            "points as unbatched steps": (
                lambda: classifier(Recurrent(nn.GRU, unbatched=True)),
                ValueError,
                "depend on the other points of its batch",
            ),
            "points as steps, two of them": (
                lambda: co.linearize(Recurrent(nn.RNN), (X[:2], Y[:2]), "classification"),
                ValueError,
                "batch of 2; .*batch_first=True",
            ),
            "points as steps of a function": (
                lambda: classifier((lambda p, x: (x @ p["w"]).cumsum(0), {"w": torch.ones(4, 3)})),
                ValueError,
                "depend on the other points of its batch",
            ),
            "attention between points": (
                lambda: classifier(nn.Sequential(nn.TransformerEncoderLayer(4, 1, 4, dropout=0.0), net())),
                ValueError,
                r"batch_first=True \(not so '0.self_attn'\)",
            ),
            "places among points": (
                lambda: classifier(Wired(lambda m, x: m.head(x) + torch.arange(len(x)).unsqueeze(1))),
                ValueError,
                "depend on the other points of its batch",
            ),
            "points as steps in a sampler": (
                lambda: co.sampling.log_posterior(Recurrent(nn.LSTM), "classification", data_size=7).linearize(
                    Model(Recurrent(nn.LSTM)).theta, (X, Y)
                ),
                ValueError,
                "depend on the other points of its batch",
            ),
            "tuple": (
                lambda: classifier(Wired(lambda m, x: (m.head(x), x))),
                TypeError,
                "returns tuple, expected a tensor",
            ),
            "integers": (
                lambda: classifier(Wired(lambda m, x: m.head(x).argmax(1, True))),
                TypeError,
                "returns torch.int64",
            ),
            "vector": (
                lambda: classifier(Wired(lambda m, x: m.head(x)[:, 0])),
                ValueError,
                r"expected \(N, C\),.*add outputs.unsqueeze\(1\)",
            ),
            "leading one": (
                lambda: classifier(Wired(lambda m, x: m.head(x)[None])),
                ValueError,
                r"2 points gave outputs of shape \(1, 2, 3\)",
            ),
            "image": (
                lambda: classifier(Wired(lambda m, x: m.head(x)[:, :, None, None])),
                ValueError,
                r"3 x 1 positions per point.*\(n, 3, 1\)",
            ),
            "no outputs": (
                lambda: classifier(Wired(lambda m, x: m.head(x)[:, :0])),
                ValueError,
                r"\(2, 0\): a point has no outputs",
            ),
            "rows": (
                lambda: classifier(Wired(lambda m, x: m.head(x)[:1])),
                ValueError,
                r"2 points gave outputs of shape \(1, 3\)",
            ),
            "infinite": (
                lambda: classifier(Wired(lambda m, x: m.head(x) / 0)),
                ValueError,
                "outputs hold NaN or Inf; check its buffers",
            ),
            "frozen": (
                lambda: classifier(Wired(lambda m, x: m.head(x)).requires_grad_(False)),
                ValueError,
                "none requires a gradient",
            ),
            **{
                f"{value} in a parameter, {parameters} selected": (
                    lambda value=value, parameters=parameters: co.linearize(
                        not_finite(value), (X, Y), "classification", parameters
                    ),
                    ValueError,
                    "'0.weight' holds NaN or Inf; train again",
                )
                for value in (torch.nan, torch.inf)
                for parameters in (None, "2.*")
            },
        },
    ),
    Door(
        "call of a model",
        rows={
            "missing": (
                lambda: called_with({"x": X}),
                TypeError,
                r"forward\(x.*mask.*\) .*inputs 'x' \(missing a required argument: 'mask'\). Name",
            ),
            "unknown": (
                lambda: called_with({"x": X, "mask": MASK, "ids": X}),
                TypeError,
                "unexpected keyword argument 'ids'",
            ),
            "too few": (
                lambda: called_with((X,)),
                TypeError,
                "called with inputs 1 tensors .missing a required argument: 'mask'",
            ),
            "too many": (
                lambda: called_with((X, MASK, X)),
                TypeError,
                "called with inputs 3 tensors .too many positional arguments",
            ),
        },
    ),
    Door(
        "options of linearize",
        rows={
            "name": (
                lambda: co.linearize(net(), (X, Y), "classification", parameters="tail.*"),
                ValueError,
                "names no parameter; the model has 0.weight",
            ),
            "nothing": (
                lambda: co.linearize(net(), (X, Y), "classification", parameters=lambda name, tensor: False),
                ValueError,
                "selects nothing",
            ),
            "index": (
                lambda: co.linearize(net(), (X, Y), "classification", parameters=torch.tensor([51])),
                ValueError,
                "out of range: the flat vector has 51 entries",
            ),
            "weights": (
                lambda: co.linearize(net(), (X, Y), "classification", weights=torch.ones(7)),
                TypeError,
                "weights must be True or False, got Tensor. .*weights=True",
            ),
            "budget": (
                lambda: co.linearize(net(), (X, Y), "classification", memory_budget=-1),
                ValueError,
                "memory_budget must not be negative, got -1",
            ),
        },
    ),
    Door(
        "parameters",
        rows={
            "a glob of nothing": (
                lambda: chosen("tail.*"),
                ValueError,
                r"'tail.\*' names no parameter; the model has body.weight",
            ),
            "a second glob of nothing": (lambda: chosen(["head.*", "nope"]), ValueError, "'nope' names no parameter"),
            "no glob": (lambda: chosen([]), ValueError, r"\[\] selects nothing"),
            "a function that is never true": (
                lambda: chosen(lambda name, tensor: False),
                ValueError,
                "selects nothing; the model has",
            ),
            "no index": (
                lambda: chosen(torch.tensor([], dtype=torch.long)),
                ValueError,
                "selects nothing; choose among the 15",
            ),
            "no entry of a mask": (
                lambda: chosen(torch.zeros(15, dtype=torch.bool)),
                ValueError,
                "selects nothing; choose among the 15",
            ),
            "a short mask": (
                lambda: chosen(torch.ones(14, dtype=torch.bool)),
                ValueError,
                r"mask has shape \(14,\), expected \(15,\)",
            ),
            "an index too large": (
                lambda: chosen(torch.tensor([15])),
                ValueError,
                "index 15 is out of range: the flat vector has 15 entries",
            ),
            "a negative index": (lambda: chosen(torch.tensor([-1])), ValueError, "index -1 is out of range"),
            "an index twice": (lambda: chosen(torch.tensor([2, 2])), ValueError, "contains a position twice"),
            "a real index": (
                lambda: chosen(torch.tensor([1.0])),
                TypeError,
                "must be a vector of integers, got torch.float32",
            ),
            "a matrix of indices": (lambda: chosen(torch.tensor([[1]])), TypeError, r"of shape \(1, 1\)"),
            "a number": (lambda: chosen(3), TypeError, "got int; expected None, 'last_layer', a glob"),
            "a list of numbers": (lambda: chosen([1, 2]), TypeError, "got list; expected None"),
            "a model without trainable parameters": (
                lambda: select(PARAMETERS, [], None, ["head.weight", "head.bias"]),
                ValueError,
                r"none requires a gradient: call requires_grad_\(\), or name parameters",
            ),
            "whole numbers": (
                lambda: select({"steps": torch.zeros(2, dtype=torch.long)}, ["steps"], None, []),
                TypeError,
                "'steps' is torch.int64; only floating-point ones",
            ),
            "flatten without a name": (
                lambda: chosen("last_layer").flatten({"head.weight": torch.zeros(2, 3, 1)}),
                ValueError,
                "lacks 'head.bias'",
            ),
            "flatten another shape": (
                lambda: chosen("last_layer").flatten(
                    {"head.weight": torch.zeros(2, 3, 1), "head.bias": torch.zeros(3)}
                ),
                ValueError,
                r"'head.bias' has shape \(3,\), expected \(2,\)",
            ),
        },
    ),
]
