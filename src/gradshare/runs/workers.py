"""A process that trains: how Ctrl-C and SIGTERM ask it to save and stop, and its exit codes."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

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
def stops_go_to(handle: Callable[[int, object], None]) -> Iterator[dict[int, Any]]:
    """Within the block, `handle` gets Ctrl-C and SIGTERM; what got them before gets them after it.

    Python calls a handler wherever it is, and what `handle` raises does not always end the block. Inside an import it
    may come out as another error, be dropped, or end the process in C++. In a finaliser Python only prints it, and goes
    on. So the main thread gets the signal again, a moment later, until that is over; also while it sleeps.
    """
    wanted = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    hook, imports = sys.unraisablehook, _imports(sys._getframe())

    def arrived(number: int, frame: FrameType | None) -> None:
        if _imports(frame) > imports:
            _send_again(number)
        else:
            handle(number, frame)

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, HardStop):
            _send_again(wanted[0])
        else:
            hook(what)

    before: dict[int, Any] = {number: signal.signal(number, arrived) for number in wanted}
    sys.unraisablehook = dropped
    try:
        yield before
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _send_again(number: int) -> None:
    """Send a signal to the main thread in a moment."""

    def send() -> None:
        time.sleep(0.01)
        signal.pthread_kill(main, number)

    main = threading.get_ident()
    _thread.start_new_thread(send, ())  # threading.Thread takes a lock, which the main thread may hold just now


def _imports(frame: FrameType | None) -> int:
    """How many calls of Python's import system a frame is in."""
    found = 0
    while frame is not None:
        found += frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return found


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

    with stops_go_to(handle) as before:
        try:
            yield asked.is_set
        finally:
            if _is_worker and asked.is_set():  # the same request must not kill a worker that is about to exit
                before.update(dict.fromkeys(before, signal.SIG_IGN))


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
