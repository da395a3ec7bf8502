"""The report page in a real browser: it stands, it sorts, it tells values, and it asks for nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.reports.test_reports import HOSTILE, make_run, outcome
from tests.support.browser import CHROMIUM, Page, browser

from gradshare.reports import find_runs, write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
CUB = "document.querySelector('[aria-label=\"curves-cub-0.1\"]').parentElement"


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets, two rates, two seeds, a control, a run that is unfinished and one that failed."""
    folder = tmp_path_factory.mktemp("grid")
    for data, top in (("cub", 0.8), ("mini", 0.6)):
        for arm, pace in (("original", 8), ("shared", 4), ("half-rate", 6)):
            for seed in (0, 1):
                curve = [0.2 + (top - 0.2) * (1 - math.exp(-epoch / pace)) + seed / 100 for epoch in range(1, 13)]
                options: dict[str, Any] = {"dataset": data, "shots": 5, "steps": 5, "seed": seed}
                rate = 0.05 if arm == "half-rate" else 0.1
                gate = [0.45, 0.4] if arm == "shared" else None
                test = outcome(top, top + 0.01)
                place = folder / f"{data}-{arm}" / f"seed-{seed}"
                make_run(place, arm, curve, gate=gate, test=test, inner_lr=rate, **options)
    make_run(
        folder / "<script>late" / "seed-0", "shared", [0.2, 0.3], finished=False, inner_lr=1.0, dataset="cub", shots=5
    )
    make_run(folder / "lost" / "seed-0", "original", [0.2], finished=False, inner_lr=1.0, dataset="cub", shots=5)
    (folder / ".grid" / "lost").mkdir(parents=True)
    (folder / ".grid" / "lost" / "seed-0.failure.txt").write_text("the loss became nan in epoch 2, iteration 1\n")
    make_run(folder / "evil" / "seed-0", HOSTILE, [0.3, 0.4], dataset=HOSTILE, method=HOSTILE, gate=[0.5, 0.5])
    write_report(folder, command=f"gradshare report '{HOSTILE}'")
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(tab: Page, grid: Path) -> Iterator[Page]:
    tab.complaints.clear()
    tab.open(grid / "report.html")
    yield tab
    assert all(url.startswith(("file:", "data:", "about:")) for url in tab.requests), tab.requests
    assert tab.requests and tab.complaints == []


def runs_table(page: Page) -> str:
    """The table of every run: the one whose first heading is Run."""
    return "[...document.querySelectorAll('table.sortable')].find(one => one.tHead.textContent.startsWith('Run'))"


def column(page: Page, number: int) -> list[str]:
    return page.value(f"[...{runs_table(page)}.tBodies[0].rows].map(row => row.cells[{number}].dataset.value)")


def heading(page: Page, number: int) -> str:
    return f"{runs_table(page)}.tHead.rows[0].cells[{number}].firstChild"


def test_every_run_is_shown_with_its_state(page: Page, grid: Path) -> None:
    assert sorted(column(page, 0)) == sorted(run.name for run in find_runs(grid))
    shown = page.value("document.body.innerText")
    assert "late/seed-0 (unfinished)" in shown and "lost/seed-0 (diverged)" in shown
    assert "the loss became nan in epoch 2, iteration 1" in shown
    assert "paper 83.2 ± 1.4 %" in shown.replace("\N{NO-BREAK SPACE}", " ")


def test_a_click_on_a_heading_sorts_by_number_and_by_name(page: Page) -> None:
    page.click(heading(page, 1))
    falling = [float(value) for value in column(page, 1)]
    assert falling == sorted(falling, reverse=True)
    page.click(heading(page, 1))
    assert [float(value) for value in column(page, 1)] == falling[::-1]
    page.click(heading(page, 0))
    page.click(heading(page, 0))
    assert column(page, 0) == page.value(f"{column_copy(page)}.sort((a, b) => a.localeCompare(b))")
    assert page.value(f"{heading(page, 0)}.parentElement.getAttribute('aria-sort')") == "ascending"
    page.click(heading(page, 4))  # not every run was tested: those without a value stay last
    assert column(page, 4)[-1] == ""
    page.click(heading(page, 4))
    assert column(page, 4)[-1] == "" and column(page, 4)[0] != ""


def column_copy(page: Page) -> str:
    return f"[...{runs_table(page)}.tBodies[0].rows].map(row => row.cells[0].dataset.value)"


def test_the_pointer_on_a_curve_tells_its_values(page: Page) -> None:
    """At epoch 5 of the first panel, wherever the figure stands on the screen."""
    x, y, number = page.value(
        f"(() => {{ const figure = {CUB}, svg = figure.querySelector('svg');"
        " svg.scrollIntoView({block: 'start'}); const panel = JSON.parse(figure.dataset.panels)[0];"
        " const at = new DOMPoint(panel.x[0] * 5 + panel.x[1], panel.y[0] * 40 + panel.y[1])"
        ".matrixTransform(svg.getScreenCTM()); return [at.x, at.y, panel.curves.length]; })()"
    )
    page.pointer("mouseMoved", x, y)
    told = page.value("document.querySelector('.tip:not([hidden])').innerText")
    assert told.startswith("epoch 5") and number == 9  # three arms: the mean and two seeds each
    expected = 20 + 60 * (1 - math.exp(-5 / 4))
    assert f"{expected:.1f} ± 2.0 %" in told.replace("\N{NO-BREAK SPACE}", " ")
    marks = "document.querySelectorAll('figure svg circle')"
    assert page.value(f"{marks}.length") == number
    line = page.value("[...document.querySelectorAll('figure svg line')].map(one => one.getBoundingClientRect().x)")
    assert any(abs(place - x) < 1 for place in line)
    page.pointer("mouseMoved", 2, 2)
    assert page.value("document.querySelectorAll('.tip:not([hidden])').length") == 0


def test_the_marks_lie_on_the_drawn_line(page: Page) -> None:
    """The page's own scales agree with matplotlib's drawing: the marked point is on a path of that colour."""
    apart = page.value(
        f"(() => {{ const figure = {CUB}, svg = figure.querySelector('svg');"
        " const panel = JSON.parse(figure.dataset.panels)[0];"
        " const curve = panel.curves.find(one => one.label === 'shared, mean');"
        " const lines = [...svg.querySelectorAll('path')];"
        " const drawn = lines.filter(one => one.getAttribute('style')?.includes('fill: none') &&"
        " one.getAttribute('style').includes(curve.color));"
        " const want = [panel.x[0] * 5 + panel.x[1], panel.y[0] * curve.values[4] + panel.y[1]];"
        " const near = line => Math.min(...(line.getAttribute('d').match(/-?[\\d.]+ -?[\\d.]+/g) ?? []).map(pair => {"
        " const [x, y] = pair.split(' ').map(Number); return Math.hypot(x - want[0], y - want[1]); }));"
        " return Math.min(...drawn.map(near)); })()"
    )
    assert apart < 0.2


def test_hostile_names_stay_text(page: Page) -> None:
    shown = page.value("document.body.innerText")
    assert HOSTILE in shown and "<script>late/seed-0" in shown
    assert page.value("document.querySelectorAll('script').length") == 1
    assert page.value("document.querySelectorAll('script')[0].textContent.includes('alert')") is False


def test_light_and_dark(page: Page, grid: Path) -> None:
    colour = "getComputedStyle(document.body).{}"
    ink = "getComputedStyle(document.querySelector('figure svg')).color"
    light = [page.value(colour.format(what)) for what in ("backgroundColor", "color")] + [page.value(ink)]
    page.open(grid / "report.html", dark=True)
    dark = [page.value(colour.format(what)) for what in ("backgroundColor", "color")] + [page.value(ink)]
    assert light == ["rgb(246, 247, 249)", "rgb(27, 31, 36)", "rgb(27, 31, 36)"]
    assert dark == ["rgb(18, 20, 23)", "rgb(228, 231, 235)", "rgb(228, 231, 235)"]


def test_the_page_is_whole_without_script_and_on_a_small_screen(page: Page, grid: Path) -> None:
    page.open(grid / "report.html", script=False)
    page.call("Emulation.setScriptExecutionDisabled", value=False)  # to look at what stands there
    assert page.value("document.querySelectorAll('th button').length") == 0
    assert page.value("document.querySelectorAll('figure svg path').length") > 20
    assert "late/seed-0" in page.value("document.body.innerText")
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    assert page.value("document.documentElement.scrollWidth") <= 390
    page.call("Emulation.clearDeviceMetricsOverride")


def test_every_figure_has_its_commands(page: Page) -> None:
    figures = page.value("[...document.querySelectorAll('figure')].map(one => one.innerText)")
    assert len(figures) >= 4
    assert all(f"Drawn by gradshare report '{HOSTILE}'" in text for text in figures)
    opened = page.value(f"{CUB}.querySelector('details pre').textContent")
    assert "gradshare train --preset cub-5shot-5task-maml " in opened


def test_a_print_shows_everything(page: Page) -> None:
    page.call("Emulation.setEmulatedMedia", media="print")
    page.value("dispatchEvent(new Event('beforeprint'))")
    assert page.value("document.querySelectorAll('details:not([open])').length") == 0
    assert page.value("getComputedStyle(document.querySelector('.scroll')).maxHeight") == "none"
    page.call("Emulation.setEmulatedMedia", media="")
