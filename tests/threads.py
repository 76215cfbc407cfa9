"""Work in several threads, and a number of threads of torch for a while."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def run_in_threads(*works: Callable[[], object]) -> None:
    """Run these side by side, each in a thread of its own, to their ends."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Give torch so many threads inside, and those that it had behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
