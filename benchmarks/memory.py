"""Peak memory and time of a meta-step: plain, with checkpoint, and with micro-batches. Needs no installed gradshare.

    PYTHONPATH=src python benchmarks/memory.py --device cuda --out FOLDER
    PYTHONPATH=src python benchmarks/memory.py --device cpu --out FOLDER --seconds 900

MAML with sharing, second order, 5-way 1-shot, 15 queries, 5 inner steps, on random images: ResNet-12 at 84x84 on a GPU,
a small ResNet of the same form at 32x32 on a CPU. Results are written to FOLDER after every case. A case that needs
more memory than there is says so. Cases for which no time is left are not run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradshare as gs
from gradshare.engine.choose import apply, choose
from gradshare.errors import out_of_memory

TASKS = (4, 8, 16, 32)
WAYS, SHOTS, QUERIES, STEPS = 5, 1, 15, 5
LONG = 10.0  # seconds: a first step that takes longer is not repeated
Result = dict[str, Any]


class Mode(NamedTuple):
    """One way to take the step."""

    name: str
    micro_batch: int | None = None
    checkpoint: bool = False


MODES = (  # in the order of the measurements: what matters most comes first
    Mode("plain"),
    Mode("micro_batch=1", micro_batch=1),
    Mode("micro_batch=4", micro_batch=4),
    Mode("checkpoint", checkpoint=True),
    Mode("micro_batch=2", micro_batch=2),
    Mode("micro_batch=8", micro_batch=8),
)


class Setting(NamedTuple):
    """The network and its images."""

    filters: tuple[int, int, int, int]
    size: int


SETTINGS = {"cuda": Setting((64, 128, 256, 512), 84), "cpu": Setting((8, 16, 32, 64), 32)}


def random_tasks(tasks: int, size: int, device: str) -> gs.Episodes:
    draw, labels = torch.Generator().manual_seed(tasks), torch.arange(WAYS)

    def part(each: int) -> tuple[Tensor, Tensor]:
        images = torch.rand(tasks, WAYS * each, 3, size, size, generator=draw)
        return images, labels.repeat_interleave(each).expand(tasks, -1)

    return gs.Episodes(*part(SHOTS), *part(QUERIES)).to(device)


def measure(device: str, tasks: int, mode: Mode, timed: int) -> Result:
    """Peak memory in MiB above that at the start, and seconds of the last step."""
    apply(choose(device))
    torch.manual_seed(0)
    setting = SETTINGS[device]
    model = gs.ResNet12(WAYS, setting.filters, (3, setting.size, setting.size))
    learner = gs.maml(model, inner_lr=0.05, steps=STEPS, sharing=gs.GradientSharing()).to(device)
    state, episodes = learner.init(), random_tasks(tasks, setting.size, device)
    adam = gs.optimiser(state, 1e-3)
    start = memory(device)
    seconds = []
    try:
        for _ in range(1 + timed):
            began = time.perf_counter()
            outcome = gs.meta_step(learner, state, adam, episodes, 0.0, mode.micro_batch, mode.checkpoint)
            loss = outcome.loss.item()  # waits for the GPU
            seconds.append(time.perf_counter() - began)
            if seconds[0] > LONG:
                break
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return {"failed": "out of memory"}
    weights = sum(weight.numel() for weight in state.params.values())
    return {"peak_mib": peak(device) - start, "seconds": seconds[-1], "loss": loss, "weights": weights}


def memory(device: str) -> float:
    """MiB in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak(device: str) -> float:
    """MiB in use at most since `memory` was called; on a CPU since the process began."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def in_a_process(tasks: int, mode: Mode, timed: int) -> Result:
    """`measure` on the CPU, in a process of its own: its peak is that of this case."""
    words = [sys.executable, __file__, "--case", str(tasks), mode.name, "--timed", str(timed)]
    child = subprocess.run(words, capture_output=True, text=True)
    if child.returncode == -9:
        return {"failed": "out of memory"}
    if child.returncode:
        raise RuntimeError(child.stderr)
    found: Result = json.loads(child.stdout.splitlines()[-1])
    return found


def table(results: list[Result]) -> str:
    """Modes by tasks: memory in GiB, and seconds a step."""
    found = {(one["mode"], one["tasks"]): one for one in results}
    tasks = [count for count in TASKS if any(one["tasks"] == count for one in results)]
    lines = ["| | " + " | ".join(f"{count} tasks" for count in tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for mode in sorted(MODES, key=lambda mode: -(mode.micro_batch or 1000 - mode.checkpoint)):
        cells = [cell(found.get((mode.name, count))) for count in tasks]
        if any(cells):
            lines.append(f"| {mode.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(one: Result | None) -> str:
    if one is None:
        return ""
    return one["failed"] if "failed" in one else f"{one['peak_mib'] / 1024:.2f} GiB, {one['seconds']:.2f} s"


def write(folder: Path, device: str, results: list[Result]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    how = {**SETTINGS[device]._asdict(), "device": device, "torch": torch.__version__}
    content = {**how, "results": results, "table": table(results)}
    (folder / f"memory-{device}.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SETTINGS), default="cpu")
    parser.add_argument("--out", type=Path, help="folder for memory-DEVICE.json")
    parser.add_argument("--seconds", type=float, default=140, help="start no case after so many seconds")
    parser.add_argument("--timed", type=int, default=1, help="steps that are timed, after one that is not")
    parser.add_argument("--case", nargs=2, metavar=("TASKS", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    modes = {mode.name: mode for mode in MODES}
    if arguments.case:
        print(json.dumps(measure("cpu", int(arguments.case[0]), modes[arguments.case[1]], arguments.timed)))
        return
    results: list[Result] = []
    began = time.monotonic()
    for mode in MODES:
        for tasks in TASKS:
            if mode.micro_batch and mode.micro_batch >= tasks:
                continue
            if time.monotonic() - began > arguments.seconds:
                print(f"no time left for {mode.name} with {tasks} tasks", flush=True)
                continue
            if arguments.device == "cuda":
                found = measure("cuda", tasks, mode, arguments.timed)
                gc.collect()
                torch.cuda.empty_cache()
            else:
                found = in_a_process(tasks, mode, arguments.timed)
            results.append({"mode": mode.name, "tasks": tasks, **found})
            print(f"{mode.name}, {tasks} tasks: {cell(results[-1])}", flush=True)
            if arguments.out:
                write(arguments.out, arguments.device, results)
    print(table(results))


if __name__ == "__main__":
    main()
