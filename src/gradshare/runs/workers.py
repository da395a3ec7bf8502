"""A process that trains: how Ctrl-C and SIGTERM ask it to save and stop, and its exit codes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DONE, FAILED, STOPPED = 0, 1, 3  # exit codes; any other, or a signal's number below 0: the process died


class Interrupted(Exception):  # nothing went wrong
    """A run was asked to stop, and did, with everything saved."""

    def __init__(self, folder: Path, where: str) -> None:
        super().__init__(f"stopped {where}; all is saved in {folder}")


class HardStop(KeyboardInterrupt):
    """Ctrl-C or SIGTERM when there is nothing to save first, or for the second time.

    Not KeyboardInterrupt itself: Python exits as if killed, whatever exit code was meant, if that one passes through an
    `exec`, as many imports have.
    """


_is_worker = False


@contextmanager
def stop_requests(patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Within the block, the first Ctrl-C or SIGTERM is a request to stop; a second one raises `HardStop`.

    Args:
        patient: treat a second one like the first: torchrun passes on what the terminal has sent already.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield asked.is_set
        return

    def handle(number: int, frame: object) -> None:
        if asked.is_set() and not (patient or _is_worker):
            raise HardStop
        asked.set()

    wanted = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield asked.is_set
    finally:
        answered = _is_worker and asked.is_set()  # the same request must not kill a worker that is about to exit
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if answered else handler)


def become_worker() -> None:
    """From now on this process treats a second request to stop like the first.

    A scheduler, or `timeout`, sends SIGTERM to all processes of a job, and then the parent asks its workers to stop:
    both are the same request. A second Ctrl-C stops the parent, which kills its workers.
    """
    global _is_worker
    _is_worker = True


def one_of_several() -> bool:
    """Whether torchrun, or whatever started this process, says that it works with others on one run."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
