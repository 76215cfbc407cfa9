"""How much memory is free on a device, where a budget was not given."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# Where neither the kernel nor a control group tells, a small machine is assumed.
UNKNOWN = 4 * 2**30


def default_budget(device: torch.device) -> int:
    """A quarter of the bytes free on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    return min(_machine_bytes(), _group_bytes()) // 4


def _machine_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return UNKNOWN


def _group_bytes() -> int:
    """What a control group (a container) leaves, or no limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        return int(limit) - int(used)
    except (OSError, ValueError):
        return 2**63 - 1
