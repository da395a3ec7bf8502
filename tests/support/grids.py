"""Cells of grids that are small enough to be trained in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradshare.experiments.grid import Cell
from gradshare.experiments.presets import experiment, preset

MAML, SHARED = "cub-5shot-5task-maml", "cub-5shot-5task-maml+gs"
TINY: dict[str, Any] = dict(
    ways=3, shots=1, queries=3, tasks=2, steps=2, filters=3, val_tasks=6, test_tasks=6, iterations=4, epochs=2,
    threads=1, device="cpu",
)  # fmt: skip


def cell_of(grid: Path, dataset: Path, name: str = MAML, **options: Any) -> Cell:
    config = preset(name, **{**TINY, "dataset": str(dataset), **options})
    return Cell.of_preset(grid, experiment(name), config)
