"""A pytest plugin, `-p tests.cuda.stand_in`: a machine without a GPU, with tensors that say `cuda:0`.

Their memory and kernels are the CPU's (`stand_in.cpp`); all else is torch's own. What fails on a GPU fails here:
operations that mix devices, generators of another device, `.numpy()` of a tensor on the device.
`torch.cuda.set_sync_debug_mode` warns of what makes the host wait, as on a GPU. It lacks streams and CUDA's own kernels
(cuDNN, fused attention), and random numbers are the CPU's, so that draws can be compared. For a process of its own:
nothing is put back.
"""

import ctypes
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_suffix(".cpp")
TORCH = Path(str(importlib.util.find_spec("torch").origin)).parent


def compiled() -> Path:
    """Returns the shared library, compiled once for each version of torch and of its source."""
    options = ["-O1", "-shared", "-fPIC", "-std=c++20", "-w", f"-I{TORCH / 'include'}"]  # four times as fast as without
    key = hashlib.sha256(f"{options} {version('torch')}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"curvops_stand_in_{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            libraries = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
            subprocess.run(["g++", *options, str(SOURCE), "-o", str(made), *libraries], check=True)
            made.replace(library)
    return library


if "torch" in sys.modules:
    raise ImportError("torch asks once, when it is imported, for its hooks for CUDA: import the stand-in before it")
library = ctypes.CDLL(str(compiled()), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402


def lstm_cell(inputs: Tensor, hidden: Tensor, cell: Tensor, *biases: Tensor | None) -> tuple[Tensor, ...]:
    """CUDA's own kernel of an LSTM's step, which has no forward mode."""
    gates = sum((bias for bias in biases if bias is not None), inputs + hidden)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    of_hidden: Tensor | None, of_cell: Tensor | None, cell: Tensor, after: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """Its derivatives in the gates, the cell's state and the biases."""
    if of_hidden is None and of_cell is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    of_hidden = after * 0 if of_hidden is None else of_hidden
    slope = of_hidden * o * (1 - after.tanh() ** 2) + (0 if of_cell is None else of_cell)
    parts = [
        slope * g * i * (1 - i),
        slope * cell * f * (1 - f),
        slope * i * (1 - g**2),
        of_hidden * after.tanh() * o * (1 - o),
    ]
    gates = torch.cat(parts, 1)
    return gates, slope * f, gates.sum(0) if has_bias else None


def install() -> None:
    """Makes `cuda:0` usable in this process."""
    library.install()
    recurrent = torch.library.Library("aten", "IMPL")
    recurrent.impl("_thnn_fused_lstm_cell", lstm_cell, "CUDA")
    recurrent.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward, "CUDA")
    torch.cuda.recurrent = recurrent  # in force as long as it lives

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()

    def from_dlpack(tensor: torch.Tensor, plain: Callable[..., torch.Tensor] = torch.from_dlpack) -> torch.Tensor:
        return tensor.clone() if tensor.is_cuda else plain(tensor)

    torch.UntypedStorage.clone = clone  # deepcopy's: it asks a build for CUDA for memory
    torch.utils.dlpack.from_dlpack = torch.from_dlpack = from_dlpack
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # a build for CUDA asks its library
    cuda = torch.cuda
    cuda._initialized, cuda._cached_device_count = True, 1
    torch._C._cuda_getDeviceCount = lambda: 1
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    cuda._exchange_device = cuda._maybe_exchange_device = lambda device: 0
    cuda.default_generators = (torch.Generator("cuda"),)
    cuda.mem_get_info = lambda device=None: (8 << 30, 16 << 30)
    cuda.is_current_stream_capturing = lambda: False
    cuda.synchronize = cuda.reset_peak_memory_stats = lambda device=None: None
    cuda.memory_allocated = cuda.max_memory_allocated = lambda device=None: 0
    cuda.empty_cache = lambda: None
    cuda.get_device_name = lambda device=None: "stand-in"
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="stand-in", total_memory=16 << 30, major=8, minor=0
    )
    cuda.set_sync_debug_mode = lambda mode: library.report_waits(mode == "warn")
    # Without it a profile asks for an event of CUDA before and after each operation: an error with a trace each time.
    known = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    torch.autograd.profiler._supported_activities = lambda: known


install()
