"""What a call takes of memory, by what torch allocates."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def peak_of(call: Callable[[], T]) -> tuple[int, T]:
    """The most bytes of tensors that were there at a time beside those before the call, and the call's result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))), result
