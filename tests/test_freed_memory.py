import gc
import resource
from pathlib import Path

import pytest
import torch

from curvops.freed_memory import _LIBRARY, LONG_BYTES, give_back_freed


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not hasattr(_LIBRARY, "malloc_trim"), reason="needs glibc")
def test_freed_blocks_are_given_back_before_long_ones_only() -> None:
    blocks = [torch.ones(2**13) for _ in range(2000)]  # of 32 KiB, which glibc keeps
    there = resident()
    blocks = blocks[::200]  # a few in between stay
    gc.collect()
    give_back_freed(LONG_BYTES - 1)
    assert there - resident() < 2**24
    give_back_freed()
    assert there - resident() > 2**25 and all(float(block.sum()) == 2**13 for block in blocks)
