"""Compile for an H200, without a GPU, the programs of the networks of `general.py`, and count what they do.

    PYTHONPATH=src:. python benchmarks/compile_for_gpu.py FOLDER                       # lists of operations to code
    PYTHONPATH=src:. python benchmarks/compile_for_gpu.py FOLDER --only relu --binary  # and on to the GPU's own code

It needs a PyTorch for CUDA and its Triton, but no driver. A network is traced on stand-ins for tensors of a device that
derivatives need no threads for; then they are said to be on the GPU. The code of each program is written to FOLDER. One
line for each program: its own kernels, the bytes that they move, and the calls of other libraries and of our
convolutions; with --binary also registers and spills, after minutes. The last line of a network is an estimate for one
meta-iteration without convolutions and products.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import general
import torch
import triton
from torch._subclasses import FakeTensorMode, fake_tensor

import gradshare as gs
from gradshare.bench import measure
from gradshare.bench.cases import Case
from gradshare.engine import traced
from gradshare.engine.traced import Batch, Given, Traced
from tests.support.compile_kernels import H200, PROCESSORS, SHARED, registers

SPEED, LAUNCH = 4.3e12, 2e-6  # bytes in a second, and seconds for a launch
GPU, STAND_IN = torch.device("cuda", 0), torch.device("lazy")
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=PROCESSORS, warp_size=32, total_memory=140 * 2**30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block_optin=SHARED, L2_cache_size=50 * 2**20,
)  # fmt: skip
CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "synchronize": lambda *device: None,
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_capability": lambda device=None: (9, 0),
    "get_rng_state": lambda *device: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda *state: None,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
}
DRIVER = types.SimpleNamespace(
    get_current_target=lambda: H200, get_current_device=lambda: 0, get_active_torch_device=lambda: GPU,
    get_device_interface=lambda: torch.cuda,
)  # fmt: skip


class Compiler:
    """Takes the place of what compiles lists of operations and kernels, and counts."""

    def __init__(self, folder: Path, binary: bool) -> None:
        self.folder, self.binary, self.compiled = folder, binary, traced.compiled
        self.title = ""
        self.totals: dict[str, tuple[int, int]] = {}  # of each kind of program: kernels and calls, bytes

    def program(self, module: Any, what: str) -> traced.Program:
        kind = next(name for name, meaning in traced.MEANING.items() if meaning == what)
        self.calls, self.bytes, self.resources = Counter[str](), 0, []
        self.compiled(module, what)
        (self.folder / f"{self.title}-{kind}.py").write_text(self.code)
        self.totals[kind] = self.calls.total(), self.bytes
        calls = ", ".join(f"{count} {name}" for name, count in self.calls.most_common())
        print(f"{self.title}-{kind}: {self.bytes / 2**20:,.0f} MiB; {calls}", flush=True)
        for line in sorted(self.resources, key=lambda line: -line[1].get("spilled", 0))[:3]:
            print("   ", *line)
        return lambda values: []

    def nodes(self, nodes: list[Any]) -> None:
        from torch._inductor import ir
        from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

        for node in nodes:
            if isinstance(node, ExternKernelSchedulerNode):
                if not isinstance(node.node, ir.MultiOutput):
                    self.calls[str(node.node.op_overload or node.node.python_kernel_name)] += 1
            elif not isinstance(node, NopKernelSchedulerNode):
                self.calls["kernels"] += 1
                self.bytes += moved(node)

    def kernel(self, name: str, source: str) -> Any:
        if self.binary:
            from torch._inductor.async_compile import _load_triton_kernel_from_source

            kernel = _load_triton_kernel_from_source(name, source)
            kernel.precompile(warm_cache_only=True)
            self.resources += [(name, registers(one.kernel.asm["cubin"])) for one in kernel.compile_results]
        return None


def moved(node: Any) -> int:
    """Bytes that a kernel reads and writes: of a buffer at most what it indexes."""
    indexed: Counter[tuple[bool, str]] = Counter()
    for part in node.get_nodes():
        for writes, found in ((False, part.read_writes.reads), (True, part.read_writes.writes)):
            for access in found:
                indexed[writes, access.name] += access.numbytes_hint()
    total = 0
    for writes in (False, True):
        whole = node.get_read_write_buffer_accesses(include_reads=not writes, include_writes=writes)
        for name, sizes in whole.items():
            total += min(sum(sizes) if isinstance(sizes, list) else sizes, indexed[writes, name])
    return total


@contextlib.contextmanager
def pretended(compiler: Compiler) -> Iterator[None]:
    """As if there were an H200."""
    with contextlib.ExitStack() as stack:
        for name, value in CUDA.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        triton.runtime.driver.set_active(DRIVER)
        inductor = traced._inductor()
        from torch._inductor import async_compile, scheduler
        from torch._inductor.codecache import PyCodeCache
        from torch._inductor.runtime import triton_helpers

        generate, write = scheduler.Scheduler.codegen, PyCodeCache.write.__func__
        from_tensor, trace, copy = FakeTensorMode.from_tensor, traced.traced, torch.Tensor.copy_

        def codegen(self: Any) -> Any:
            compiler.nodes(self.nodes)
            return generate(self)

        def written(cls: Any, source: str, *rest: Any) -> Any:
            compiler.code = source
            return write(cls, source, *rest)

        for owner, name, value in (
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (fake_tensor, "init_gpu_context", lambda device: None),
            (FakeTensorMode, "from_tensor", lambda mode, value, **named: (
                value if isinstance(value, fake_tensor.FakeTensor) else from_tensor(mode, value, **named))),
            (torch.Tensor, "copy_", lambda to, value, *rest: to if to.is_cuda else copy(to, value, *rest)),
            (scheduler.Scheduler, "codegen", codegen),
            (PyCodeCache, "write", classmethod(written)),
            (async_compile.AsyncCompile, "triton", lambda self, *given, **named: compiler.kernel(*given[:2])),
            (traced, "traced", lambda *given: on_gpu(trace, *given)),
            (traced, "compiled", compiler.program),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(inductor.config.patch(force_disable_caches=True, use_static_triton_launcher=False))
        yield


def on_gpu(trace: Any, *given: Any) -> Any:
    """A list of operations as it would be on a GPU, traced on the stand-in for one."""
    with patch.object(torch.Tensor, "is_cuda", property(lambda self: True)):
        module = trace(*given)

    def moved_there(value: Any) -> Any:
        if isinstance(value, torch.device):
            assert value == STAND_IN, f"on a GPU this would be on {value}"
            return GPU
        if not isinstance(value, torch.Tensor):
            return value
        assert value.device.type == STAND_IN.type
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)

    with next(iter(module.graph.nodes)).meta["val"].fake_mode:
        for node in module.graph.nodes:
            assert node.op != "get_attr", "a constant, which a graph would copy from the CPU"
            node.args, node.kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), moved_there)
            node.meta = {"val": torch.utils._pytree.tree_map(moved_there, node.meta.get("val"))}
    module.recompile()
    return module


def compile_all(case: Case, precision: str) -> None:
    sharing = gs.GradientSharing()
    learner = measure.METHODS[case.method](measure.network(case), inner_lr=0.1, steps=case.steps, sharing=sharing)
    low = torch.bfloat16 if precision == "bf16" else None
    network = Traced(learner.module, learner.adapted, low, precision == "tf32", learner.rule.any_layout)
    vars(learner)["network"], state = network, learner.init()
    start, shared = network.start(learner._start(state)), learner._shared_of_steps(state)[0]

    def stand_in(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=STAND_IN)

    def batch(n: int) -> Batch:
        x = stand_in(case.tasks, n, *case.image)
        return Batch(Given(x), stand_in(case.tasks, n, kind=torch.int64), None, learner.loss)

    with FakeTensorMode():
        fast = {name: stand_in(case.tasks, *value.shape) for name, value in start.items()}
        shared = {name: stand_in(*value.shape) for name, value in shared.items()}
        support, query = batch(case.ways * case.shots), batch(case.ways * case.queries)
    network._halves(fast, shared, support)
    network._program("scores", fast, shared, query)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--only", action="append", default=[], help="a network or method; several times for several")
    arguments.add_argument("--precision", choices=("bf16", "tf32"), default="bf16")
    arguments.add_argument("--binary", action="store_true", help="compile the kernels too")
    given = arguments.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    context, compiler = general.Context(given.folder, "cuda", 1, 0), Compiler(given.folder, given.binary)
    cases = [*general.resnet_cases(context), *general.user_cases(context), *general.method_cases(context)[1:]]
    with pretended(compiler):
        for case in cases:
            name = case.method if case.backbone == "conv4" else case.backbone.partition(":")[2]
            if given.only and name not in given.only:
                continue
            compiler.title = f"{name}-{case.tasks}x{case.shots}-{given.precision}"
            compile_all(case, given.precision)
            times = {"gradient": case.steps, "product": case.steps, "scores": 1}
            launches, size = (sum(times[kind] * all_[i] for kind, all_ in compiler.totals.items()) for i in (0, 1))
            line = f"{launches:,} launches, {size / 2**30:.1f} GiB, {1e3 * (launches * LAUNCH + size / SPEED):.1f} ms"
            print(f"{compiler.title}, a meta-iteration: {line}", flush=True)


if __name__ == "__main__":
    main()
