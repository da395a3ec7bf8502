"""A working directory with code of a user's own in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory with the test's MODULE in it, which only the command line makes importable."""
    own: str = request.module.OWN.partition(":")[0]
    (tmp_path / f"{own}.py").write_text(request.module.MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield tmp_path
    sys.modules.pop(own, None)
