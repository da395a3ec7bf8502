"""The report page in a real browser, the report of 250 experiments, and any name at all."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradshare.reports.figures
from gradshare.reports import read_runs, write_report
from tests.support.browser import CHROMIUM, Page, browser
from tests.support.reports import HOSTILE, make_grid, make_hostile, make_many, make_run

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
RUNS = "[...document.querySelectorAll('table.sortable')].find(one => one.tHead.textContent.startsWith('Run'))"


def test_250_experiments_of_two_arms(tmp_path: Path) -> None:
    make_many(tmp_path, 250)
    start = time.process_time()
    write_report(tmp_path)
    assert time.process_time() - start < 15
    assert (tmp_path / "report.html").stat().st_size < 3_000_000


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_grid(tmp_path_factory.mktemp("grid"))
    make_run(folder / "<script>evil" / "seed-0", HOSTILE[0], [0.3, 0.4], dataset=HOSTILE[0], gate=[0.5, 0.5])
    write_report(folder, command=f"gradshare report '{HOSTILE[0]}'")
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(tab: Page, grid: Path) -> Iterator[Page]:
    tab.complaints.clear()
    tab.open(grid / "report.html")
    tab.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    yield tab
    assert all(url.startswith(("file:", "data:", "about:")) for url in tab.requests), tab.requests
    assert tab.requests and tab.complaints == []


def column(page: Page, number: int) -> list[str]:
    cells = f"[...{RUNS}.tBodies[0].rows].map(row => row.cells[{number}])"
    return page.value(f"{cells}.map(cell => cell.dataset.value ?? cell.firstChild.nextSibling?.textContent)")


def heading(number: int) -> str:
    return f"{RUNS}.tHead.rows[0].cells[{number}].firstChild"


@in_a_browser
def test_every_run_is_shown_with_its_status(page: Page, grid: Path) -> None:
    shown = page.value("document.body.innerText").replace("\N{NO-BREAK SPACE}", " ")
    assert all(run.name in shown for run in read_runs(grid))
    assert re.search(r"late/seed-0\s*stopped", shown) and re.search(r"lost/seed-0\s*failed", shown)
    assert "out of memory" in shown and "paper 83.2 ± 1.4 %" in shown


@in_a_browser
def test_a_click_on_a_heading_sorts_by_number_and_by_name(page: Page) -> None:
    page.click(heading(1))
    falling = [float(value) for value in column(page, 1)]
    assert falling == sorted(falling, reverse=True)
    page.click(heading(1))
    assert [float(value) for value in column(page, 1)] == falling[::-1]
    page.click(heading(0))
    page.click(heading(0))
    names = f"[...{RUNS}.tBodies[0].rows].map(row => row.cells[0].textContent)"
    assert page.value(names) == page.value(f"{names}.sort((a, b) => a.localeCompare(b))")
    assert page.value(f"{heading(0)}.parentElement.getAttribute('aria-sort')") == "ascending"
    for _ in range(2):
        page.click(heading(4))  # not every run was tested: those without a value stay last
        assert column(page, 4)[-1] == "" and column(page, 4)[0] != ""


@in_a_browser
def test_the_pointer_on_a_curve_shows_its_values(page: Page) -> None:
    """At epoch 5 of the panel of CUB, wherever it is on the screen; the marks are on the lines."""
    figure = "[...document.querySelectorAll('figure')].find(one => one.innerText.startsWith('MAML/5 on cub'))"
    x, y, number = page.value(
        f"(() => {{ const figure = {figure}, svg = figure.querySelector('svg');"
        " figure.scrollIntoView({block: 'center'}); const data = JSON.parse(figure.dataset.panel);"
        " const box = svg.getBoundingClientRect(), [left, right] = data.box;"
        " return [box.x + box.width * (5 - left) / (right - left), box.y + box.height / 2, data.lines.length]; })()"
    )
    page.pointer("mouseMoved", x, y)
    shown = page.value("document.querySelector('.tip:not([hidden])').innerText").replace("\N{NO-BREAK SPACE}", " ")
    assert shown.startswith("epoch 5") and number == 9  # three arms: the mean and two seeds each
    assert "62.8 ± 2.0 %" in shown  # 20 + 60 (1 - exp(-5 / 4)), seed 0 of sharing
    assert page.value(f"{figure}.querySelectorAll('g path.dot').length") == number
    apart = page.value(
        f"(() => {{ const figure = {figure};"
        " const numbers = path => path.getAttribute('d').match(/[\\d.]+/g).map(Number);"
        " const lines = [...figure.querySelectorAll('path.line:not(.band):not(.dot)')].map(numbers);"
        " const dots = [...figure.querySelectorAll('g path.dot')].map(numbers);"
        " return Math.min(...dots.map(dot => Math.abs(dot[1] - lines.at(-1)[9]))); })()"
    )
    assert apart < 2  # of 1000 units: the mean of the last arm at its fifth epoch
    page.pointer("mouseMoved", 2, 2)
    assert page.value("document.querySelectorAll('.tip:not([hidden])').length") == 0


@in_a_browser
def test_a_click_switches_an_arm_off_and_on(page: Page) -> None:
    """Its curves, bands, dots and bars in every panel, and its values under the pointer; the others stay."""
    button = "document.querySelector('dl.arms dt[data-arm=shared] button')"
    seen = (
        "Object.fromEntries(['shared', 'original'].map(arm => [arm,"
        " [...document.querySelectorAll(`figure path[data-arm=${arm}]`)]"
        ".filter(path => getComputedStyle(path).display !== 'none').length]))"
    )
    before = page.value(seen)
    assert min(before.values()) > 10
    page.click(button)
    assert page.value(seen) == before | {"shared": 0}
    assert page.value(f"{button}.getAttribute('aria-pressed')") == "false"
    figure = "[...document.querySelectorAll('figure')].find(one => one.innerText.startsWith('MAML/5 on cub'))"
    x, y = page.value(
        f"(() => {{ const plot = {figure}.querySelector('.plot'); plot.scrollIntoView({{block: 'center'}});"
        " const box = plot.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    page.pointer("mouseMoved", x, y)
    shown = page.value("document.querySelector('.tip:not([hidden])').innerText")
    assert "original" in shown and "shared" not in shown
    page.pointer("mouseMoved", 2, 2)
    page.click(button)
    assert page.value(seen) == before


@in_a_browser
def test_levels_and_best_epochs_are_marked(page: Page) -> None:
    figure = "[...document.querySelectorAll('figure')].find(one => one.innerText.startsWith('MAML/5 on cub'))"
    counts = [page.value(f"{figure}.querySelectorAll('path.{kind}').length") for kind in ("aim", "level", "dot")]
    assert counts[0] >= 3 and counts[1] >= counts[0] and counts[2] == 6  # a dot for each of three arms' two seeds


@in_a_browser
def test_light_and_dark(page: Page, grid: Path) -> None:
    colours = "[...['backgroundColor', 'color'].map(what => getComputedStyle(document.body)[what])]"
    line = "getComputedStyle(document.querySelector('dl.arms path')).stroke"  # of the original
    light = [*page.value(colours), page.value(line)]
    page.open(grid / "report.html", dark=True)
    dark = [*page.value(colours), page.value(line)]
    assert light == ["rgb(246, 247, 249)", "rgb(27, 31, 36)", "rgb(27, 31, 36)"]
    assert dark == ["rgb(18, 20, 23)", "rgb(228, 231, 235)", "rgb(228, 231, 235)"]


@in_a_browser
def test_the_page_is_whole_without_script_and_on_a_small_screen(page: Page, grid: Path) -> None:
    page.open(grid / "report.html", script=False)
    page.call("Emulation.setScriptExecutionDisabled", value=False)  # to look at it
    assert page.value("document.querySelectorAll('th button').length") == 0
    assert page.value("document.querySelectorAll('figure svg path').length") > 20
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    assert page.value("document.documentElement.scrollWidth") <= 390
    page.call("Emulation.clearDeviceMetricsOverride")


@in_a_browser
def test_a_print_shows_everything(page: Page, grid: Path) -> None:
    page.open(grid / "report.html")
    page.call("Emulation.setEmulatedMedia", media="print")
    page.value("dispatchEvent(new Event('beforeprint'))")
    assert page.value("document.querySelectorAll('details:not([open])').length") == 0
    assert page.value("getComputedStyle(document.querySelector('pre')).maxHeight") == "none"
    page.call("Emulation.setEmulatedMedia", media="")


@in_a_browser
def test_a_browser_runs_nothing_of_others(tab: Page, tmp_path: Path) -> None:
    folder = make_hostile(tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradshare.reports.figures, "image", lambda *_: b"")
        write_report(folder, command=" ".join(HOSTILE))
    tab.complaints.clear()
    tab.open(folder / "report.html")
    tab.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.value("document.querySelectorAll('script').length") == 1
    assert tab.value("document.querySelectorAll('img, iframe, object, embed, link, form, a[href]').length") == 0
    shown = tab.value("document.body.innerText")
    assert all(name in shown for name in HOSTILE if name.isprintable() and "  " not in name)
    assert len(tab.requests) == 1 and tab.complaints == []


# Any name


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found[tag] += 1


def elements(folder: Path, name: str) -> Counter[str]:
    make_run(folder / "run", name, [0.2, 0.3], dataset=name, method=name, extra=name)
    write_report(folder)
    return Tags((folder / "report.html").read_text(encoding="utf-8")).found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Counter[str]]]:
    """A folder for reports without images, and the elements of a page with an ordinary name."""
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradshare.reports.figures, "image", lambda *_: b"")
        yield folder, elements(folder / "plain", "wren")


@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(name=st.text(st.one_of(st.sampled_from("<>&\"'/!-={}[]()|\\\n#%"), st.characters()), min_size=1, max_size=12))
def test_any_name_gives_the_same_elements(plain: tuple[Path, Counter[str]], name: str) -> None:
    folder, expected = plain
    assert elements(folder / f"{len(list(folder.iterdir()))}", name) == expected
