"""Work in several threads, and a number of threads of torch for a while."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


def run_in_threads(*works: Callable[[], object]) -> list[Any]:
    """Run these side by side in threads, to their ends, and return their results; raise what one of them raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [run.result() for run in [pool.submit(work) for work in works]]


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Give torch so many threads inside, and those that it had behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
