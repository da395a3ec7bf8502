"""Where and how a run computes: device, engine, precision and threads are decided here, and nowhere else.

`choose` decides and changes nothing; `apply` sets this process up for a choice.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from gradshare.engine import backends
from gradshare.engine.backends import Precision
from gradshare.engine.crowding import sleep_when_crowded
from gradshare.errors import MOST_THREADS, UserError, short_repr

Engine = Literal["auto", "eager", "graph", "compiled"]


@dataclass(frozen=True)
class Choice:
    """What `auto` means on this machine."""

    device: str  # cpu, cuda, or one GPU of several, such as cuda:1
    engine: Literal["eager", "graph", "compiled"]
    precision: Precision
    threads: int
    deterministic: bool = False
    processes: int = 1
    no_kernels: str | None = None  # why our GPU kernels cannot be used; None if they can
    apart: str | None = None  # what PyTorch's operations do in a run on our GPU kernels; None: nothing of weight
    share: str | None = None  # how much of the network is in compiled programs; None: not known

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def __str__(self) -> str:
        """The choice in one line, for people."""
        several = "" if self.processes == 1 else f"{self.processes} processes, each "
        if not self.on_gpu:
            same = "; the same bits in every run, as always on a CPU" if self.deterministic else ""
            how = f", {self._programs}" if self.engine == "compiled" or self.share is not None else ""
            threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
            return f"{several}on the CPU, {threads}, {self.precision}{how}{same}"
        engine = "one CUDA graph a meta-iteration" if self.engine == "graph" else "operation by operation"
        same = "; the same bits in every run" if self.deterministic else ""
        return f"{several}on {torch.cuda.get_device_name(self.device)}, {engine}, {self._arithmetic}{same}"

    @property
    def _arithmetic(self) -> str:
        if self.precision != "float32" and self.no_kernels is not None:
            how = f"{self._programs} in {self.precision}; weights, sums and statistics in float32"
            return f"{how}; not our kernels: {self.no_kernels}"
        if self.precision != "float32":
            apart = "" if self.apart is None else f"; {self.apart} by PyTorch's operations, one weight after the other"
            return f"our kernels in {self.precision}; weights, sums and statistics in float32{apart}"
        reason = "as asked" if self.no_kernels is None else f"not our kernels: {self.no_kernels}"
        return f"PyTorch's operations in float32, {reason}"

    @property
    def _programs(self) -> str:
        return "compiled programs" + ("" if self.share is None else f" ({self.share})")


def choose(
    device: str = "auto",
    engine: Engine = "auto",
    precision: Literal["auto"] | Precision = "auto",
    threads: int = 0,
    deterministic: bool = False,
    processes: int = 1,
    local_processes: int = 1,
    no_kernels: str | None = None,
) -> Choice:
    """Decide what is left open, and raise an error for what this machine cannot do. Changes nothing.

    Args:
        threads: CPU threads; 0: as many as OMP_NUM_THREADS says; if it is not set, one for each core that this process
            may use, shared with the other local processes.
        processes: how many work on the run, on all machines; `local_processes`: on this one.
        engine: graph: a CUDA graph; compiled: on a CPU, compiled programs instead of PyTorch's operations.
        no_kernels: why our GPU kernels do not support the learner; None if they do, as far as the caller knows.

    Example:
        >>> print(choose("cpu", threads=2))
        on the CPU, 2 threads, float32
    """
    place = _device(device, processes, local_processes)
    on_gpu = place != "cpu"
    missing = backends.not_installed() if on_gpu else "there is no GPU in use"
    no_kernels = missing or no_kernels
    if precision not in ("auto", *get_args(Precision)):
        raise UserError(f"a precision is auto, {', '.join(get_args(Precision))}, not {short_repr(precision)}")
    if precision == "auto":
        precision = "tf32" if no_kernels is None else "float32"
    elif precision == "tf32" and not on_gpu:
        raise UserError("precision tf32 is arithmetic of NVIDIA GPUs: on a CPU use precision float32 or bf16")
    elif precision != "float32" and on_gpu and missing is not None:
        raise UserError(f"precision {precision} needs programs for a GPU, and {missing}: use precision float32")
    cores = max(1, own_cores() // local_processes)
    threads = threads or threads_asked() or cores
    if processes > 1:
        threads = min(threads, cores)  # processes with more threads than cores slow each other down many times
    chosen = _engine(engine, on_gpu, processes)
    if chosen == "graph":
        backends.check_current(torch.device(place))
    return Choice(place, chosen, precision, threads, deterministic, processes, no_kernels)


def _device(device: str, processes: int, local_processes: int) -> str:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = check_device(device)
    if place.type == "cuda" and processes > 1 and local_processes > (gpus := torch.cuda.device_count()):
        raise UserError(f"{local_processes} processes on {gpus} GPUs: each process needs its own")
    return str(place)


def check_device(device: torch.device | str) -> torch.device:
    """The device that a user named: the CPU, or a GPU that this machine has; a UserError for any other.

    Example:
        >>> check_device("cpu:0")
        device(type='cpu')
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise UserError(f"a device is cpu or cuda, not {short_repr(device)}")
    if place.type == "cpu":
        if place.index:
            raise UserError(f"there is only one CPU device, not {short_repr(device)}: use device cpu")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"device {device} is not available: PyTorch sees no GPU; use device cpu")
    if place.index and place.index >= (gpus := torch.cuda.device_count()):
        raise UserError(f"device {device} is not available: PyTorch sees {gpus} GPUs, and the first one is cuda:0")
    return place


def _engine(engine: str, on_gpu: bool, processes: int) -> Literal["eager", "graph", "compiled"]:
    if engine == "auto":
        return "graph" if on_gpu and processes == 1 else "eager"
    if engine == "eager":
        return "eager"
    if engine == "compiled":
        if on_gpu:
            raise UserError("engine compiled is for a CPU: on a GPU, precisions tf32 and bf16 compile the network")
        return "compiled"
    if engine != "graph":
        raise UserError(f"an engine is one of {', '.join(get_args(Engine))}, not {short_repr(engine)}")
    if not on_gpu:
        raise UserError("a CUDA graph needs a GPU: on a CPU use engine eager")
    if processes > 1:
        raise UserError(f"a CUDA graph is recorded by one process, not {processes}: use engine eager")
    return "graph"


def apply(choice: Choice) -> None:
    """Set this process up: its threads, its memory, and whether a GPU must give the same bits each time."""
    torch.set_num_threads(choice.threads)
    if choice.on_gpu:
        if choice.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
            torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(choice.deterministic)
    elif sys.platform == "linux":
        _keep_freed_memory()
        if choice.threads > 1:
            sleep_when_crowded(own_cores())


def _keep_freed_memory() -> None:
    """Have glibc keep large blocks of memory that are freed.

    It returns them to the system at once, and the next use pays a page fault for every 4 KiB: twice the time of a
    meta-iteration with 48 filters. M_MMAP_MAX = 0 and a high M_TRIM_THRESHOLD keep them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)
        mallopt(-1, 2**31 - 1)


def own_cores() -> int:
    """Cores that this process may use: a scheduler often gives it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_asked() -> int:
    """The threads of a process that OMP_NUM_THREADS asks for; 0 if it is not set."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # the first of a list: the outermost level
    if not text:
        return 0
    if not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS:
        raise UserError(f"OMP_NUM_THREADS is {short_repr(text)}; it must be a whole number from 1 to {MOST_THREADS}")
    return int(text)


def check_memory(numbers: int, device: str) -> None:
    """Raise an error if so many float32 numbers are more than the machine's memory, or a GPU's.

    A process may get more memory than there is, and is killed when it uses it. So what options ask for is checked
    before anything of that size is allocated.
    """
    needed, memory = 4 * numbers, own_memory() if device == "cpu" else _gpu_memory(device)
    if needed > memory:
        raise UserError(
            f"this needs at least {needed / 1e9:,.0f} GB of memory, and there are {memory / 1e9:,.0f} GB:"
            " take fewer tasks, filters, steps, or a smaller eval_batch"
        )


def own_memory() -> int:
    """Bytes of memory that this process may use: a container often gives it less than the machine has."""
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    found = [int(text) for text in texts if text.isdecimal()]
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=sys.maxsize)


def _gpu_memory(device: str) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def side_by_side(jobs: int, count: int, device: str) -> tuple[int, int]:
    """How many of `count` trainings to run at a time, and the threads of each.

    On a CPU two trainings side by side, a core each, are faster than one on all cores; a GPU is best used by one.

    Args:
        jobs: how many at a time if the user said so; else 0.
    """
    cores, threads = own_cores(), threads_asked()
    jobs = min(jobs or (max(1, cores // (threads or 1)) if device == "cpu" else 1), count)
    return jobs, threads or max(1, cores // jobs)
