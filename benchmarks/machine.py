"""The machine and versions of a measurement, and separate processes. It does not import torch, to stay light."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PROMPT = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
"""By this environment a process gives large freed blocks back to the system at once (glibc)."""


def facts(threads: int) -> dict[str, object]:
    """Machine, versions, date (UTC) and the load at the start: a load well above 0 says that it was not quiet."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": cores(),
        "threads": threads,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "curvops": peer_version("curvops"),
        "commit": commit(),
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_apart(
    module: str, *arguments: object, prompt: bool = False, limit: float | None = None
) -> list[dict[str, Any]]:
    """Run a module in a process of its own, and return the JSON lines that it prints, whatever it prints beside them.

    After `limit` seconds it is stopped, and TimeoutExpired is raised. With `prompt` that process gives large freed
    blocks back to the system at once (glibc), so that its resident set is what it holds.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    environment = os.environ | (PROMPT if prompt else {})
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=root, env=environment, timeout=limit
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def reset_peak() -> int:
    """Set the peak of this process's resident set back, and return its size in bytes. Linux alone can."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str, process: int | str = "self") -> int:
    """Return bytes of a process's resident set now ("VmRSS"), or at its peak ("VmHWM"); on Linux alone."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def peer_version(package: str) -> str | None:
    """The installed version of another package, None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit measured, with "+" where tracked files of the package differ from it."""
    here = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        same = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "../curvops"], cwd=here, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return name if same == 0 else f"{name}+"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
