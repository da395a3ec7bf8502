"""Measure compiled programs for any network on one GPU, beside higher and TorchOpt. Needs no installed gradshare.

    PYTHONPATH=src python benchmarks/general.py FOLDER --call 1      # the speed of every network, at most 9.5 minutes
    PYTHONPATH=src python benchmarks/general.py FOLDER --call 2      # first steps, exactness, learning, tilings
    PYTHONPATH=src python benchmarks/general.py FOLDER --tiny        # both on a CPU, small: does it run?

Call 1 begins by compiling all programs at once, each network in a process of its own; the other parts then find them in
the caches. Results are written to FOLDER after every case. A part that uses up its time leaves out the rest, and its
file says so. A part that fails is reported, and the others run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.bench import measure
from gradshare.bench.cases import RIVALS, Case
from gradshare.bench.measure import Timing, begin, run
from gradshare.bench.results import Failure, Measurement, Results, line_of
from gradshare.engine import convolution as operators
from gradshare.engine import traced

Image = tuple[int, int, int]
TINY = False


# Networks, each called with (ways, image).


def resnet(ways: int, image: Image) -> nn.Module:
    """ResNet-12 of the literature's smaller widths."""
    return gs.ResNet12(ways, (4, 6, 8, 10) if TINY else (64, 128, 256, 512), image)


def _blocks(ways: int, image: Image, block: Callable[[int, int], list[nn.Module]], side: int) -> nn.Module:
    filters = 4 if TINY else 48
    layers = [layer for inputs in (image[0], filters, filters, filters) for layer in block(inputs, filters)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(filters * side * side, ways))


def relu(ways: int, image: Image) -> nn.Module:
    """Conv-4 with ReLU, as a user writes it."""

    def block(inputs: int, filters: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, filters, 3, padding=1), nn.BatchNorm2d(filters), nn.ReLU(), nn.MaxPool2d(2)]

    return _blocks(ways, image, block, image[1] // 16)


def stride(ways: int, image: Image) -> nn.Module:
    """Conv-4 with a stride instead of pooling."""

    def block(inputs: int, filters: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, filters, 3, stride=2, padding=1), nn.BatchNorm2d(filters), nn.ReLU()]

    return _blocks(ways, image, block, -(-image[1] // 16))


def groupnorm(ways: int, image: Image) -> nn.Module:
    """Conv-4 with group norm."""

    def block(inputs: int, filters: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, filters, 3, padding=1), nn.GroupNorm(4, filters), nn.ReLU(), nn.MaxPool2d(2)]

    return _blocks(ways, image, block, image[1] // 16)


# Parts


class Part(NamedTuple):
    name: str
    call: int
    seconds: float
    run: Callable[[Context], None]


class Context(NamedTuple):
    folder: Path
    device: str
    iterations: int
    end: float

    @property
    def left(self) -> float:
        """Seconds of the part that are left, at least one."""
        return max(1.0, self.end - time.monotonic())

    def time(self, cases: list[Case], file: str, **more: Any) -> None:
        """Time cases and write them to a file; those for which no time is left are noted."""
        results = begin_once(self.device)
        results = Results(results.machine, results.ceilings)
        for case in cases:
            if time.monotonic() > self.end:
                results.failures.append(Failure(case, "left out: its part had used its time"))
                show(results.failures[-1])
                results.save(self.folder / file)
                continue
            run([case], results, self.folder / file, show, iterations=self.iterations, seconds=4, **more)


_begun: dict[str, Results] = {}


def begin_once(device: str) -> Results:
    if device not in _begun:
        sizes = {"copied": 2**16, "width": 16, "repeats": 1} if TINY else {}
        _begun[device] = begin(device, ("float32",) if device == "cpu" else ("bf16", "tf32"), **sizes)
    return _begun[device]


def show(outcome: Measurement | Failure) -> None:
    line = line_of(outcome)
    if isinstance(outcome, Measurement):
        low, high = outcome.quartiles
        memory = "" if outcome.peak_allocated is None else f", {outcome.peak_allocated / 2**30:.2f} GiB"
        line += f" ({low:.1f} to {high:.1f}), first step {outcome.first_step_seconds:.1f} s{memory}"
    print(line, flush=True)


def case_of(context: Context, backbone: str, tasks: int, shots: int, **more: Any) -> Case:
    size = 16 if TINY else 84
    fields: dict[str, Any] = {"tasks": tasks, "shots": shots, "image": (3, size, size), "device": context.device}
    if backbone != "conv4":
        fields["backbone"] = f"general:{backbone}"
    if TINY:
        fields |= {"tasks": min(tasks, 2), "queries": 2, "steps": 2} | ({"filters": 3} if backbone == "conv4" else {})
    return Case(**{**fields, **more})


def best(context: Context) -> dict[str, Any]:
    """The fast path of a device: bf16 as a CUDA graph; on a CPU, for a trial, compiled programs."""
    if context.device == "cpu":
        return {"engine": "compiled", "precision": "float32"}
    return {"engine": "graph", "precision": "bf16"}


def in_tf32(context: Context) -> dict[str, Any]:
    return best(context) | ({} if context.device == "cpu" else {"precision": "tf32"})


def theirs(context: Context, backbone: str, tasks: int, shots: int) -> list[Case]:
    precision = "float32" if context.device == "cpu" else "tf32"
    common = {"arm": "original", "precision": precision}
    return [case_of(context, backbone, tasks, shots, library=library, **common) for library in RIVALS]


def resnet_cases(context: Context) -> list[Case]:
    return [case_of(context, "resnet", tasks, shots, **best(context)) for tasks, shots in ((4, 1), (2, 5))]


def user_cases(context: Context) -> list[Case]:
    return [case_of(context, name, 5, 5, **best(context)) for name in ("relu", "stride", "groupnorm")]


def method_cases(context: Context) -> list[Case]:
    methods = ("maml", "anil", "boil", "adaptnorm", "momentum", "sparsemaml")  # the last two: at most 1.3 times maml
    return [case_of(context, "conv4", 5, 5, method=method, **best(context)) for method in methods]


def prepare(context: Context) -> None:
    """Compile the programs of all cases, each network and precision in a process of its own, and run none of them."""
    ours = [[case, replace(case, checkpoint=True)] for case in resnet_cases(context)]
    ours += [[case] for case in user_cases(context)]
    groups = ours + [[replace(case, **in_tf32(context)) for case in group[:1]] for group in ours]
    groups += [[case] for case in method_cases(context)[1:]]
    groups = groups[:1] if TINY else groups
    started = [(group[0], child(f"general.compile_only({group!r})")) for group in groups]
    for case, process in started:
        try:
            errors = process.communicate(timeout=context.left)[1]
            print(f"compiled {case.backbone} {case.method} {case.precision}: {errors[-500:] or 'done'}", flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"compiled {case.backbone} {case.method} {case.precision}: not in time", flush=True)


def compile_only(cases: list[Case]) -> None:
    """Take steps in which programs are compiled and give zeros."""
    compiled = traced.compiled

    def compiled_only(module: Any, what: str) -> traced.Program:
        compiled(module, what)
        outputs = [node.meta["val"] for node in module.graph.output_node().args[0]]
        return lambda values: [torch.zeros(one.shape, dtype=one.dtype, device=values[0].device) for one in outputs]

    traced.compiled = compiled_only
    for case in cases:
        Timing(replace(case, engine="eager") if case.engine == "graph" else case, 1)


def child(code: str, caches: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Another Python that runs a line of code with this file as `general`."""
    begin = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import general"
    size = "with general.small():" if TINY else "if True:"
    lines = [begin, "from gradshare.bench.cases import Case", "from gradshare.bench.measure import Timing", size]
    lines.append(f"    {code}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)], env=os.environ | (caches or {}), text=True, **pipes
    )


def resnets(context: Context) -> None:
    context = context._replace(iterations=min(context.iterations, 30))  # a step of the rivals takes most of a second
    ours, graph = resnet_cases(context), {"engine": "graph" if context.device != "cpu" else "eager"}
    kept = [replace(case, checkpoint=True) for case in ours]
    tf32 = [replace(case, **in_tf32(context)) for case in ours]
    usual = [replace(case, **graph, precision="float32") for case in ours]
    rivals = [case for tasks, shots in ((4, 1), (2, 5)) for case in theirs(context, "resnet", tasks, shots)]
    context.time([*ours, *kept, *rivals, *tf32, *usual], "general-resnet.json")


def users(context: Context) -> None:
    context, ours = context._replace(iterations=min(context.iterations, 50)), user_cases(context)
    rivals = [case for name in ("relu", "stride", "groupnorm") for case in theirs(context, name, 5, 5)]
    context.time([*ours, *rivals, *(replace(case, **in_tf32(context)) for case in ours)], "general-users.json")


def methods(context: Context) -> None:
    """gs.Conv4 with what the kernels do not know, beside maml on the kernels."""
    context.time(method_cases(context), "general-methods.json")


def profiles(context: Context) -> None:
    """Which kernels take the time of a step, operation by operation: what to make faster next."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if context.device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for case in (*resnet_cases(context), *user_cases(context), *method_cases(context)[:2]):
        if time.monotonic() > context.end:
            return
        timing = Timing(case if context.device == "cpu" else replace(case, engine="eager"), 1)
        with torch.profiler.profile(activities=activities) as profile:
            timing.block()
        order = "self_cpu_time_total" if context.device == "cpu" else "self_cuda_time_total"
        name = f"profile-{case.backbone.rpartition(':')[-1]}-{case.method}-{case.tasks}x{case.shots}.txt"
        table = profile.key_averages().table(sort_by=order, row_limit=50, max_name_column_width=100)
        (context.folder / name).write_text(table)
        print(f"{name}: {1000 * timing.times[-1]:.1f} ms", flush=True)


def streams(context: Context) -> None:
    """Convolutions of all tasks at once; a call of PyTorch's for each task, on several streams; cuDNN's own choice."""
    cases = [case_of(context, name, *sizes, **best(context)) for name, sizes in VARIED.items()]
    usual, build = (operators.AT_ONCE, operators.STREAMS), measure.build
    measure.build = cache(build)  # the same learner each time, whose programs are there
    try:
        for name, at_once, count, timed in WAYS:
            print(f"-- {name}", flush=True)
            operators.AT_ONCE, operators.STREAMS, torch.backends.cudnn.benchmark = at_once, count, timed
            context.time(cases, f"general-{name}.json")
    finally:
        (operators.AT_ONCE, operators.STREAMS), measure.build = usual, build
        torch.backends.cudnn.benchmark = False


# Whether all tasks at once; how many streams else; whether cuDNN times its kernels.
WAYS = (
    ("at-once", True, 4, False),
    ("streams-4", False, 4, False),
    ("streams-1", False, 1, False),
    ("cudnn-benchmark", False, 4, True),
)
VARIED = {"resnet": (4, 1), "relu": (5, 5)}


def tilings(context: Context) -> None:
    """gs.Conv4 on the kernels, with the two tilings for small batches and without; each in a process of its own."""
    if context.device == "cpu":
        return
    for small in (True, False, True):
        code = f"from gradshare.engine.conv4.triton import device; device.SMALL_BATCH_TILES = {small}; " + TILED
        command = [sys.executable, "-c", code, str(context.folder), str(small)]
        subprocess.run(command, check=True, timeout=context.left)


TILED = """
import sys
from pathlib import Path
from gradshare.bench.cases import PAPER, SHAPES, Case
from gradshare.bench.measure import begin, run
from gradshare.bench.results import line_of
results = begin("cuda", ("bf16",))
cases = [Case(engine="graph", precision="bf16", device="cuda", **SHAPES[name]) for name in PAPER]
path = Path(sys.argv[1]) / f"general-tiles-{sys.argv[2]}.json"
for case in cases:
    run([case], results, path, lambda one: print(sys.argv[2], line_of(one), flush=True), iterations=300, seconds=4)
""".strip()


def first_steps(context: Context) -> None:
    """Seconds to the end of the first meta-iteration, with nothing cached, and then in a second process."""
    found = {}
    for backbone in ("resnet", "conv4"):
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            for state in ("cold", "cached"):
                case = case_of(context, backbone, 4 if backbone == "resnet" else 5, 1, **best(context))
                started = time.monotonic()
                process = child(f"print(Timing({case!r}, each=1).first_step_seconds)", caches)
                try:
                    out, errors = process.communicate(timeout=context.left)
                except subprocess.TimeoutExpired:
                    process.kill()
                    out, errors = "", "not in time"
                seconds = (
                    {"first step": float(out.split()[-1]), "process": time.monotonic() - started} if out else errors
                )
                found[f"{backbone}, {state}"] = seconds
                print(f"first step, {backbone}, {state}: {seconds}", flush=True)
                write(context, "general-first-steps.json", found)


class Row(NamedTuple):
    """A row of the table of exactness: our error beside PyTorch's."""

    ways: int
    shots: int
    tasks: int
    filters: int
    image: Image
    steps: int
    rate: float


ROWS = (
    Row(5, 1, 5, 48, (3, 84, 84), 5, 0.01),
    Row(7, 3, 3, 32, (3, 64, 64), 3, 0.05),
    Row(20, 2, 2, 64, (1, 28, 28), 2, 0.4),
    Row(4, 2, 3, 40, (3, 100, 68), 4, 0.02),
)
TINY_ROW = Row(3, 1, 2, 4, (1, 16, 16), 2, 0.05)


def errors(row: Row, seed: int, device: str, ours: bool = False) -> dict[str, float]:
    """The relative error of a meta-gradient in each precision, by PyTorch and by us; random images, sharing.

    Args:
        ours: PyTorch and our kernels only. Else, in the first five seeds of the paper's setting, compiled programs too.
    """
    draw = torch.Generator().manual_seed(seed)
    sizes = [(row.tasks, row.ways * each, *row.image) for each in (row.shots, 15 if not TINY else 2)]
    images = [torch.rand(size, generator=draw) for size in sizes]
    labels = [torch.arange(row.ways).repeat(size[1] // row.ways).expand(row.tasks, -1) for size in sizes]
    episodes = gs.Episodes(images[0], labels[0], images[1], labels[1])
    options = {"inner_lr": row.rate, "steps": row.steps, "sharing": gs.GradientSharing()}
    wide = gs.maml(gs.Conv4(row.ways, row.filters, row.image).double(), **options).to(device)
    learner = gs.maml(gs.Conv4(row.ways, row.filters, row.image), **options)
    state = learner.init(seed).to(device)
    exact_state = wide.init()
    for name, tensor in exact_state.trainable().items():
        tensor.data.copy_(state.trainable()[name].data)
    exact = gradient(wide, exact_state, episodes.to(device, torch.float64))
    here, found = episodes.to(device), {}
    on_gpu = device != "cpu"
    ways: dict[str, tuple[gs.Learner, bool]] = {"PyTorch float32": (learner.to(device), False)}
    if on_gpu:
        general = type("General", (gs.Conv4,), {})(row.ways, row.filters, row.image)  # the kernels do not know it
        compiled = gs.maml(general, **options)
        ways |= {"PyTorch TF32": (learner.to(device), True), "our tf32": (learner.to(device, "tf32"), True)}
        ways |= {"our bf16": (learner.to(device, "bf16"), True), "compiled bf16": (compiled.to(device, "bf16"), True)}
        ways |= {"compiled tf32": (compiled.to(device, "tf32"), True)}
    for name, (one, tf32) in ways.items():
        if "compiled" in name and (ours or seed >= 5 or row != ROWS[0]):  # a program for each row takes a while
            continue
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        found[name] = ((gradient(one, state, here) - exact).norm() / exact.norm()).item()
    return found


def gradient(learner: gs.Learner, state: gs.MetaState, episodes: gs.Episodes) -> Tensor:
    loss = learner.outer_loss(state, episodes).loss
    parts = torch.autograd.grad(loss, list(state.trainable().values()), materialize_grads=True)
    return torch.cat([part.flatten().double() for part in parts])


def exactness(context: Context, seeds: int = 20) -> None:
    table: list[dict[str, Any]] = []
    for row in (TINY_ROW,) if TINY else ROWS:
        found: list[dict[str, float]] = []
        for seed in range(2 if TINY else seeds):
            if time.monotonic() > context.end:
                break
            found.append(errors(row, seed, context.device))
        names = list(dict.fromkeys(name for one in found for name in one))
        medians = {name: median(one[name] for one in found if name in one) for name in names}
        table.append({"row": row._asdict(), "seeds": len(found), "median": medians, "all": found})
        print(f"{tuple(row)}, {len(found)} seeds: " + ", ".join(f"{k} {v:.4f}" for k, v in medians.items()), flush=True)
        write(context, "general-exactness.json", table)


def precisions(context: Context) -> None:
    """Exactness here, and at the same time the same training in each precision, since neither is timed."""
    names = ("bf16", "float32") if context.device == "cpu" else ("bf16", "tf32", "float32")
    seconds = context.left - 5
    learners = {name: child(f"general.learn({name!r}, {context.device!r}, {seconds})") for name in names}
    try:
        exactness(context._replace(end=context.end - 20))
    finally:
        found: dict[str, Any] = {}
        for name, process in learners.items():
            try:
                out, errors = process.communicate(timeout=context.left + 20)
            except subprocess.TimeoutExpired:
                process.kill()
                out, errors = "", "not in time"
            found[name] = json.loads(out.splitlines()[-1]) if out else errors[-2000:]
            print(f"learning, {name}: {found[name]}", flush=True)
            write(context, "general-learning.json", found)


def learn(precision: Any, device: str, seconds: float) -> None:
    """Train from seed 0; print mean loss and accuracy of every tenth of the iterations."""
    end, iterations = time.monotonic() + seconds, 4 if TINY else 1000
    dataset = gs.load_dataset("glyphs")
    dataset = dataset if device == "cpu" else dataset.to(device)
    widths = (2, 3, 4, 5) if TINY else (64, 128, 256, 512)
    learner = gs.maml(gs.ResNet12(5, widths, dataset.image), inner_lr=0.05, steps=2 if TINY else 5)
    learner = learner.to(device, precision)
    state = learner.init(0)
    step = gs.compiled_step(learner, state, gs.optimiser(state, 1e-3))
    losses, right = [], []
    for iteration in range(iterations):
        if time.monotonic() > end:
            break
        tasks = dataset.sample("train", gs.Shape(5, 1, 15 if not TINY else 2), 2, (iteration,)).to(device)
        outcome = step(tasks)
        losses.append(outcome.loss.detach().clone())
        right.append(outcome.accuracy.mean().clone())
    each = max(1, iterations // 10)
    means = [[torch.stack(v[i : i + each]).mean().item() for i in range(0, len(v), each)] for v in (losses, right)]
    print(json.dumps({"iterations": len(losses), "loss": means[0], "accuracy": means[1]}))


def write(context: Context, name: str, content: Any) -> None:
    context.folder.mkdir(parents=True, exist_ok=True)
    (context.folder / name).write_text(json.dumps(content, indent=1) + "\n")


PARTS = (
    Part("prepare", 1, 130, prepare),
    Part("resnet", 1, 170, resnets),
    Part("streams", 1, 80, streams),
    Part("users", 1, 90, users),
    Part("methods", 1, 60, methods),
    Part("profiles", 1, 60, profiles),
    Part("first", 2, 150, first_steps),
    Part("precisions", 2, 240, precisions),
    Part("tilings", 2, 120, tilings),
)


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Small networks and images; what was traced runs operation by operation, since a CPU compiles slowly."""
    global TINY
    before, TINY, traced.compiled = (TINY, traced.compiled), True, traced.interpreted
    try:
        yield
    finally:
        TINY, traced.compiled = before


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--call", type=int, choices=(1, 2), action="append", default=[])
    arguments.add_argument("--only", action="append", default=[], help="a part by its name; several times for several")
    arguments.add_argument("--tiny", action="store_true", help="on the CPU, with small sizes")
    arguments.add_argument("--iterations", type=int, default=100, help="meta-iterations timed for each case")
    given = arguments.parse_args()
    chosen = [
        part
        for part in PARTS
        if (not given.call or part.call in given.call) and (not given.only or part.name in given.only)
    ]
    given.folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    with small() if given.tiny else contextlib.nullcontext():
        for part in chosen:
            print(f"== {part.name}", flush=True)
            started = time.monotonic()
            device, iterations = ("cpu", 3) if given.tiny else ("cuda", given.iterations)
            try:
                part.run(Context(given.folder, device, iterations, started + part.seconds))
            except Exception:  # the other parts can do without it
                failed.append(part.name)
                traceback.print_exc()
            print(f"   {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    sys.modules["general"] = sys.modules["__main__"]  # its networks are named general:NAME
    main()
