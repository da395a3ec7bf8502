"""The command, also as python -m gradshare. Ctrl-C while it is still loading ends it as tidily as later."""

from __future__ import annotations

import signal

from gradshare.cli.waiting import stoppable


def main() -> None:
    with stoppable("nothing was begun"):
        from gradshare.cli.app import main as command
    try:
        command()
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python exits must not print a traceback


if __name__ == "__main__":
    main()
