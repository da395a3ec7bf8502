"""Locks: one process at a time, and no lock outlives the process that holds it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gradshare import locks
from gradshare.locks import Held, holder, lock_of, locked

TAKE = """
import sys, time
from pathlib import Path
from gradshare.locks import Held, locked
try:
    with locked(Path(sys.argv[1])):
        print("taken", flush=True)
        time.sleep(float(sys.argv[2]))
except Held as error:
    print(error, flush=True)
"""


def taker(folder: Path, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", TAKE, str(folder), str(seconds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def forge(folder: Path, **different: Any) -> Path:
    """A lock as another process would have left it."""
    path = lock_of(folder)
    path.write_text(json.dumps({**locks._own()._asdict(), **different}))
    return path


def test_a_lock_is_there_while_the_block_lasts(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with locked(folder):
        found = holder(folder)
        assert found is not None and found.pid == os.getpid() and found.here
        with pytest.raises(Held, match=f"is in use by process {os.getpid()} on "), locked(folder):
            pass
        with locked(tmp_path / "new" / "other"):
            pass
    assert holder(folder) is None and list(tmp_path.iterdir()) == []  # not even the folder that it made


def test_a_lock_is_released_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "run"):
        raise ZeroDivisionError
    assert not lock_of(tmp_path / "run").exists()


def test_a_living_process_keeps_others_out_and_a_killed_one_does_not(tmp_path: Path) -> None:
    with taker(tmp_path / "run", 60) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        with pytest.raises(Held, match=f"process {process.pid} "), locked(tmp_path / "run"):
            pass
        process.send_signal(signal.SIGKILL)
        time.sleep(0.2)  # dead and not yet waited for
        assert lock_of(tmp_path / "run").exists()
        with locked(tmp_path / "run"):
            assert holder(tmp_path / "run") is not None
    assert not lock_of(tmp_path / "run").exists()


def test_of_many_at_once_one_gets_a_stale_lock(tmp_path: Path) -> None:
    forge(tmp_path / "run", boot="before the power cut")
    processes = [taker(tmp_path / "run", 2) for _ in range(8)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert sorted(words == "taken\n" for words in said) == [False] * 7 + [True]


@pytest.mark.parametrize(
    ("different", "stale"),
    [
        ({}, False),
        ({"born": 1}, True),  # the number belongs to another process by now
        ({"pid": 2**22 + 1}, True),  # no such process
        ({"boot": "an earlier one"}, True),
        ({"host": "elsewhere"}, False),
        ({"namespace": "pid:[1]", "pid": 2**22 + 1}, False),  # another container
    ],
)
def test_which_locks_are_stale(tmp_path: Path, different: dict[str, Any], stale: bool) -> None:
    forge(tmp_path / "run", **different)
    assert (holder(tmp_path / "run") is None) == stale


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"pid": 1}'])
def test_another_machines_lock_or_a_damaged_one_lasts_as_long_as_it_is_renewed(
    tmp_path: Path, content: str | None
) -> None:
    path = forge(tmp_path / "run", host="elsewhere")
    if content is not None:
        path.write_text(content)
    with pytest.raises(Held), locked(tmp_path / "run"):
        pass
    old = time.time() - locks.LEASE - 1
    os.utime(path, (old, old))
    with locked(tmp_path / "run"):
        pass
    assert not path.exists()


def test_a_lock_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "RENEWAL", 0.02)
    with locked(tmp_path / "run"):
        os.utime(lock_of(tmp_path / "run"), (0, 0))
        until = time.monotonic() + 10
        while lock_of(tmp_path / "run").stat().st_mtime == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert lock_of(tmp_path / "run").stat().st_mtime > 0


def test_a_lock_that_another_took_over_is_left_alone(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        forge(tmp_path / "run", host="elsewhere")
    assert lock_of(tmp_path / "run").exists()
