"""Runs the tests as other machines would: one line a setting, its name and pytest's last.

    .venv/bin/python tests/any_machine.py                                   # the whole suite, under every setting
    .venv/bin/python tests/any_machine.py docs README.md                    # what is given to pytest
    .venv/bin/python tests/any_machine.py --only default docs README.md     # under one setting
    .venv/bin/python tests/any_machine.py --python .venv-oldest/bin/python  # with another torch, too

The settings are the instruction sets that torch's and its libraries' kernels take (as many as this processor has), two
threads for one, and trainings of the pages that end elsewhere (`tests/another_rounding.py`).
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {
    "default": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {},
}
ROUNDINGS = 3


def settings(python: str) -> dict[str, tuple[dict[str, str], list[str]]]:
    """The environment of each setting, and what it gives to pytest."""
    ask = "import torch; print(torch.backends.cpu.get_cpu_capability().lower())"
    own = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()[-1]
    sets = list(LIBRARIES)[: list(LIBRARIES).index(own) + 1] if own in LIBRARIES else []
    found: dict[str, tuple[dict[str, str], list[str]]] = {
        name: ({"ATEN_CPU_CAPABILITY": name, **LIBRARIES[name]}, []) for name in sets
    }
    waits = {"OMP_WAIT_POLICY": "passive"}  # those of two test processes would spin on each other's cores
    found["two threads"] = {"TEST_THREADS": "2", "OMP_NUM_THREADS": "2", **waits}, []
    for seed in range(ROUNDINGS):
        pages = ["-p", "tests.another_rounding", "docs", "README.md"]
        found[f"rounding {seed}"] = {"ROUNDING": str(seed)}, pages
    return found


def main() -> int:
    """Returns how many settings failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one setting, by its name")
    parser.add_argument("--python", action="append", help="another environment's interpreter: all runs there, too")
    given, arguments = parser.parse_known_args()
    failed = 0
    for python in [sys.executable, *(given.python or [])]:
        chosen = settings(python)
        if given.only is not None and given.only not in chosen:
            parser.error(f"--only must be one of {', '.join(chosen)}, got {given.only}.")
        for name, (environment, pages) in chosen.items():
            if given.only not in (None, name):
                continue
            command = [python, "-m", "pytest", "--quiet", "--no-header", *(pages or arguments)]
            run = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
            lines = run.stdout.strip().splitlines() or [run.stderr.strip()]
            failed += run.returncode != 0
            report = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            print(f"{python} · {name}: {lines[-1]}", *report, sep="\n    ", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
