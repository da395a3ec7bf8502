"""Compile for an H200, without one, the programs that a meta-iteration launches.

One meta-iteration runs on the CPU and records every launch instead of executing it; its results are arbitrary. Then
each program is compiled as it was launched, with --once only the first time. Prints a line of JSON for each.

    python -m tests.support.compile_kernels tf32 bf16
    python -m tests.support.compile_kernels bf16 --once
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import gradshare as gs
from gradshare.engine import backends as kernels
from gradshare.engine import implicit
from gradshare.engine.conv4.triton import convolution, device, first_block, head, pooled_norm, sharing
from gradshare.engine.operations import Options

H200 = GPUTarget("cuda", 90, 32)
PROCESSORS = 132
MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (convolution, pooled_norm, first_block, head, sharing, implicit)
}
ROUNDING = "device.factors_program"  # the only program there that the CPU launches
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    program: str  # module.function
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]


def programs() -> dict[str, JITFunction[Any]]:
    return {ROUNDING: device.factors_program} | {
        f"{module_name}.{name}": program
        for module_name, module in MODULES.items()
        for name, program in vars(module).items()
        if isinstance(program, JITFunction) and not name.startswith("_") and program.fn.__module__ == module.__name__
    }


class Recorder:
    """Replaces a program and records how it is launched."""

    def __init__(self, name: str, program: JITFunction[Any], seen: dict[Launch, None]) -> None:
        self.name, self.program, self.seen = name, program, seen

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
            values = dict(zip(self.program.arg_names, args, strict=False)) | named
            special = {p.name for p in self.program.params if not p.do_not_specialize}
            ones = {name for name in special if isinstance(values[name], int) and values[name] == 1}
            known = {p.name for p in self.program.params if p.is_constexpr} | ones
            constants = {name: value for name, value in values.items() if name in known}
            types = {name: type_of(value, name in special) for name, value in values.items() if name not in known}
            parts = (tuple(sorted(part.items())) for part in (types, constants, options))
            self.seen[Launch(self.name, *parts)] = None

        return run


def type_of(value: Any, special: bool) -> str:
    """Triton's name of a type; with `:16` where the compiler may rely on a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return f"{TYPES[value.dtype]}:16"
    return ("i32:16" if special and value % 16 == 0 else "i32") if isinstance(value, int) else "fp32"


def record(precision: Any) -> list[Launch]:
    """Return the launches of one meta-iteration of the paper's network."""
    seen: dict[Launch, None] = {}
    for name, program in programs().items():
        module, _, function = name.partition(".")
        setattr((MODULES | {"device": device})[module], function, Recorder(name, program, seen))
    device.processors = lambda place: PROCESSORS  # type: ignore[assignment]
    device.SideStream.__call__ = lambda self, *used: contextlib.nullcontext()  # type: ignore[assignment,method-assign]
    device.SideStream.join = lambda self: None  # type: ignore[method-assign]
    kernels.lacking = lambda module, adapted: None
    learner = gs.maml(gs.Conv4(), steps=2, sharing=gs.GradientSharing()).to("cpu", precision)
    state, x, y = learner.init(0), torch.rand(2, 5, 3, 84, 84), torch.arange(5).expand(2, -1)
    torch.autograd.grad(
        learner.outer_loss(state, gs.Episodes(x, y, x, y)).loss, list(state.trainable().values()), allow_unused=True
    )
    if precision == "bf16":
        convolutions()
    return list(seen)


def convolutions() -> None:
    """Launch the programs of `implicit.py`, with channels of every kind."""
    for sources, targets in ((8, 64), (48, 48), (64, 128), (512, 512)):
        how = Options([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        x, g, w = (
            torch.empty(4, *size, dtype=torch.bfloat16)
            for size in ((5, sources, 42, 42), (5, targets, 42, 42), (targets, sources, 3, 3))
        )
        implicit.conv(x, w, how, g)
        implicit.images_gradient(g, w, how, x)
        implicit.filters_gradient(g, x, how, w)


def compiled(asked: Launch) -> dict[str, Any]:
    device.OVERLAPS = tl.constexpr(True)  # as on an H200
    program, begun = programs()[asked.program], time.monotonic()
    types, constants = dict(asked.types), dict(asked.constants)
    signature = {name: types.get(name, "constexpr").removesuffix(":16") for name in program.arg_names}
    at = {name: (place,) for place, name in enumerate(program.arg_names)}
    aligned = {at[name]: [["tt.divisibility", 16]] for name, kind in types.items() if kind.endswith(":16")}
    source = ASTSource(program, signature, {at[name]: value for name, value in constants.items()}, aligned)
    kernel = triton.compile(source, target=H200, options=dict(asked.options))
    return {
        "program": asked.program,
        "constants": constants,
        "options": dict(asked.options),
        "shared": kernel.metadata.shared,
        "waits": "griddepcontrol.wait" in kernel.asm["ptx"],
        "ahead": kernel.asm["ptx"].count("cp.async.cg.shared.global"),  # loads of 16 bytes, while it computes
        **registers(kernel.asm["cubin"]),
        "seconds": round(time.monotonic() - begun, 2),
    }


def registers(code: bytes) -> dict[str, int]:
    """Return the numbers of registers and of spilled bytes, if NVIDIA's tool is installed."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    if not os.path.exists(tool):
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(found[1]), "spilled": int(found[2])} if found else {}


def recorded(precision: str) -> list[Launch]:
    """Call `record` in another process, because it changes the modules."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(record, precision).result()


def main() -> None:
    precisions = [word for word in sys.argv[1:] if word != "--once"]
    asked = list(dict.fromkeys(one for precision in precisions for one in recorded(precision)))
    if "--once" in sys.argv:
        asked = list({one.program: one for one in reversed(asked)}.values())
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("fork")) as pool:
        for line in pool.map(compiled, asked):
            print(json.dumps(line), flush=True)
    print(json.dumps({"all": sorted(name for name in programs() if name != ROUNDING or "tf32" in precisions)}))


SHARED = 227 * 1024  # bytes of shared memory that a program may use on an H200


def check_compiled(*words: str) -> None:
    """Compile in another process, without the interpreter; every program must fit, and wait for earlier ones."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    outside["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), outside.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-m", "tests.support.compile_kernels", *words],
            env={**outside, "TRITON_CACHE_DIR": folder}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    *compiled_programs, names = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted({program["program"] for program in compiled_programs}) == names["all"]  # every program is launched
    assert max(program["shared"] for program in compiled_programs) <= SHARED
    assert all(program["waits"] for program in compiled_programs)
    of_all_tasks = [program for program in compiled_programs if program["program"].startswith("implicit.")]
    assert all(program["ahead"] and not program.get("spilled") for program in of_all_tasks)


if __name__ == "__main__":
    main()
