"""Tests and doctests build data sets in a folder of their own, not in the user's cache.

Without a GPU the kernels run under Triton's interpreter, which has to be chosen before anything imports Triton.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is not None:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as it is; Triton 3.9 warns where nothing is said
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
else:
    collect_ignore_glob = ["src/gradshare/engine/conv4/triton/*", "src/gradshare/engine/implicit.py"]  # import Triton


@pytest.fixture(scope="session", autouse=True)
def own_data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSHARE_DATA", str(tmp_path_factory.mktemp("gradshare-data")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SHARD=2/8 runs the third of eight parts, so that eight processes can share the tests, and what they compile."""
    if "SHARD" in os.environ:
        part, parts = map(int, os.environ["SHARD"].split("/"))
        items[:] = items[part::parts]
