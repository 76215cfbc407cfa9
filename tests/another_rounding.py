"""A pytest plugin, `-p tests.another_rounding`: trainings end as on another machine.

Each optimiser begins at weights changed by one rounding of their dtype, in a direction of this process: what an
iteration of thousands makes of it is what other processors, thread counts and versions of torch make of a network.
"""

import os
from typing import Any

import torch

_begin = torch.optim.Optimizer.__init__
_noise = torch.Generator().manual_seed(int(os.environ.get("ROUNDING", "0")))


def begin_elsewhere(self: Any, *args: Any, **options: Any) -> None:
    """`Optimizer.__init__`, and the change."""
    _begin(self, *args, **options)
    with torch.no_grad():
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            noise = torch.randn(weight.shape, generator=_noise, dtype=torch.float64).to(weight)
            weight.mul_(1 + torch.finfo(weight.dtype).eps * noise)


torch.optim.Optimizer.__init__ = begin_elsewhere
