"""Tests and doctests build data sets in a folder of their own, not in the user's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSHARE_DATA", str(tmp_path_factory.mktemp("gradshare-data")))
        yield
