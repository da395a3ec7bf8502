"""Every program of the kernels compiles for the GPU that they are written for, where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

SHARED = 227 * 1024  # bytes that a program may have on an H200


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the other tests compile them")
def test_every_program_compiles_for_an_h200(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outside["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, str(script), "tf32", "bf16"], env=outside, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    *programs, names = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted({program["program"] for program in programs}) == names["all"]  # none that nothing launches
    assert max(program["shared"] for program in programs) <= SHARED
    assert all(program["waits"] for program in programs)  # for the end of those before it
    for program in programs:
        if program.get("spilled"):
            print(f"{program['program']} spills {program['spilled']} bytes with {program['constants']}")
