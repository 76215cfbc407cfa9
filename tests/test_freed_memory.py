import gc
import resource
from pathlib import Path

import pytest
import torch

from curvops.freed_memory import _LIBRARY, LONG_BYTES, freed_bytes, give_back_freed


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


@pytest.mark.skipif(not hasattr(_LIBRARY, "mallinfo2"), reason="needs glibc 2.33")
def test_what_the_library_keeps_of_freed_blocks_is_counted() -> None:
    blocks = [torch.ones(2**13) for _ in range(2000)]
    before = freed_bytes()
    del blocks[1::2]
    gc.collect()
    assert 2**24 < freed_bytes() - before < 2**26
    assert len(blocks) == 1000
