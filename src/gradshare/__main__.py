"""The command, also as python -m gradshare. Ctrl-C while it is still loading ends it as tidily as later."""

from __future__ import annotations

from gradshare.cli.waiting import stoppable


def main() -> None:
    with stoppable("nothing was begun"):
        from gradshare.cli.app import main as command
    command()


if __name__ == "__main__":
    main()
