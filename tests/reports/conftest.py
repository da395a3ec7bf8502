"""Folders of runs that several tests read, and reports without the slow drawing of images."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradshare.reports.figures
from tests.support.reports import make_seeds, make_trio


@pytest.fixture
def trio(tmp_path: Path) -> Path:
    return make_trio(tmp_path / "comparison")


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    return make_seeds(tmp_path / "seeds")


@pytest.fixture
def images() -> None:
    """For tests that want the images to be drawn."""


@pytest.fixture(autouse=True)
def no_images(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "images" not in request.fixturenames:
        monkeypatch.setattr(gradshare.reports.figures, "image", lambda *_: b"")
