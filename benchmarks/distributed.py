"""Time a meta-iteration whose tasks are shared by several processes.

    OMP_NUM_THREADS=1 python benchmarks/distributed.py --tasks 4
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/distributed.py --tasks 4

Random images in the shape of `gradshare bench --shape cpu`: Conv-4 with 48 filters, 28x28x1, 5-way 1-shot, 15 queries,
5 inner steps, MAML with sharing, second order. Each process has one thread, and needs a free core.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import gradshare as gs
from gradshare.bench.measure import synthetic
from gradshare.engine.choose import apply, choose
from gradshare.engine.processes import Group
from gradshare.runs.torchrun import ends_at_once


def reduction_ms(group: Group, elements: int, times: int = 50) -> float:
    """Return the milliseconds of one reduction of float32 values, when no process waits for another."""
    vector = torch.zeros(elements)
    dist.all_reduce(vector)
    started = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(vector)
    return (time.perf_counter() - started) / times * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=20)
    arguments = parser.parse_args()
    with ends_at_once(), gs.processes() as group:
        apply(choose("cpu", threads=1, processes=group.size, local_processes=group.local_size))
        model = gs.Conv4(ways=5, filters=48, image=(1, 28, 28))
        learner = gs.maml(model, inner_lr=0.1, steps=5, sharing=gs.GradientSharing()).over(group)
        state = learner.init(seed=0)
        adam = gs.optimiser(state, 1e-3)
        images = synthetic((1, 28, 28), "cpu")
        times = []
        for iteration in range(3 + arguments.iterations):
            episodes = images.sample("train", gs.Shape(5, 1, 15), arguments.tasks, (iteration,))
            group.any(False)  # all processes start at the same time
            started = time.perf_counter()
            gs.meta_step(learner, state, adam, episodes)
            times.append((time.perf_counter() - started) * 1e3)
        quartiles = statistics.quantiles(times[3:], n=4)
        adapted = sum(state.params[name].numel() for name in learner.adapted)
        small = (
            f"; a reduction of {adapted:,} float32 takes {reduction_ms(group, adapted):.2f} ms"
            if group.size > 1
            else ""
        )
        if group.first:
            print(
                f"{group.size} process(es), {arguments.tasks} tasks: {quartiles[1]:.0f} ms a meta-iteration"
                f" (quartiles {quartiles[0]:.0f} to {quartiles[2]:.0f}){small}"
            )


if __name__ == "__main__":
    main()
