"""Ctrl-C and SIGTERM as a polite request: finish the iteration, save, stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Interrupted(Exception):  # noqa: N818: nothing went wrong
    """A run that was asked to stop, and did, with everything saved."""

    def __init__(self, folder: Path, where: str) -> None:
        super().__init__(f"stopped {where}; all is saved in {folder}")


class AtOnce(KeyboardInterrupt):
    """Ctrl-C or SIGTERM where there is nothing to save first, or for the second time.

    Not KeyboardInterrupt itself: that, caught on its way out of an `exec`, as in many imports, makes Python end as if
    killed, whatever exit code was meant.
    """


_is_worker = False


def become_worker() -> None:
    """From now on a second request is one like the first, in this process.

    A scheduler, or `timeout`, sends SIGTERM to all processes of a job, and then the parent asks its workers to stop:
    both are the same request. Who does not want to wait stops the parent, which kills its workers.
    """
    global _is_worker
    _is_worker = True


@contextmanager
def stop_requests(patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Within the block, the first Ctrl-C or SIGTERM is a request to stop; a second one stops at once.

    Args:
        patient: a second one is a request like the first: torchrun passes on what the terminal has sent already.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield asked.is_set
        return

    def handle(number: int, frame: object) -> None:
        if asked.is_set() and not (patient or _is_worker):
            raise AtOnce
        asked.set()

    wanted = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield asked.is_set
    finally:
        answered = _is_worker and asked.is_set()  # a worker on its way out is not to be killed by the same request
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if answered else handler)
