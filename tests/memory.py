"""What a call takes of memory, by what torch allocates."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeVar

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that is made within; those that share the memory of another do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor) and not any(result.alias_info for result in function._schema.returns):
                self.numbers = max(self.numbers, each.numel())
        return found


def peak_of(call: Callable[[], T]) -> tuple[int, T]:
    """The most bytes of tensors that were there at a time beside those before the call, and the call's result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))), result
