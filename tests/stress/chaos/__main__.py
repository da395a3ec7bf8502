"""python -m tests.stress.chaos: see the package."""

from __future__ import annotations

import argparse
import os
import sys

PARTS = ("kills", "signals", "full-disk", "read-only", "damage", "cut-files", "clocks", "processes")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.chaos")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--damaged", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="decides runs, moments and damage")
    parser.add_argument("--minutes", type=float, default=45.0, help="at most; then it ends with what it has, and fails")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--short", action="store_true", help="some moments of every phase, not every moment")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # threads do not survive a fork
    from .suite import run_suite

    return run_suite(given.only, given.seed, given.kills, given.damaged, given.minutes, given.short)


if __name__ == "__main__":
    sys.exit(main())
