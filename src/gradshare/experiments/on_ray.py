"""Cells trained on a Ray cluster: a task for each, with their run folders on a disk that all machines share.

Ray starts a task again whose worker was killed or whose machine is gone; the task goes on from the last checkpoint.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from gradshare.data.store import data_folder
from gradshare.errors import UserError
from gradshare.experiments.cells import Cell
from gradshare.experiments.work import Outcome, train_cell

STORE = 80 * 2**20  # bytes of Ray's object store for a local start, about the least it takes: nothing of ours goes in


class OnRay:
    """Hands cells to Ray, which trains as many at a time as there are CPUs and GPUs for."""

    def __init__(self, address: str | None, cpus: float, gpus: float | None, retries: int) -> None:
        self.address, self.cpus, self.gpus, self.retries = address, cpus, gpus, retries
        self.tasks: dict[Any, Cell] = {}
        self.asked = False

    def __enter__(self) -> Self:
        self.ray = _ray()
        options: dict[str, Any] = {"address": self.address or "local", "log_to_driver": False, "logging_level": "error"}
        if self.address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options |= {"include_dashboard": False, "object_store_memory": STORE}
        try:
            _reach(self.address)
            self.ray.init(**options)
        except (OSError, ValueError, RuntimeError, OverflowError) as error:
            raise UserError(f"cannot use Ray at {self.address or 'this machine'}: {error}") from None
        if self.gpus is None:
            self.gpus = 1 if self.ray.cluster_resources().get("GPU", 0) >= 1 else 0
        return self

    def __exit__(self, *_: object) -> None:
        self.ray.shutdown()

    @property
    def busy(self) -> int:
        return len(self.tasks)

    @property
    def room(self) -> bool:
        return True  # Ray queues

    def start(self, cell: Cell) -> None:
        # A worker for each cell, as max_calls says: its threads, its memory and its GPU are its own.
        task: Callable[..., Any] = self.ray.remote(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=self.retries, max_calls=1, name=cell.label
        )(on_worker)
        self.tasks[task.remote(cell, data_folder().resolve())] = cell  # type: ignore[attr-defined]

    def ask_to_stop(self) -> None:
        """A task that runs gets an interrupt, on which its run saves; one that waits is taken back."""
        if not self.asked:
            self.asked = True
            for task in self.tasks:
                self.ray.cancel(task, force=False)

    def ended(self) -> list[tuple[Cell, Outcome, str]]:
        if not self.tasks:
            return []
        ready, _ = self.ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=0)
        return [(self.tasks.pop(task), *self._outcome(task)) for task in ready]

    def _outcome(self, task: Any) -> tuple[Outcome, str]:
        try:
            return self.ray.get(task), ""
        except self.ray.exceptions.TaskCancelledError:
            return "stopped", "taken back"
        except self.ray.exceptions.RayError as error:
            return "died", str(error).strip().partition("\n")[0]


def on_worker(cell: Cell, data: Path) -> Outcome:
    os.environ["GRADSHARE_DATA"] = str(data)  # the driver's: on the shared disk too
    return train_cell(cell)


def _reach(address: str | None) -> None:
    """Refuse at once an address where nothing answers; Ray itself tries for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError:
        raise UserError("--engine ray needs Ray: pip install gradshare[ray]") from None
