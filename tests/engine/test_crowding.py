"""While other processes want the cores, idle OpenMP threads sleep; results do not change."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has another OpenMP library there")

PROGRAM = """
import os, resource, threading, time
import torch
from gradshare.engine import crowding

crowded = False
switches, counted = 0.0, time.monotonic()

def count(who):  # as the system counts them: at most 80 a second alone, and as few as 140 beside another run
    global switches, counted
    now = time.monotonic()
    switches, counted = switches + (140 if crowded else 80) * (now - counted), now
    return type("Usage", (), {"ru_nivcsw": switches})

resource.getrusage = count
crowding.INTERVAL = 0.2

def threads(wanted):
    for _ in range(400):
        time.sleep(0.05)
        if wanted(found := len(os.listdir("/proc/self/task"))):
            break
    return found

torch.set_num_threads(2)
x = torch.rand(300, 300, 30)
before = x.exp().sum(0)
crowding.sleep_when_crowded(cores=7)
crowding.sleep_when_crowded(cores=7)  # once is enough
time.sleep(0.5)
alone = len(os.listdir("/proc/self/task"))
crowded = True
assert threads(lambda found: found >= alone + 8) == alone + 8, "a team of one thread more than there are cores"
assert torch.equal(x.exp().sum(0), before)
crowded = False
assert threads(lambda found: found <= alone) == alone, "the team has ended"
"""


def test_a_team_sleeps_beside_the_others_while_the_cores_are_crowded() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
