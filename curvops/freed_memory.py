"""Freed memory that the C library keeps, given back to the system."""

from __future__ import annotations

import ctypes
import sys

LONG_BYTES = 2**18
"""Bytes of a block from which on making it takes so long that freed memory is given back before."""


class _Statistics(ctypes.Structure):
    """The numbers of glibc's `mallinfo2`, of which `fordblks` are bytes of free blocks."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def give_back_freed(block_bytes: int = LONG_BYTES) -> None:
    """Return freed memory that the C library keeps (glibc) to the system, before blocks of that size are allocated.

    glibc keeps freed blocks of up to 32 MiB. They are of no use to larger ones, so that both would be resident. Nothing
    happens with other libraries, or before small blocks.
    """
    trim = getattr(_LIBRARY, "malloc_trim", None) if block_bytes >= LONG_BYTES else None
    if trim is not None:
        trim(0)


def freed_bytes() -> int:
    """Return how many bytes of freed memory the C library (glibc) may keep; 0 with others, which do not say."""
    statistics = getattr(_LIBRARY, "mallinfo2", None)
    if statistics is None:
        return 0
    statistics.restype = _Statistics
    return int(statistics().fordblks)
