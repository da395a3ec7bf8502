"""What takes long to make is made once, also where several pytest processes want it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first process fills; the others wait for it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not Path(f"{folder}.done").exists():
            folder.mkdir()  # an error if the first process failed
            make(folder)
            Path(f"{folder}.done").touch()
    return folder
