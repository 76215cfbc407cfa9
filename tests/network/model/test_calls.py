"""How a model is called with a mapping or a tuple: as its signature says, and all the same afterwards."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

import curvops as co
from tests.network.definitions import TIGHT, normal
from tests.zoo_modules import Applied

X, MASK, Y = normal(7, 4), normal(7, 3, seed=1), torch.tensor([0, 1, 2, 0, 1, 2, 0])


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3).double()


class Keywords(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(x) * mask


class Optional(Base):
    def forward(self, x: Tensor | None = None, mask: Tensor | None = None, **others: Any) -> Tensor:
        return self.head(x) * mask


class Whole(Base):
    def forward(self, batch: Any) -> Tensor:
        return self.head(batch["x"]) * batch["mask"]


class WholeOfItsType(Base):
    """Takes what a dict does not have."""

    def forward(self, batch: Any, scale: float = 1.0, **others: Any) -> Tensor:
        return scale * self.head(batch.data["x"]) * batch.data["mask"]


class Pair(Base):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.head(pair[0]) * pair[1]


def function(params: Any, batch: Any) -> Tensor:
    return (batch["x"] @ params["w"].mT + params["b"]) * batch["mask"]


def mapping(kind: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: kind({"x": X, "mask": MASK})


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "keywords": (Keywords, mapping(dict)),
    "keywords in another order": (Keywords, lambda: {"mask": MASK, "x": X}),
    "keywords of a UserDict": (Keywords, mapping(UserDict)),
    "keywords of an encoding": (Optional, mapping(BatchEncoding)),
    "whole": (Whole, mapping(dict)),
    "whole UserDict": (WholeOfItsType, mapping(UserDict)),
    "whole encoding": (WholeOfItsType, mapping(BatchEncoding)),
    "sequential": (lambda: nn.Sequential(Whole()), mapping(dict)),
    "wrapped keywords": (lambda: Applied(Keywords()), mapping(dict)),
    "wrapped whole": (lambda: Applied(Whole()), mapping(dict)),
    "positions": (Keywords, lambda: (X, MASK)),
    "whole tuple": (Pair, lambda: (X, MASK)),
    "wrapped whole tuple": (lambda: Applied(Pair()), lambda: [X, MASK]),
}


@pytest.mark.parametrize("in_batches", [False, True], ids=["memory", "batches"])
@pytest.mark.parametrize("case", CASES)
def test_both_conventions(case: str, in_batches: bool) -> None:
    make, inputs = CASES[case]
    model = make().eval()
    lin = co.linearize(model, [(inputs(), Y)] if in_batches else (inputs(), Y), "classification")
    head = Base().head
    with torch.no_grad():
        expected = head(X) * MASK
    torch.testing.assert_close(lin.outputs(), expected, **TIGHT)
    torch.testing.assert_close(lin.predict(inputs()), expected, **TIGHT)
    J = torch.einsum("nc,cd,ni->ncdi", MASK, torch.eye(3).double(), torch.cat([X, torch.ones(7, 1).double()], 1))
    v = normal(15)
    block = torch.cat([v[:12].view(3, 4), v[12:, None]], 1)
    torch.testing.assert_close(lin.jacobian(inputs()) @ v, torch.einsum("ncdi,di->nc", J, block).flatten(), **TIGHT)


def test_a_function_takes_the_whole() -> None:
    head = Base().head
    params = {"w": head.weight.detach(), "b": head.bias.detach()}
    lin = co.linearize((function, params), (UserDict(x=X, mask=MASK), Y), "classification")
    with torch.no_grad():
        torch.testing.assert_close(lin.outputs(), head(X) * MASK, **TIGHT)
