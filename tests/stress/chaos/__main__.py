"""python -m tests.stress.chaos: see the package."""

from __future__ import annotations

import argparse
import os
import sys


def main() -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # threads do not survive a fork
    from .suite import PARTS, run_suite

    parser = argparse.ArgumentParser(prog="python -m tests.stress.chaos")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--damaged", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="decides runs, moments and damage")
    parser.add_argument("--minutes", type=float, default=45.0, help="at most")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sample", action="store_true", help="to run out of minutes is no failure")
    given = parser.parse_args()
    return run_suite(given.only, given.seed, given.kills, given.damaged, given.minutes, given.sample)


if __name__ == "__main__":
    sys.exit(main())
