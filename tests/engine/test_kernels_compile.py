"""The GPU programs compile for an H200 on a machine without one; tests/stress/test_kernels.py compiles all variants."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from tests.support.compile_kernels import check_compiled


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the other tests compile them")
def test_every_program_compiles_for_an_h200() -> None:
    check_compiled("bf16", "--once")
