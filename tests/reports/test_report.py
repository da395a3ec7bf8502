"""Tables, headline, terminal, figures, page and files of a report."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shlex
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

import gradshare.reports
from gradshare.errors import UserError
from gradshare.experiments.presets import preset
from gradshare.method.variants import VARIANTS
from gradshare.reports import Comparison, compare_runs, read_run, read_runs, rich_table, words, write_report
from gradshare.reports.figures import draw
from gradshare.reports.formats import csv_experiments, csv_runs, latex, markdown, plain_text
from gradshare.reports.page import headline, not_done, report_page, training_command
from gradshare.reports.panels import curves, gates, limits, overview, ticks
from gradshare.reports.tables import (
    Table,
    all_tables,
    controls_table,
    levels_table,
    paper_table,
    runs_table,
    speed_table,
    verdict_table,
)
from gradshare.runs.folder import RunFolder
from tests.support.reports import ORIGINAL, PAPER, SHARED, make_many, make_run, make_seeds, make_trio, outcome

GOLDEN = Path(__file__).parent / "golden" / "report.html"


def compared(folder: Path) -> Comparison:
    return compare_runs(read_runs(folder))


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


# Tables


def test_the_verdicts_of_one_comparison(trio: Path) -> None:
    table = verdict_table(compared(trio))
    assert table.columns[:3] == ["Arm", "Against the original", "Against the best control"]
    assert texts(table) == [
        ["original", "–", "–", "59.0 ± 1.0 %", "60.0 ± 2.0 %", "5", "–"],
        ["shared", "ahead +9.8", "ahead +1.8", "66.0 ± 1.0 %", "65.0 ± 2.0 %", "4", "+25 %"],
        ["half-rate", "ahead +8.0", "–", "–", "66.0 ± 2.0 %", "5", "0 %"],
    ]
    assert [row[1].verdict for row in table.rows] == [None, "ahead", "ahead"] and table.rows[1][2].beside == "half-rate"
    assert [row.name for row in table.variants] == ["original", "shared", "half-rate"]


def test_the_verdicts_over_seeds(seeds: Path) -> None:
    make_run(seeds / "shared" / "seed-2", "shared", [0.1], finished=False, seed=2, **PAPER)
    _, shared = verdict_table(compared(seeds)).rows
    assert (shared[0].beside, shared[0].marks) == ("3 seeds, 2 of 3 done", ("stopped: 1",))
    assert (shared[1].text, shared[1].beside) == ("ahead +15.0 ± 63.5", "within the spread of seeds")


def test_the_details(trio: Path) -> None:
    comparison = compared(trio)
    assert texts(controls_table(comparison)) == [["half-rate", "ahead +8.0", "81 %", "the smaller step"]]
    assert texts(levels_table(comparison))[1] == [
        "shared", "epoch 2 (20.0 s)", "epoch 2 (20.0 s)", "epoch 3 (30.0 s)", "epoch 3 (30.0 s)",
    ]  # fmt: skip
    assert texts(speed_table(comparison))[0] == ["shared", "+25 %", "60 %", "3", "+67 %", "+67 %", "+59.0"]
    shared = texts(runs_table(comparison))[1]
    assert shared[:4] == ["shared", "65.0 ± 2.0 %", "4", "64.0 ± 1.0 %"]
    assert shared[5:] == ["+9.8", "+2.0", "4 / 0, from 2", "0.30", "0.30", "10.0 s", "1m 00s"]
    titles = [table.title for table in all_tables(comparison)]
    assert titles[:3] == ["Verdicts", "What the controls explain", "Speed-up"] and titles[-1] == "Every run"
    assert all(len(row) == len(table.columns) for table in all_tables(comparison) for row in table.rows)


def test_levels_of_seeds(seeds: Path) -> None:
    rows = {row[0]: row[1:] for row in texts(levels_table(compared(seeds)))}
    assert rows["original"] == ["epoch 2 ± 0 (20.0 s)", "epoch 3 ± 0 (30.0 s)", "–", "–"]
    assert rows["shared"][3] == "epoch 3 (30.0 s) (1 of 2)"


def test_a_run_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "shared", "shared", SHARED, gate=[0.4, 0.2])
    comparison = compared(folder)
    assert verdict_table(comparison).columns == ["Arm", "Test", "Best validation", "at epoch"]
    assert headline(comparison) == "It reached a validation accuracy of 65.0 % at epoch 4 of 6."


def test_ours_beside_the_papers(seeds: Path) -> None:
    make_run(seeds / "resized" / "seed-0", "original", [0.5], **{**PAPER, "dataset": "cub-resize", "method": "mamlpp"})
    make_run(seeds / "other" / "seed-0", "original", [0.5], test=outcome(0.5, 0.6))  # not the paper's
    table = paper_table(compared(seeds))
    (row,) = table.rows  # what was not tested has no row
    assert [cell.text for cell in row[1:4]] == ["81.0 ± 12.7 %", "81.0 ± 12.7 %", "0 %"]
    assert [cell.beside for cell in row[1:4]] == ["paper 83.2 ± 1.4 %", "paper 83.4 ± 1.4 %", "paper +66 %"]
    assert "epochs 6 (paper: 150)" in row[4].text and "iterations 40 (paper: 1000)" in row[4].text
    assert "(paper 83.2 ± 1.4 %)" in markdown(table) and r"(paper 83.2 $\pm$ 1.4 \%)" in latex(table)


def test_the_configuration_with_the_most_seeds_represents_an_arm(tmp_path: Path) -> None:
    make_run(tmp_path / "original" / "seed-0", "original", [0.4], test=outcome(0.4, 0.4), **PAPER)
    make_run(tmp_path / "first" / "seed-0", "shared", [0.9], test=outcome(0.9, 0.9), norm="tensor", **PAPER)
    for seed in (0, 1):
        options = {**PAPER, "seed": seed}
        make_run(tmp_path / "global" / f"seed-{seed}", "shared", [0.5], test=outcome(0.5, 0.5), **options)
    (row,) = paper_table(compared(tmp_path)).rows
    assert [cell.value for cell in row[1:3]] == [0.4, 0.5] and row[2].beside.startswith("global/seed-0, paper")


# One or two sentences


def test_the_headline_of_one_comparison(tmp_path: Path, trio: Path) -> None:
    assert headline(compared(trio)) == (
        "With sharing, MAML is ahead of the original: +9.8 points of validation accuracy on average."
        " It is ahead of the best control too, half-rate (+1.8)."
    )
    make_run(trio / "gate-only", "gate-only", SHARED)
    assert "It is not clearly ahead of the best control, gate-only (0.0)" in headline(compared(trio))
    make_run(tmp_path / "b" / "original", "original", [0.3, 0.4])
    make_run(tmp_path / "b" / "shared", "shared", [0.2], finished=False)
    assert headline(compared(tmp_path / "b")).startswith("So far, with sharing, MAML is behind the original: −10.0")
    make_run(tmp_path / "c" / "original", "original", [0.3, 0.4])
    make_run(tmp_path / "c" / "own", "my_rules:Mine", [0.2], finished=False)
    assert headline(compared(tmp_path / "c")).startswith("So far, with my_rules:Mine, MAML is behind")


def test_a_speed_up_that_rounds_to_zero_has_no_sign() -> None:
    assert [words.percent(value) for value in (-0.003, 0.003, -0.1, 0.1)] == ["0 %", "0 %", "−10 %", "+10 %"]


def test_the_headline_of_several_experiments(tmp_path: Path) -> None:
    for data, lead in (("cub", 0.1), ("mini", 0.0), ("glyphs", -0.1)):
        make_run(tmp_path / data / "original", "original", [0.4, 0.5], dataset=data)
        make_run(tmp_path / data / "shared", "shared", [0.4 + lead, 0.5 + lead], dataset=data)
    assert headline(compared(tmp_path)) == (
        "Sharing is ahead of the original in 1 of 3 experiments, behind in 1 and unclear in 1."
        " No controls were trained."
    )


def test_runs_that_are_not_done_are_counted(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.3])
    make_run(tmp_path / "shared", "shared", [0.3], finished=False)
    assert not_done(read_runs(tmp_path)) == "Not done: 1 stopped, of 2 runs."
    assert not_done(read_runs(tmp_path / "original")) == ""


# Terminal


def in_terminal(folder: Path) -> str:

    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(rich_table(compared(folder)))
    return console.export_text()


def test_the_terminal_table_fits_eighty_columns(tmp_path: Path) -> None:
    for arm in VARIANTS:
        make_run(tmp_path / arm, arm, SHARED, finished=arm != "memory-only", test=outcome(0.64, 0.66))
    lines = in_terminal(tmp_path).splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    rows = [" ".join(line.split()) for line in lines]
    assert "shared unclear 0.0 unclear 0.0 batch-only 66.0 ± 1.0 % 65.0 %" in rows
    assert any(line.startswith("memory-only*") for line in lines) and "* stopped" in "".join(lines)


def test_the_caption_in_the_terminal_names_the_columns_that_are_there(trio: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "pair" / "original", "original", [0.4, 0.5])
    make_run(tmp_path / "pair" / "shared", "shared", [0.5, 0.6])
    assert "Original: the verdict" in in_terminal(tmp_path / "pair")
    shown = in_terminal(trio)
    assert "Original, best control: the verdict" in shown and "up to 5, predict together" in " ".join(shown.split())


def test_the_terminal_shows_experiments_one_after_the_other(seeds: Path) -> None:
    make_run(seeds / "other" / "seed-0", "original", [0.5])
    lines = in_terminal(seeds).splitlines()
    assert lines[0] == "MAML/5 on cub, 5-way 5-shot, inner rate 0.1"
    assert " ".join(lines[3].split()) == "shared ahead +15.0 81.0 ± 12.7 % 65.0 % 3"


# Figures


def test_lines_of_a_comparison(trio: Path) -> None:
    (panel,) = curves(compared(trio))
    assert [line.legend for line in panel.lines] == ["original", "shared", "half-rate"]  # numbers are in the tables
    assert [(line.variant.name, line.best) for line in panel.lines] == [
        ("original", 4),
        ("shared", 3),
        ("half-rate", 4),
    ]
    (gate,) = gates(compared(trio))
    assert [line.name for line in gate.lines] == ["shared σ(m)", "shared σ(λ)"]
    assert gate.lines[0].values == pytest.approx([0.3] * 6) and not gates(compared(trio / "original"))


def test_lines_of_several_seeds(seeds: Path) -> None:
    (panel,) = curves(compared(seeds))
    assert [line.name for line in panel.lines[3:]] == ["shared, mean", "shared, seed 0", "shared, seed 1"]
    assert panel.lines[3].legend == "shared (2 seeds)"
    assert panel.lines[3].values == pytest.approx([0.45, 0.55, 0.65, 0.65]) and not panel.lines[3].thin
    assert panel.lines[4].thin and panel.lines[4].interval is not None


def test_levels_are_marked_where_the_table_has_them(trio: Path, seeds: Path) -> None:
    (panel,) = curves(compared(trio))
    table = levels_table(compared(trio))
    marked = {(mark.value, arm.name): epoch for mark in panel.marks for arm, epoch in mark.reached}
    shown = {
        (float(level.removesuffix(" %")) / 100, row[0].text): cell.value
        for row in table.rows
        for level, cell in zip(table.columns[1:], row[1:], strict=True)
        if cell.value is not None
    }
    assert len(shown) > 6 and marked == {key: shown[key] for key in marked} and len(marked) == len(shown)
    (several,) = curves(compared(seeds))  # in mean over seeds
    reached = dict.fromkeys(epoch for mark in several.marks for _, epoch in mark.reached)
    assert all(epoch * 2 == int(epoch * 2) for epoch in reached)
    (drawn,) = draw([panel]).axes
    assert sum(line.get_marker() == "|" for line in drawn.lines) == len(marked)


def test_inner_steps_of_a_run_alone(trio: Path) -> None:
    (gate,) = gates(compared(trio / "shared"))
    assert [line.name for line in gate.lines[:3]] == ["shared σ(m)", "shared σ(m), step 1", "shared σ(m), step 2"]


def test_axes() -> None:
    assert ticks(0.18, 0.63, 5) == [0.2, 0.3, 0.4, 0.5, 0.6] and ticks(0.9, 1.1, 5, whole=True) == [1.0]
    for low, high in ((1e-9, 2e-9), (-3.0, 40.0), (0.0, 1e90)):
        found = ticks(low, high, 6)
        assert 2 <= len(found) <= 6 and low <= found[0] and found[-1] <= high


def test_limits_hold_every_band(trio: Path) -> None:
    (panel,) = curves(compared(trio))
    (left, right), (low, high) = limits(panel)
    assert left < 1 and right > 6 and low < 0.18 and high > 0.68
    (gate,) = gates(compared(trio))
    assert limits(gate)[1][0] < 0.3 and limits(gate)[1][1] > 0.5  # 0.5 is where a gate starts


def test_the_panels_of_a_file_are_in_the_order_of_the_paper(tmp_path: Path) -> None:
    for method in ("maml", "metasgd", "mamlpp"):
        for shots, tasks in ((1, 5), (5, 1), (5, 5), (1, 1)):
            make_run(tmp_path / f"{method}{shots}{tasks}", "original", [0.4], method=method, shots=shots, tasks=tasks)
    axes = draw(curves(compared(tmp_path))).axes
    assert [one.get_title(loc="left") for one in axes[:4]] == [
        "MAML/5, 5-way 1-shot", "Meta-SGD/5, 5-way 1-shot", "MAML++/5, 5-way 1-shot", "MAML/1, 5-way 1-shot",
    ]  # fmt: skip
    assert len({axes[0].get_position().y0, axes[1].get_position().y0, axes[2].get_position().y0}) == 1


def test_the_label_of_an_axis_is_inside_the_figure(tmp_path: Path) -> None:
    """The widest ticks are 27.5 % and the like."""
    for shots in (1, 5):
        make_run(tmp_path / str(shots), "original", [0.28, 0.36, 0.44], shots=shots)
    figure = draw(curves(compared(tmp_path)))
    assert len(figure.axes) == 2
    figure.draw_without_rendering()
    assert min(axes.yaxis.label.get_window_extent().x0 for axes in figure.axes) > 0
    assert "27.5 %" in [tick.get_text() for tick in figure.axes[0].get_yticklabels()]


def test_a_file_for_every_data_set_and_rate(tmp_path: Path) -> None:
    for data in ("cub", "mini"):
        for rate in (0.1, 1.0):
            for arm in ("original", "shared"):
                options = {**PAPER, "dataset": data, "inner_lr": rate}
                gate = [0.4] if arm == "shared" else None
                make_run(tmp_path / f"{data}{rate}" / arm, arm, [0.4, 0.5], gate=gate, **options)
    make_run(tmp_path / "evil" / "x", "original", [0.4], dataset="../../<b>", inner_lr=0.1)
    write_report(tmp_path)
    written = {path.name for path in tmp_path.iterdir() if path.suffix == ".svg"}
    kinds = [
        f"{kind}-{data}-{rate}.svg" for kind in ("curves", "gates") for data in ("cub", "mini") for rate in (0.1, 1.0)
    ]
    assert written == {*kinds, "curves-..-..-b-0.1.svg"}


@pytest.mark.usefixtures("images")
def test_images_are_drawn_the_same_twice(trio: Path) -> None:
    names = ("curves.png", "curves.svg", "gates.png", "gates.svg")

    def drawn() -> list[bytes]:
        write_report(trio, command="gradshare report")
        return [(trio / name).read_bytes() for name in names]

    first = drawn()
    assert first == drawn() and first[0].startswith(b"\x89PNG") and b">half-rate<" in first[1]
    assert b"dc:date" not in first[1] and b"Software" not in first[0][:400]


# Files and page


def test_the_files_of_a_report(trio: Path) -> None:
    comparison = write_report(trio, command="gradshare compare glyphs --out 'a & b'")
    written = {path.name for path in trio.iterdir() if path.is_file()}
    images = {"curves.png", "curves.svg", "gates.png", "gates.svg"}
    assert written == {"summary.json", "report.html", "table.md", "table.tex", "table.csv", "experiments.csv"} | images
    assert isinstance(comparison, Comparison)
    assert json.loads((trio / "summary.json").read_text())["arms"]["shared"]["best_epoch"] == 4


def test_a_single_run_keeps_its_own_summary(trio: Path) -> None:
    before = (trio / "shared" / "summary.json").read_bytes()
    assert list(write_report(trio / "shared").runs) == ["shared"]
    assert (trio / "shared" / "summary.json").read_bytes() == before and (trio / "shared" / "report.html").exists()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(trio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(trio)
    before = {path.name: path.read_bytes() for path in trio.iterdir() if path.is_file()}

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UserError, match=r"report\.html: disk full"):
        write_report(trio, command="another")
    assert before == {path.name: path.read_bytes() for path in trio.iterdir() if path.is_file()}


def test_tables_for_programs(trio: Path, seeds: Path) -> None:
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(csv_runs(compared(trio))))}
    assert float(rows["shared"]["mean_difference"]) == pytest.approx(59 / 6)
    assert float(rows["shared"]["test_ensemble"]) == 0.66 and rows["shared"]["verdict"] == "ahead"
    assert rows["original"]["speed_up"] == ""
    original, shared = csv.DictReader(io.StringIO(csv_experiments(compared(seeds))))
    assert (shared["dataset"], shared["runs"], shared["test_over"]) == ("cub", "2", "seeds")
    assert float(shared["area"]) == pytest.approx(60) and float(shared["paper_speed_up"]) == 0.66
    assert float(original["paper_test"]) == 0.832 and original["paper_speed_up"] == ""


def test_marks_are_in_every_text(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", ORIGINAL)
    make_run(tmp_path / "shared", "shared", SHARED[:2], finished=False)
    assert plain_text(verdict_table(compared(tmp_path)).rows[1][0]) == "shared (stopped)"
    assert "shared (stopped)" in markdown(verdict_table(compared(tmp_path)))
    page = report_page(compared(tmp_path), "")
    assert "<small class=mark>stopped</small>" in page and "Not done: 1 stopped, of 2 runs." in page


def normalised(page: str) -> str:
    """The page without its style and its script, which change for other reasons."""
    page = re.sub(r"<style>.*?</style>", "<style></style>", page, flags=re.S)
    page = re.sub(r"<script>.*?</script>", "<script></script>", page, flags=re.S)
    return re.sub(r"sha256-[^&]*", "sha256-", page)


def test_the_page_is_the_kept_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is to change: python -m tests.reports.test_report writes it anew; read the difference before you commit."""
    monkeypatch.chdir(tmp_path)
    assert golden_page() == GOLDEN.read_text()


def golden_page() -> str:
    """Two experiments, with seeds, a control, a stopped run and the paper's figures, in the current folder."""
    folder = Path("runs")
    make_trio(folder / "glyphs")
    make_seeds(folder / "cub")
    make_run(folder / "glyphs" / "gate-only", "gate-only", SHARED[:2], finished=False)
    return normalised(report_page(compared(folder), "gradshare report runs"))


def test_every_part_of_a_report_says_transductive_or_inductive(tmp_path: Path) -> None:
    for name, norm in (("old", {}), ("new", {"norm_statistics": "support"})):
        make_run(tmp_path / name / "shared", "shared", SHARED, **norm)
    words = {"old": "Evaluation is transductive", "new": "Evaluation is inductive"}
    for name, expected in words.items():
        comparison, console = write_report(tmp_path / name), Console(file=io.StringIO(), width=200, record=True)
        console.print(rich_table(comparison))
        files = [(tmp_path / name / file).read_text() for file in ("report.html", "table.md", "table.tex")]
        for text in (console.export_text(), *files):
            assert expected in text and sum(one in text for one in words.values()) == 1
        (run,) = csv.DictReader(io.StringIO((tmp_path / name / "table.csv").read_text()))
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        norm = {"old": "batch", "new": "support"}[name]
        assert run["norm_statistics"] == summary["arms"]["shared"]["norm_statistics"] == norm
    mixed = compared(tmp_path).norm_note
    assert all(f"In 1 of 2 runs: {expected}" in mixed for expected in words.values())


def test_the_page_loads_nothing(trio: Path) -> None:
    write_report(trio)
    page = (trio / "report.html").read_text()
    assert not re.search(r"https?://|url\(|@import|<link|<img|<iframe|\b(src|href)=", page)
    assert "default-src 'none'" in html.unescape(page)


def test_the_page_folds_what_is_too_much(tmp_path: Path) -> None:
    """A tenth of the promised 250 experiments in 15 s and 3 MB; the whole of it is in tests/stress."""
    make_many(tmp_path, 25)
    start = time.process_time()
    write_report(tmp_path)
    assert time.process_time() - start < 5
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 300_000 and "13 more experiments" in page and page.count("<figure") == 25 * 2 + 1
    panel = overview(compared(tmp_path))
    assert panel is not None and (panel.lines[0].values[1:] >= panel.lines[0].values[:-1]).all()


def test_a_long_run_is_drawn_with_the_points_that_can_be_seen(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "original", [0.5 + (epoch == 777) / 10 for epoch in range(2000)])
    page = report_page(compared(tmp_path), "")
    assert len(page) < 40_000 and "epoch 778 of 2000" in page
    assert 778 in json.loads(re.findall(r"data-panel='([^']*)'", page)[0])["epochs"]


# Commands


@pytest.mark.parametrize(
    "name", ["cub-5shot-5task-maml+gs", "mini-1shot-1task-mamlpp-10x", "cub-1shot-5task-maml~half-rate"]
)
def test_the_training_command_gives_the_same_configuration(tmp_path: Path, name: str) -> None:
    config = preset(name, epochs=3, seed=7, adapt_norm=True)
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"version": 1, **asdict(config)}))
    given = ["--epochs", "3", "--seed", "7", "--adapt-norm"]
    command = training_command(read_run(RunFolder(folder)))
    assert command is not None
    assert sorted(shlex.split(command)) == sorted(
        ["gradshare", "train", "--preset", name, *given, "--out", str(folder)]
    )


def test_a_command_with_an_arm_of_ones_own(tmp_path: Path) -> None:
    config = {**asdict(preset("cub-5shot-5task-maml")), "arm": "my_rules:Additive"}
    (tmp_path / "config.json").write_text(json.dumps({"version": 1, **config}))
    command = training_command(read_run(RunFolder(tmp_path)))
    assert command == f"gradshare train --preset cub-5shot-5task-maml --arm my_rules:Additive --out {tmp_path}"


def test_a_run_from_python_has_no_command(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", "shared", [0.4], model="my own")
    assert training_command(read_run(RunFolder(folder))) is None


def test_reports_import_no_torch() -> None:
    for path in Path(gradshare.reports.__file__).parent.glob("*.py"):
        assert not re.search(r"^\s*(import|from) (torch|matplotlib\.pyplot)", path.read_text(), re.M), path


if __name__ == "__main__":
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        GOLDEN.write_text(golden_page())
