"""gradshare bench: counts are right, other libraries compute the same step, results are kept, mistakes are named."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import gradshare as gs
from gradshare.bench import measure as measuring
from gradshare.bench import rivals
from gradshare.bench.cases import PAPER, RIVALS, SHAPES, Case, cases_of
from gradshare.bench.measure import Timing, begin, prepare, run, synthetic
from gradshare.bench.results import Failure, Machine, Measurement, Results, markdown_table, notes, read_results, row
from gradshare.bench.roofline import (
    INNER_USES,
    INNER_USES_FIRST,
    QUERY_USES,
    QUERY_USES_FIRST,
    Ceiling,
    bytes_moved,
    ceilings,
    layers,
    operations,
)
from gradshare.cli import bench as command
from gradshare.cli.app import main
from gradshare.engine import vmapped

ROOT = Path(__file__).parents[2]
TINY = Case(tasks=2, shots=1, queries=2, steps=2, filters=3, image=(1, 16, 16))
SMALL = ["--tasks", "2", "--queries", "2", "--steps", "1", "--filters", "3", "--size", "16"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine with small data, time two rounds, and collect no garbage: each takes seconds."""
    monkeypatch.setattr(measuring, "ceilings", partial(ceilings, copied=2**16, width=16, repeats=1))
    monkeypatch.setattr(measuring.gc, "collect", lambda: 0)
    monkeypatch.setattr(command, "ROUNDS", 2)


def script(name: str) -> ModuleType:
    """Import a script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tasks(case: Case, dtype: torch.dtype) -> gs.Episodes:
    generator = torch.Generator().manual_seed(1)
    support, query = case.ways * case.shots, case.ways * case.queries
    labels = torch.arange(case.ways)
    return gs.Episodes(
        torch.rand(case.tasks, support, *case.image, generator=generator, dtype=dtype),
        labels.repeat(case.shots).expand(case.tasks, support),
        torch.rand(case.tasks, query, *case.image, generator=generator, dtype=dtype),
        labels.repeat(case.queries).expand(case.tasks, query),
    )


@pytest.mark.parametrize("backbone", ["conv4", "resnet12", "vit"])
@pytest.mark.parametrize("library", RIVALS)
def test_the_other_libraries_compute_the_same_meta_gradient(library: str, backbone: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed: pip install 'gradshare[bench]'")
    case = replace(TINY, tasks=3, steps=3, filters=5)
    make: dict[str, Callable[[], torch.nn.Module]] = {
        "conv4": lambda: gs.Conv4(case.ways, case.filters, case.image),
        "resnet12": lambda: gs.ResNet12(case.ways, (2, 3, 4, 5), case.image),
        "vit": lambda: gs.ViT(case.ways, case.image, patch=case.image[1] // 2, width=8, depth=1, heads=2),
    }
    learner = gs.maml(make[backbone]().double(), inner_lr=0.1, steps=case.steps)
    state, episodes = learner.init(seed=0), tasks(case, torch.float64)
    if backbone == "conv4":
        state.params["norms.1.weight"].data += 0.3  # else a gain that is wrongly adapted would not be noticed
    expected = torch.autograd.grad(learner.outer_loss(state, episodes).loss, list(state.params.values()))
    network = vmapped.prepare(make[backbone]().double())
    network.load_state_dict(state.params)
    gradient = rivals.GRADIENTS[library](network, case.steps, 0.1)
    for _ in range(2):  # the second time checks that the first did not change the network
        network.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):
            gradient(episodes)
        found = dict(network.named_parameters())
        for name, value in zip(state.params, expected, strict=True):
            torch.testing.assert_close(found[name].grad, value, rtol=1e-7, atol=1e-9, msg=f"{library}: {name}")


def test_a_forward_pass_costs_what_the_shapes_say() -> None:
    convolutions = [2 * 9 * 3 * 48 * 84**2, 2 * 9 * 48 * 48 * 42**2, 2 * 9 * 48 * 48 * 21**2, 2 * 9 * 48 * 48 * 10**2]
    head = 2 * 48 * 5 * 5 * 5
    assert [layer.unit for layer in layers(Case())] == [*convolutions, head]
    assert sum(convolutions) + head == pytest.approx(0.114e9, rel=0.01)
    inner, query = 4 * convolutions[0] + 9 * sum(convolutions[1:]), 2 * convolutions[0] + 3 * sum(convolutions[1:])
    assert operations(Case()) == 5 * 25 * 5 * (inner + 9 * head) + 5 * 75 * (query + 3 * head)


@pytest.mark.parametrize("method", ["maml", "metasgd", "mamlpp"])
@pytest.mark.parametrize("arm", ["original", "shared"])
def test_pytorch_counts_the_same_operations(method: Any, arm: Any) -> None:
    case = replace(TINY, method=method, arm=arm, tasks=1, steps=3, image=(2, 20, 28))  # its counter errs for groups
    step, _ = prepare(case)
    with FlopCounterMode(display=False) as counter:
        step(tasks(case, torch.float32))
    assert counter.get_total_flops() == operations(case)


def test_bytes_are_the_table_of_programs() -> None:
    forward = ["a>z", "z>p"]
    towards_images, gradient = ["z>a"], ["zp>z", "az>"]
    outer_of_images = ["a>z", "za>"]  # z' = conv(va', w), and the filters' part
    outer = ["a>", "zpz>pz", "zpz>z", "az>"]  # conv(a, V) adds to z'
    outer_to_images = ["z>", "z>a"]  # towards_images(z', V) adds to the last one's result

    def uses(programs: list[str]) -> tuple[int, ...]:
        return tuple("".join(programs).count(letter) for letter in "azp")

    inner = forward + gradient + towards_images + outer_of_images + outer + outer_to_images
    assert tuple(INNER_USES) == uses(inner)
    assert tuple(INNER_USES_FIRST) == uses([*forward, *gradient, "a>z", *outer[1:]])  # now conv(a, V) writes z'
    assert tuple(QUERY_USES) == uses(forward + gradient + towards_images)
    assert tuple(QUERY_USES_FIRST) == uses(forward + gradient)
    on_gpu = Case(device="cuda", precision="tf32")
    assert bytes_moved(on_gpu) == 2 * bytes_moved(replace(on_gpu, precision="bf16"))
    assert 10e9 < bytes_moved(replace(on_gpu, precision="bf16")) < 20e9


def test_measuring_gives_finite_figures() -> None:
    results = begin("cpu", ("float32",))
    run([TINY], results, iterations=6, blocks=3, eval_tasks=3)
    (found,) = results.measurements
    low, high = found.quartiles
    assert 0 < low <= found.milliseconds <= high < math.inf
    assert found.iterations == 6 and found.first_step_seconds > 0
    assert found.eval_seconds is not None and found.eval_seconds > 0 and found.eval_tasks == 3
    assert found.operations == operations(TINY) and found.peak_allocated is None
    run([TINY], results, iterations=1000, blocks=500, seconds=0.0)
    assert results.measurements[1].iterations == 3 * 2  # three blocks, and out of time


def test_the_synthetic_data_set_gives_the_same_tasks_each_time() -> None:
    dataset = synthetic((1, 16, 16), "cpu")
    first, again = (dataset.sample("train", gs.Shape(5, 1, 2), 2, (0,)).query_x for _ in range(2))
    assert torch.equal(first, again) and first.std() > 0.2
    assert isinstance(dataset.images[0, 0, 0, 0].item(), int)


def test_ceilings_are_measured_and_hold_a_case_down() -> None:
    found = ceilings("cpu", ("float32", "float32"), copied=2**20, width=64, repeats=3)["float32"]
    assert found.bandwidth > 1e6 and found.rate > 1e6
    assert Ceiling(bandwidth=1e30, rate=operations(TINY) / 2).floor(TINY) == 2
    assert Ceiling(bandwidth=bytes_moved(TINY) / 3, rate=1e30).floor(TINY) == 3


def measured(case: Case, milliseconds: float) -> Measurement:
    return Measurement(
        case=case, milliseconds=milliseconds, quartiles=(milliseconds * 0.9, milliseconds * 1.1), iterations=10,
        operations=operations(case), bytes_moved=bytes_moved(case), first_step_seconds=1.5,
    )  # fmt: skip


def example(sweep: str | None = None) -> Results:
    machine = Machine(
        device="a card", threads=1, torch="2", cuda=None, python="3", gradshare="0",
        rivals={"higher": "0.2.1", "torchopt": "0.7.3"}, date="2026-01-01",
    )  # fmt: skip
    results = Results(machine, {"tf32": Ceiling(4e12, 400e12), "bf16": Ceiling(4e12, 800e12)}, sweep=sweep)
    ours = Case(device="cuda", engine="graph", precision="bf16")
    theirs = Case(device="cuda", library="higher", arm="original", precision="tf32")
    results.measurements += [measured(theirs, 300), measured(replace(theirs, library="torchopt"), 200)]
    results.measurements += [measured(ours, 10), measured(replace(ours, shots=1), 5)]
    results.failures.append(Failure(replace(ours, tasks=100), "out of memory"))
    return results


def test_ratios_are_to_the_fastest_at_the_same_setting() -> None:
    results = example()
    assert results.ratio(results.measurements[2]) == 20
    assert results.ratio(results.measurements[3]) is None
    floor = 1000 * max(operations(Case()) / 800e12, bytes_moved(results.measurements[2].case) / 4e12)
    assert results.share_of_ceiling(results.measurements[2]) == pytest.approx(floor / 10)
    assert row(results, results.measurements[2])["Ratio"] == "20.00"
    assert any("out of memory" in note and "100task-5shot" in note for note in notes(results))


def test_results_survive_a_file(tmp_path: Path) -> None:
    results = example()
    results.save(tmp_path / "new" / "results.json")
    assert read_results(tmp_path / "new" / "results.json") == results
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["results.json"]
    for content in ('{"version": 9}', "[]", "not JSON", '{"version": 1}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(gs.UserError, match=r"bad\.json"):
            read_results(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("[ch]*.json")), ids=lambda path: path.stem
)
def test_results_of_the_repository_can_be_read(path: Path) -> None:
    results = read_results(path)
    assert results.measurements and results.machine.torch
    assert all(
        m.operations == operations(m.case) and m.bytes_moved == bytes_moved(m.case) for m in results.measurements
    )


def test_a_library_that_fails_is_reported_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise OSError("libtorch.so: undefined symbol:\n _ZN2at") if name == "torchopt" else ModuleNotFoundError(name)

    monkeypatch.setattr(rivals, "import_module", broken)
    setting = {"tasks": 2, "shots": 1, "queries": 2, "steps": 1, "filters": 3, "image": (1, 16, 16)}
    cases = cases_of(setting, ("maml",), ("shared",), ("eager",), ("float32",), rivals=True)
    assert [case.library for case in cases] == ["higher", "torchopt", "gradshare"]
    results, files = begin("cpu", ("float32",)), []
    run(cases, results, tmp_path / "r.json", lambda _: files.append((tmp_path / "r.json").exists()), iterations=3)
    assert files == [False, True, True]  # written after every case
    missing, broken_one = (failure.reason for failure in results.failures)
    assert "higher is not installed" in missing and "gradshare[bench]" in missing
    assert broken_one == "torchopt does not import: OSError: libtorch.so: undefined symbol: _ZN2at"
    assert len(read_results(tmp_path / "r.json").measurements) == 1
    assert sum("torchopt" in note for note in notes(results)) == 1


def test_cases_take_turns_and_one_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    timed = Timing.block

    def block(timing: Timing) -> Timing:
        order.append(timing.case.method)
        if timing.case.method == "metasgd" and len(timing.times) == 1:
            raise RuntimeError("out of memory")
        return timed(timing)

    monkeypatch.setattr(Timing, "block", block)
    results = begin("cpu", ("float32",))
    cases, rounds = [TINY, replace(TINY, method="metasgd"), replace(TINY, method="mamlpp")], []
    run(cases, results, tmp_path / "r.json", progress=lambda *done: rounds.append(done), iterations=6, blocks=3)
    assert order == ["maml", "metasgd", "mamlpp"] * 2 + ["maml", "mamlpp"]
    assert rounds == [(0, 3), (1, 3), (2, 3)]
    assert [(found.case.method, found.iterations) for found in results.measurements] == [("maml", 6), ("mamlpp", 6)]
    assert [failure.reason for failure in results.failures] == ["RuntimeError: out of memory"]
    assert read_results(tmp_path / "r.json").failures == results.failures


@pytest.mark.parametrize("name", [*PAPER, "cpu"])
def test_a_setting_has_the_name_of_its_shape(name: Any) -> None:
    assert Case(**SHAPES[name]).shape == name
    assert Case(**SHAPES[name], steps=2).shape.endswith(" steps=2")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`gradshare bench WORDS` and its exit code, in this process: PyTorch is loaded already."""

    def run_it(*words: object) -> Any:
        given = ["gradshare", "bench", *map(str, words), "--device", "cpu", "--threads", "1"]
        monkeypatch.setattr(sys, "argv", given)
        with warnings.catch_warnings(), pytest.raises(SystemExit) as stopped:
            warnings.filterwarnings("ignore", message="Cyclopts application invoked without tokens")
            main()
        return stopped.value.code

    return run_it


Bench, Captured = Callable[..., Any], pytest.CaptureFixture[str]


def test_the_command_times_ours_beside_the_others(bench: Bench, tmp_path: Path, capsys: Captured) -> None:
    for library in RIVALS:
        pytest.importorskip(library)
    code = bench(*SMALL, "--iterations", 3, "--methods", "maml", "--json", tmp_path / "r.json")
    said = capsys.readouterr().out
    assert not code
    assert re.search(r"^maml\+gs +eager float32( +[\d.]+) +[\d.]+–[\d.]+ +\d+\.\d\d ", said, re.MULTILINE)
    assert "Ratio: to the faster of higher" in said and "Ceiling, float32" in said
    content = json.loads((tmp_path / "r.json").read_text())
    assert [entry["case"]["library"] for entry in content["measurements"]] == ["higher", "torchopt"] + ["gradshare"] * 2


def test_a_sweep_varies_one_size(bench: Bench, tmp_path: Path, capsys: Captured) -> None:
    words = [*SMALL, "--iterations", 2, "--methods", "maml", "--arms", "shared", "--json", tmp_path / "r.json"]
    assert not bench(*words, "--sweep", "size", "--values", 16, "--values", 18)
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["sweep"] == "size"
    assert [entry["case"]["image"] for entry in content["measurements"]] == [[1, 16, 16], [1, 18, 18]]
    assert "2task-1shot 18x18x1" in said and "higher" not in said


def test_the_gpu_script_times_what_matters_most_first() -> None:
    parts = script("h200").parts("cuda")
    first = parts[0].cases[:4]
    assert [case.shape for case in first] == list(PAPER)
    assert {(case.what, case.engine, case.precision) for case in first} == {("maml+gs", "graph", "bf16")}
    everything = [case for part in parts for case in part.cases]
    assert {case.library for case in everything} == {"gradshare", *RIVALS}
    assert {case.precision for case in everything} == {"float32", "tf32", "bf16"}
    assert {part.sweep for part in parts} == {None, "tasks", "steps", "shots", "size"}
    assert len({part.file for part in parts}) <= 8  # as many files as come back from the GPU machine


def test_the_gpu_script_writes_after_every_case_and_names_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    h200 = script("h200")
    small = [h200.Part("one", "h200.json", [TINY, replace(TINY, method="metasgd")], eval_tasks=2)]
    monkeypatch.setattr(h200, "parts", lambda device: small)
    monkeypatch.setattr(h200, "PRECISIONS", ("float32",))
    for seconds in ("600", "0"):
        words = [str(tmp_path / seconds), "--device", "cpu", "--iterations", "3", "--seconds", seconds]
        monkeypatch.setattr(sys, "argv", ["h200.py", *words])
        h200.main()
    done, out_of_time = (read_results(tmp_path / seconds / "h200.json") for seconds in ("600", "0"))
    assert [m.case.method for m in done.measurements] == ["maml", "metasgd"] and not done.failures
    assert [m.eval_tasks for m in done.measurements] == [2, 2]
    assert not out_of_time.measurements and len(out_of_time.failures) == 2
    assert capsys.readouterr().out.count("left out") == 2


def test_the_document_gets_its_tables_and_figures_from_results(tmp_path: Path) -> None:
    plot = script("plot")
    (tmp_path / "results").mkdir()
    results = example()
    results.measurements.append(measured(Case(device="cuda", engine="graph", precision="bf16", arm="original"), 8))
    results.save(tmp_path / "results" / "h200.json")
    sweep = example("shots")
    sweep.save(tmp_path / "results" / "h200-sweep-shots.json")
    page = tmp_path / "performance.md"
    page.write_text(
        "before\n<!-- table h200 -->\nold\n<!-- end -->\n<!-- table cpu -->\n<!-- end -->\n"
        "<!-- table main -->\n<!-- end -->\n"
        "<!-- counts -->\n<!-- end -->\n<!-- figure cost-h200 -->\n<!-- end -->\nafter\n"
    )
    plot.main(["--results", str(tmp_path / "results"), "--docs", str(tmp_path)])
    text = page.read_text()
    assert text.startswith("before\n<!-- table h200 -->\n") and text.endswith("after\n") and "old" not in text
    assert markdown_table(results) in text and "out of memory" in text
    assert "Not measured yet" in text.split("table cpu")[1] and text.count("Not measured") == 1
    assert text.count("| a card: 5 tasks, 5-shot, 84x84 | 8 | 10 | 200 | 25 |") == 1  # the sweep is not there
    assert "(cost-h200.svg)" in text and "| 5task-5shot | maml | 0.705 |" in text
    for name in ("roofline-h200.svg", "cost-h200.svg"):
        drawn = (tmp_path / name).read_text()
        assert drawn.startswith("<?xml") and len(drawn) < 200_000
    plot.main(["--results", str(tmp_path / "results"), "--docs", str(tmp_path)])
    assert page.read_text() == text  # a second time changes nothing


def test_any_backbone_is_timed_from_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--tasks", "2", "--queries", "2", "--steps", "1", "--size", "16", "--backbone", "vit", "--no-rivals"]
    chosen = ["--methods", "maml", "--iterations", "2", "--engines", "eager", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["gradshare", "bench", *small, *chosen])
    with contextlib.suppress(SystemExit):
        main()
    out = capsys.readouterr().out
    assert "backbone=vit" in out and "maml+gs" in out and "TFLOP " not in out
    monkeypatch.setattr(sys, "argv", ["gradshare", "bench", "--backbone", "vit", "--filters", "3"])
    with pytest.raises(SystemExit):
        main()
    assert "only conv4 has a choice of filters" in capsys.readouterr().err
