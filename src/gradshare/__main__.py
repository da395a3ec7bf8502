"""The command, also as python -m gradshare. Ctrl-C while it is still loading ends it as tidily as later."""

from __future__ import annotations

import os
import signal

from gradshare.cli.waiting import stoppable

SPINS = "10000"  # measured: docs/performance.md


def main() -> None:
    spin_briefly()
    with stoppable("nothing was begun"):
        from gradshare.cli.app import main as command
    try:
        command()
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python exits must not print a traceback


def spin_briefly() -> None:
    """Have idle OpenMP threads wait for work in a short loop, and then sleep, unless the user has chosen.

    By default they keep their cores busy for milliseconds, which slows down another run on the same cores many times.
    PyTorch's OpenMP library reads this once, when it is loaded; processes that are started from here inherit it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


if __name__ == "__main__":
    main()
