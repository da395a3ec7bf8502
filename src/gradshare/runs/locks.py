"""Locks: a run folder is trained by one process at a time, on this machine or on another that shares the disk.

The lock of `runs/one` is the file `runs/.one.lock`, which `filelock` holds (the system call flock) while the process
lives; `runs/.one.holder` says who that is. The system frees the lock when the process ends, however it ends. On NFS the
server keeps it: a machine that crashed or lost its network holds it until the server gives up waiting (NFS 4: about 90
seconds). Where a disk has no flock, filelock uses the existence of the file instead, and warns: a lock that a dead
process of another machine left there has to be deleted by hand.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from gradshare.errors import UserError, printable
from gradshare.files import tidy

PATIENCE = 1.0  # seconds: whoever asks `holder` has the lock for a moment


class FolderLocked(UserError):
    """Another process, which is alive, trains in the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within the block this process alone works on `folder`, which need not exist yet; else `FolderLocked`."""
    path = lock_of(folder)
    with tidy(path.parent), ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.callback(_release, path, _acquire(path))
            since = time.strftime("%Y-%m-%d %H:%M:%S")  # not in the lock file, which filelock before 4.0 may empty
            text = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
            _text_file(path).write_text(text, encoding="utf-8")
        except Timeout:
            raise FolderLocked(f"{folder} is in use by {_text(path)} (lock {path})") from None
        except OSError as error:
            raise UserError(f"cannot lock {folder}: {error.strerror}: {path}") from error
        yield


def _acquire(path: Path) -> FileLock:
    lock = FileLock(path)
    lock.acquire(timeout=PATIENCE)
    while not path.exists():  # the holder before us removed it while we waited: this lock guards no name
        lock.release()
        lock.acquire(timeout=PATIENCE)
    return lock


def _release(path: Path, lock: FileLock) -> None:
    for file in (_text_file(path), path):
        file.unlink(missing_ok=True)  # before the release: afterwards they may be another process's
    lock.release()


def lock_of(folder: Path) -> Path:
    """The lock file of a folder, whatever path leads there. It is beside the folder, which may have to be empty."""
    parent, name = os.path.split(os.path.realpath(folder))
    return Path(parent) / f".{name}.lock"


def holder(folder: Path) -> str | None:
    """Who works on a folder, in words; None if nobody does."""
    path = lock_of(folder)
    if not path.exists():
        return None
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except (Timeout, PermissionError):  # held; or of another user, and then it cannot be tried
        return _text(path) if path.exists() else None
    except OSError:  # not a file, say: `locked` raises an error that names it
        return None
    lock.release()  # a dead process left the file
    return None


def _text(path: Path) -> str:
    """Who holds a lock, in words."""
    with suppress(OSError):
        text = _text_file(path).read_text(encoding="utf-8", errors="replace")
        return printable(text[:200].strip()) or "another process"
    return "another process"


def _text_file(path: Path) -> Path:
    return path.with_suffix(".holder")
