"""Any function of fixed tensors as a CUDA graph: recorded once, replayed without Python.

A meta-iteration is thousands of small kernels, and a GPU finishes them faster than a CPU can launch them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import torch

from gradshare.engine.backends import check_current
from gradshare.errors import UserError

Result = TypeVar("Result")
Engine = Literal["auto", "eager", "graph"]


def chosen_engine(engine: Engine, device: str, processes: int) -> Engine:
    """What "auto" means here; refuses what cannot be."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise UserError(f"a device is cpu or cuda, not {device!r}") from None
    on_gpu = place.type == "cuda"
    if engine not in get_args(Engine):
        raise UserError(f"an engine is one of {', '.join(get_args(Engine))}, not {engine!r}")
    if engine == "graph" and not on_gpu:
        raise UserError("a CUDA graph needs a GPU: on a CPU the engine is eager")
    if engine == "graph" and processes > 1:
        raise UserError(f"a CUDA graph is recorded by one process, not {processes}: use the engine eager")
    if on_gpu and not torch.cuda.is_available():
        raise UserError(f"device {device!r} is not there: PyTorch sees no GPU; use 'cpu'")
    chosen: Engine = engine if engine != "auto" else "graph" if on_gpu and processes == 1 else "eager"
    if chosen == "graph":
        check_current(place)
    return chosen


def record(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A function as a graph, and the tensors that it leaves each time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries choose and load their kernels here, which recording does not allow
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = run()
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"this cannot be recorded as a CUDA graph ({reason}): use engine='eager'") from error
    return graph, result
