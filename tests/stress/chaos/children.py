"""A command line in a forked child: what it was asked, how it ended, what it said."""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from gradshare.cli.app import main
from gradshare.runs import display

# Read files after epochs alone: with a clock, a slow run has more moments than the same run has on an idle machine.
display.REFRESH = math.inf
HANGS = 60  # seconds after which a child is taken to hang


class Broken(AssertionError):
    """A promise that was not kept, with what is needed to see it again."""


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    words: tuple[str, ...]
    code: int  # exit code; below 0: the signal that ended it
    text: str  # all that it said
    seconds: float

    def must(self, kept: bool, promise: str) -> None:
        if not kept:
            raise Broken(f"{promise}\n  gradshare {' '.join(self.words)}\n  exit code {self.code}\n{self.text}")

    def must_be_tidy(self) -> None:
        """Whatever happened: no hang, no traceback."""
        self.must(self.code != -signal.SIGALRM, f"a command hung for {HANGS} s")
        self.must("Traceback" not in self.text, "a traceback")


def gradshare(
    *words: object,
    before: Callable[[], object] = lambda: None,
    after_seconds: float | None = None,
    number: int = signal.SIGKILL,
) -> Ended:
    """Run a command in a child.

    Args:
        before: called in the child first: sets traps.
        after_seconds: when the child is sent a signal; None leaves it alone.
        number: the signal.
    """
    texts = tuple(map(str, words))
    started = time.monotonic()
    sys.stdout.flush()
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            _child(texts, before, said.fileno())
        if after_seconds is not None:
            time.sleep(max(0.0, started + after_seconds - time.monotonic()))
            os.kill(pid, number)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        seconds = time.monotonic() - started
        said.seek(0)
        return Ended(texts, code, said.read().decode(errors="replace"), seconds)


def _child(words: tuple[str, ...], before: Callable[[], object], said: int) -> None:
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.alarm(HANGS)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
        sys.argv = ["gradshare", *words]
        before()
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
