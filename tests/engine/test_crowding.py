"""While other processes want the cores, idle OpenMP threads sleep; results do not change."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has another OpenMP library there")

PROGRAM = """
import os, resource, time
import torch
from gradshare.engine import crowding

switches = 0
usage = resource.getrusage
resource.getrusage = lambda who: type("Usage", (), {"ru_nivcsw": switches})  # as the system would count them
crowding.INTERVAL = 0.05

def threads(wanted):
    for _ in range(100):
        time.sleep(0.05)
        if (found := len(os.listdir("/proc/self/task"))) == wanted:
            break
    return found

torch.set_num_threads(2)
x = torch.rand(300, 300, 30)
before = x.exp().sum(0)
crowding.sleep_when_crowded(cores=3)
crowding.sleep_when_crowded(cores=3)  # once is enough
alone = threads(len(os.listdir("/proc/self/task")))

import threading
def crowd():
    global switches
    while busy:
        switches += 10_000
        time.sleep(0.01)
busy = True
other = threading.Thread(target=crowd)
other.start()
assert threads(alone + 1 + 4) == alone + 1 + 4, "the crowd itself, and a team of one thread more than there are cores"
assert torch.equal(x.exp().sum(0), before)
busy = False
other.join()
assert threads(alone) == alone, "the team has ended"
"""


def test_a_team_sleeps_beside_the_others_while_the_cores_are_crowded() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
