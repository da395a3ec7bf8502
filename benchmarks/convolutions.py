"""Time the convolutions of many tasks, layer by layer: PyTorch's calls, one a task, beside our programs for all tasks.

    PYTHONPATH=src python benchmarks/convolutions.py FILE.json [--seconds 60]     # needs a GPU

Each is recorded ten times in one CUDA graph, as in training; the table has microseconds a call. With `tiles` our
programs are timed with other sizes too. What does not fit into the seconds is left out, and the file says so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gradshare.engine import convolution, implicit
from gradshare.engine.convolution import laid_out
from gradshare.engine.implicit import Tile
from gradshare.engine.operations import Options

# Sources, targets, width of the filters, stride, pixels of a side.
LAYERS = (
    (64, 64, 3, 1, 84), (128, 128, 3, 1, 42), (256, 256, 3, 1, 21), (512, 512, 3, 1, 10),
    (3, 64, 3, 1, 84), (64, 128, 3, 1, 42), (256, 512, 3, 1, 10), (256, 512, 1, 1, 10),
    (48, 48, 3, 1, 42), (3, 48, 3, 1, 84), (48, 48, 3, 2, 84), (48, 48, 3, 1, 10),
)  # fmt: skip
IMAGES = ((4, 5), (2, 25), (5, 25), (4, 75))  # tasks, and images of each
TILES = (
    Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 4, 3), Tile(128, 128, 32, 8, 4), Tile(128, 64, 64, 4, 4),
    Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4), Tile(128, 256, 64, 8, 3), Tile(64, 32, 64, 4, 4),
)  # fmt: skip


def microseconds(call: Callable[[], object], repeats: int = 10, rounds: int = 5) -> float:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / repeats)
    return round(median(times), 2)


def row(layer: tuple[int, ...], tasks: int, n: int, tiles: bool) -> dict[str, Any]:
    sources, targets, width, stride, side = layer
    how = Options([stride] * 2, [width // 2] * 2, [1, 1], False, [0, 0], 1)
    draw = torch.Generator("cuda").manual_seed(0)
    x = laid_out(torch.randn(tasks, n, sources, side, side, device="cuda", generator=draw).bfloat16())
    w = laid_out(torch.randn(tasks, targets, sources, width, width, device="cuda", generator=draw).bfloat16())
    y = torch.ops.gradshare.conv(x, w, *how)
    g = laid_out(torch.randn(y.shape, device="cuda", generator=draw).bfloat16())
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "conv": lambda: torch.ops.gradshare.conv(x, w, *how),
        "images": lambda: torch.ops.gradshare.images_gradient(g, x, w, *how),
        "filters": lambda: torch.ops.gradshare.filters_gradient(g, x, w, *how),
    }
    found: dict[str, Any] = {"layer": layer, "tasks": tasks, "images": n}
    found["gflop"] = round(2e-9 * y.numel() * sources * width**2, 3)
    for name, call in calls.items():
        convolution.AT_ONCE = False
        expected, theirs = call(), microseconds(call)
        convolution.AT_ONCE = True
        away = ((call().float() - expected.float()).norm() / expected.float().norm()).item()
        found[name] = {"by task": theirs, "at once": microseconds(call), "difference": round(away, 5)}
        if tiles and sources % 64 == 0:
            found[name]["tiles"] = tried(name, call)
    return found


def tried(name: str, call: Callable[[], object]) -> dict[str, float]:
    """Microseconds with every tile."""
    usual, times = implicit._tile, {}
    usual_filters = implicit.FILTERS
    for tile in TILES:
        implicit._tile = lambda *_, tile=tile: tile
        implicit.FILTERS = tile
        try:
            times[str(tuple(tile))] = microseconds(call)
        except Exception as error:  # too large for this GPU, say
            times[str(tuple(tile))] = f"{type(error).__name__}"
    implicit._tile, implicit.FILTERS = usual, usual_filters
    return times


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("file", type=Path)
    arguments.add_argument("--seconds", type=float, default=60.0)
    given = arguments.parse_args()
    end, table = time.monotonic() + given.seconds, []
    for tiles in (False, True):
        for tasks, n in IMAGES[:1] if tiles else IMAGES:
            for layer in LAYERS[:4] if tiles else LAYERS:
                if time.monotonic() > end:
                    table.append({"layer": layer, "tasks": tasks, "images": n, "left out": True})
                    continue
                table.append(row(layer, tasks, n, tiles))
                print(json.dumps(table[-1]), flush=True)
                given.file.write_text("\n".join(map(json.dumps, table)) + "\n")


if __name__ == "__main__":
    main()
