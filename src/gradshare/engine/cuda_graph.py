"""Any function of fixed tensors as a CUDA graph: recorded once, replayed without Python.

A meta-iteration is thousands of small kernels, and a GPU finishes them faster than a CPU can launch them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from gradshare.errors import UserError

Result = TypeVar("Result")


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
        raise UserError(
            f"this cannot be recorded as a CUDA graph ({reason}): use engine='eager', or gs.meta_step"
        ) from error
    return graph, result
