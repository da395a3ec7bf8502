"""Two runs side by side on the same cores, beside one alone: seconds an epoch of each.

    python benchmarks/side_by_side.py                    # needs a machine with nothing else to do
    python benchmarks/side_by_side.py --before OLD/src   # also one run alone of another version

The runs have as many threads as the machine has cores: OMP_NUM_THREADS and the like are not passed on to them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def train(folders: list[Path], epochs: int, source: Path | None = None) -> list[float]:
    """Start a run in each folder at the same moment; the median seconds of the epochs of each, without the first.

    Args:
        source: the folder that has the package, if not the one that Python finds.
    """
    own = {} if source is None else {"PYTHONPATH": str(source.resolve())}
    environment = {name: value for name, value in os.environ.items() if "OMP_" not in name} | own
    options = f"--filters 16 --iterations 30 --epochs {epochs} --val-tasks 2 --test-tasks 0 --device cpu".split()
    command = [sys.executable, "-m", "gradshare", "train", *options, "--out"]
    runs = [subprocess.Popen([*command, folder], stdout=subprocess.DEVNULL, env=environment) for folder in folders]
    codes = [run.wait() for run in runs]
    if any(codes):
        raise SystemExit("a run failed")
    lines = [[json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()] for folder in folders]
    return [statistics.median(line["train_seconds"] for line in own[1:]) for own in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--before", type=Path, help="the folder src of another version")
    given = parser.parse_args()
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            (alone,) = train([Path(folder, "alone")], given.epochs)
            before = train([Path(folder, "before")], given.epochs, given.before) if given.before else []
            pair = train([Path(folder, "first"), Path(folder, "second")], given.epochs)
        each = ", ".join(f"{seconds:.2f} s ({seconds / alone:.2f} times)" for seconds in pair)
        old = "".join(f" (another version {seconds:.2f} s)" for seconds in before)
        print(f"round {number + 1}: alone {alone:.2f} s an epoch{old}; side by side {each}", flush=True)


if __name__ == "__main__":
    main()
