"""Cells trained on a Ray cluster: a Ray task for each, with the run folders on a disk that all machines share.

Ray starts a task again if its worker was killed or its machine is gone; the task goes on from the last checkpoint.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from gradshare.data.store import data_folder
from gradshare.errors import UserError
from gradshare.experiments.grid import Cell
from gradshare.experiments.supervise import Ended, Outcome, train_cell

STORE = 80 * 2**20  # bytes of Ray's object store if Ray is started here, about the least it accepts: we put nothing in


class Ray:
    """Hands cells to Ray, which trains as many at a time as there are CPUs and GPUs for.

    Args:
        address: of the cluster; None starts Ray on this machine.
        cpus: for each cell.
        gpus: for each cell; None is 1 if the cluster has any.
        allowed: arms of the user's own that may be imported.
    """

    def __init__(
        self, address: str | None, cpus: float, gpus: float | None, retries: int, allowed: Sequence[str] = ()
    ) -> None:
        self.address, self.cpus, self.gpus, self.retries, self.allowed = address, cpus, gpus, retries, allowed
        self.tasks: dict[Any, Cell] = {}
        self.asked = False

    def __enter__(self) -> Self:
        self.ray = _import_ray()
        options: dict[str, Any] = {"address": self.address or "local", "log_to_driver": False, "logging_level": "error"}
        if self.address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options |= {"include_dashboard": False, "object_store_memory": STORE}
        try:
            _check_reachable(self.address)
            self.ray.init(**options)
        except (OSError, ValueError, RuntimeError, OverflowError) as error:
            raise UserError(f"cannot use Ray at {self.address or 'this machine'}: {error}") from None
        if self.gpus is None:
            self.gpus = 1 if self.ray.cluster_resources().get("GPU", 0) >= 1 else 0
        return self

    def __exit__(self, *_: object) -> None:
        self.ray.shutdown()

    @property
    def busy(self) -> Sequence[Cell]:
        return list(self.tasks.values())

    @property
    def room(self) -> bool:
        return True  # Ray has a queue

    def start(self, cell: Cell) -> None:
        # max_calls=1 gives each cell a worker process of its own, with its own threads, memory and GPU.
        task: Callable[..., Any] = self.ray.remote(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=self.retries, max_calls=1, name=cell.label
        )(_work)
        search = sys.path if self.allowed else []
        self.tasks[task.remote(cell, data_folder().resolve(), self.allowed, search)] = cell  # type: ignore[attr-defined]

    def ask_to_stop(self) -> None:
        """Interrupt the tasks that run, which makes them save, and take back those that wait."""
        if not self.asked:
            self.asked = True
            for task in self.tasks:
                self.ray.cancel(task, force=False)

    def ended(self) -> list[Ended]:
        if not self.tasks:
            return []
        ready, _ = self.ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=0)
        return [self._ended(task) for task in ready]

    def _ended(self, task: Any) -> Ended:
        cell = self.tasks.pop(task)
        try:
            return Ended(cell, self.ray.get(task))
        except self.ray.exceptions.TaskCancelledError:
            return Ended(cell, "stopped", "taken back")
        except self.ray.exceptions.RayError as error:
            return Ended(cell, "died", str(error).strip().partition("\n")[0])


def _work(cell: Cell, data: Path, allowed: Sequence[str], search: Sequence[str]) -> Outcome:
    """Train a cell in a Ray worker, with the data folder and the importable folders of the supervisor."""
    os.environ["GRADSHARE_DATA"] = str(data)
    sys.path.extend(path for path in search if path not in sys.path)
    return train_cell(cell, allowed)


def _check_reachable(address: str | None) -> None:
    """Raise an OSError at once for an address where nothing answers; Ray itself tries for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _import_ray() -> Any:
    try:
        return import_module("ray")
    except ImportError:
        raise UserError("--engine ray needs Ray: pip install 'gradshare[ray]'") from None
