"""Five minutes of `make chaos`: kills, signals in every phase, full and read-only disks, damage, clocks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the suite looks into /proc")

BREAK = """
import os, sys
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
from gradshare.runs import checkpoints
checkpoints.verify_checksum = lambda content: {name: value for name, value in content.items() if name != "sha256"}
checkpoints.sha256 = lambda content: "always the same"
from tests.stress.chaos.suite import run_suite
sys.exit(run_suite(["damage"], 0, 0, 300, 5.0, False))
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize(
    ("parts", "least"),
    [
        (
            ["kills", "signals", "clocks", "processes"],
            {"SIGKILL at": 5, "runs killed": 2, "SIGTERM": 5, "SIGINT": 5, "Ctrl-C twice": 2, "clock jumps": 2},
        ),
        (
            ["full-disk", "read-only", "damage", "cut-files"],
            {"full disk from": 5, "read-only from": 5, "damaged files": 20, "metrics.jsonl cut": 2},
        ),
    ],
    ids=["processes", "files"],
)
def test_every_promise_is_kept(parts: list[str], least: dict[str, int]) -> None:
    result = run("-m", "tests.stress.chaos", "--sample", "--minutes", "2.5", "--only", *parts)
    assert result.returncode == 0 and "every promise was kept" in result.stdout, result.stdout + result.stderr
    table = re.findall(r"^ +([\d,]+) +([\d,]+)  (.+)$", result.stdout, re.MULTILINE)
    for what, number in least.items():
        kept = sum(int(kept.replace(",", "")) for _, kept, row in table if row.startswith(what))
        assert kept >= number, result.stdout
    assert all(tried == kept for tried, kept, _ in table)


def test_a_promise_that_is_broken_is_found() -> None:
    """With checksums that nobody compares, the suite fails, and names the damage and the file."""
    result = run("-c", BREAK)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"BROKEN: damaged files: .*\.(safetensors|json): ", result.stdout)
    assert "again: python -m tests.stress.chaos --only damage --seed 0" in result.stdout
    kept = re.search(r"the folder: (.+)/try-", result.stdout)
    assert kept is not None and Path(kept[1], "whole-0").is_dir()  # to be looked at
    shutil.rmtree(kept[1])
