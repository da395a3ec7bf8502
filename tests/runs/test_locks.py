"""Locks: one process at a time, and no lock outlives the process that holds it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradshare as gs
from gradshare.runs import locks
from gradshare.runs.display import Silent
from gradshare.runs.folder import RunFolder
from gradshare.runs.locks import FolderLocked, holder, lock_of, locked
from tests.support.runs import TINY, learner

TAKE = """
import sys, time
from pathlib import Path
from gradshare.runs.locks import FolderLocked, locked
try:
    with locked(Path(sys.argv[1])):
        print("taken", flush=True)
        time.sleep(float(sys.argv[2]))
except FolderLocked as error:
    print(error, flush=True)
"""


def taker(folder: Path, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", TAKE, str(folder), str(seconds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "PATIENCE", 0.05)


def test_a_lock_is_held_while_the_block_lasts(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with locked(folder):
        assert f"process {os.getpid()} on " in str(holder(folder)) and RunFolder(folder).status() == "running"
        with pytest.raises(FolderLocked, match=f"in use by process {os.getpid()} on "), locked(folder):
            pass
        with locked(tmp_path / "new" / "other"):
            pass
    assert holder(folder) is None and list(tmp_path.iterdir()) == []  # not even the folder that it made


def test_a_lock_is_released_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "run"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_living_process_keeps_others_out_and_a_killed_one_does_not(tmp_path: Path) -> None:
    with taker(tmp_path / "run", 60) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        with pytest.raises(FolderLocked, match=f"process {process.pid} "), locked(tmp_path / "run"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert lock_of(tmp_path / "run").exists() and holder(tmp_path / "run") is None
        with locked(tmp_path / "run"):
            assert f"process {os.getpid()} " in str(holder(tmp_path / "run"))
    assert not lock_of(tmp_path / "run").exists()


def test_of_several_at_once_one_gets_the_lock_of_a_dead_process(tmp_path: Path) -> None:
    lock_of(tmp_path / "run").write_text("process 1 on nowhere\n")
    processes = [taker(tmp_path / "run", 2) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert sorted(words == "taken\n" for words in said) == [False, False, True]


def test_whoever_looks_does_not_keep_a_training_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "PATIENCE", 5.0)
    lock = locks.FileLock(lock_of(tmp_path / "run"))
    usual = locks.FileLock.acquire

    def acquire(self: Any, *arguments: Any, **named: Any) -> Any:
        lock.release()  # what `holder` has for a moment, it gives back
        return usual(self, *arguments, **named)

    lock.acquire()
    monkeypatch.setattr(locks.FileLock, "acquire", acquire)
    with locked(tmp_path / "run"):
        pass


def test_two_paths_to_one_folder_have_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    for path in (tmp_path / "elsewhere" / "link", Path("."), Path("../run"), tmp_path / "run"):
        assert lock_of(path) == tmp_path / ".run.lock"


def test_lock_files_of_another_kind(tmp_path: Path) -> None:
    lock_of(tmp_path / "run").write_bytes(b"\xff\x1b[31m")  # damaged, and nobody holds it
    with locked(tmp_path / "run"):
        (tmp_path / ".run.holder").write_bytes(b"\xff\x1b[31m")
        assert "\x1b" not in str(holder(tmp_path / "run"))
        (tmp_path / ".run.holder").unlink()
        assert holder(tmp_path / "run") == "another process"
    assert list(tmp_path.iterdir()) == []


def test_where_no_lock_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_of(tmp_path / "odd").mkdir()
    assert holder(tmp_path / "odd") is None  # who waited for it would wait for ever
    with pytest.raises(gs.UserError, match=r"cannot lock .*odd"), locked(tmp_path / "odd"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(gs.UserError, match=r"cannot lock .*file/\.run\.lock"), locked(tmp_path / "file" / "run"):
        pass

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(locks.FileLock, "acquire", read_only)
    with pytest.raises(gs.UserError, match=r"cannot lock .*Read-only file system"), locked(tmp_path / "run"):
        pass


def test_every_training_locks_its_folder(dataset: gs.Dataset, tmp_path: Path) -> None:
    seen: list[str] = []

    class Second(Silent):
        """Tries to train in the same folder while the first does."""

        def iteration(self, *_: Any) -> None:
            for resume in (True, False, None):
                with pytest.raises(FolderLocked) as refused:
                    gs.train(learner(), dataset, tmp_path / "run", resume, **TINY)
                seen.append(str(refused.value))

    gs.train(learner(), dataset, tmp_path / "run", display=Second(), **TINY | {"epochs": 1, "iterations": 1})
    assert len(seen) == 3 and all(f"run is in use by process {os.getpid()} on " in text for text in seen)
    assert holder(tmp_path / "run") is None and [path.name for path in tmp_path.iterdir()] == ["run"]
