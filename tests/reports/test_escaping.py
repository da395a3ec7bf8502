"""Names that others chose stay text in every file of a report, whatever they look like."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

import gradshare.reports.figures
from gradshare.errors import DamageWarning, print_warnings_as_lines, printable
from gradshare.reports import compare_runs, read_runs, rich_table, write_report
from gradshare.reports.formats import latex_text
from gradshare.reports.page import LOADER
from gradshare.runs.display import show_result
from gradshare.runs.export import Card
from gradshare.runs.folder import RunFolder
from tests.support.reports import HOSTILE, make_hostile, make_run

TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2", "p", "dl", "dt", "dd"),
    *("div", "small", "i", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "details", "summary"),
    *("span", "pre", "script", "svg", "path"),
}


class Reader(HTMLParser):
    """The elements of a page with their attributes, its text, and its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.text, self.scripts, self.comments = "", "", 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and not self.scripts:
            self.scripts = data
        else:
            self.text += data

    def handle_comment(self, data: str) -> None:
        self.comments += 1


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report in which everything that has a name has a hostile one; a PNG is only slow."""
    folder = make_hostile(tmp_path_factory.mktemp("hostile"))
    draw = gradshare.reports.figures.image
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradshare.reports.figures, "image", lambda one, form: draw(one, form) if form == "svg" else b"")
        write_report(folder, command=" ".join(HOSTILE))
    return folder


@pytest.fixture(scope="module")
def page(report: Path) -> Reader:
    return Reader((report / "report.html").read_text(encoding="utf-8"))


def test_the_page_holds_our_elements_and_one_script(page: Reader) -> None:
    assert set(page.tags) <= TAGS and page.tags["script"] == 1 and page.comments == 0
    assert page.scripts == LOADER.get_source(None, "page.js")[0]  # type: ignore[arg-type]  # unused there
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "action")]
    styles = [value or "" for name, value in page.attributes if name == "style"]
    assert not [style for style in styles if re.search(r"url\(|expression|@import", style)]


def test_every_name_is_in_the_text_of_the_page(page: Reader) -> None:
    assert [name for name in HOSTILE if printable(name) not in page.text] == []


def test_the_page_shows_no_control_character(report: Path) -> None:
    text = (report / "report.html").read_text(encoding="utf-8")
    assert {one for one in text if not one.isprintable()} <= {"\n", "\N{NO-BREAK SPACE}"}


def test_the_values_under_the_pointer_are_json_with_the_names_as_text(page: Reader) -> None:
    panels = [json.loads(value or "") for name, value in page.attributes if name == "data-panel"]
    labels = {line[0] for panel in panels for line in panel["lines"]}
    assert any("alert(1)" in label for label in labels) and all(label.isprintable() for label in labels)


def test_the_drawings_are_xml_without_anything_that_acts(report: Path) -> None:
    drawings = list(report.glob("*.svg"))
    assert drawings and any("alert(1)" in html.unescape(path.read_text()) for path in drawings)
    for path in drawings:
        for one in ElementTree.parse(path).getroot().iter():
            assert one.tag.rpartition("}")[2] not in ("script", "image", "foreignObject", "a")
            assert not [name for name in one.attrib if name.startswith("on")]


def test_markdown_has_its_columns_and_no_markup(report: Path) -> None:
    tables = (report / "table.md").read_text(encoding="utf-8")
    assert "<" not in tables and not re.search(r"(?<!\\)[\[\]`]", tables) and r"\| a \| b \|" in tables
    for table in tables.split("\n## "):
        rows = [re.sub(r"\\.", "", line) for line in table.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) == 1


def test_latex_has_its_columns_and_no_commands_of_others(report: Path) -> None:
    rows, columns = 0, 0
    for line in (report / "table.tex").read_text(encoding="utf-8").splitlines():
        if begun := re.match(r"\\begin\{tabular\}\{(l?r*)\}", line):
            columns = len(begun[1])
        elif line.endswith(r" \\"):
            bare = re.sub(r"\\[&%$#_{}]|\\text\w+\{\}|\$\\?[a-z-]+\$|\{[\[*]\}", "", line.removesuffix(r" \\"))
            assert bare.count("&") == columns - 1 and not re.search(r"[\\%$#_{}~^\[*<>|\"]", bare), line
            rows += 1
    assert rows > len(HOSTILE)
    assert latex_text(r"a&%$#_{}~^\b") == r"a\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}b"
    assert latex_text("5 ± 1\n− –") == r"5 $\pm$ 1 $-$ --"


@pytest.mark.parametrize("name", ["table.csv", "experiments.csv"])
def test_a_spreadsheet_computes_nothing(report: Path, name: str) -> None:
    """A text that begins as a formula gets an apostrophe; numbers are numbers, below zero too."""
    rows = list(csv.DictReader(io.StringIO((report / name).read_text(encoding="utf-8"))))
    texts = [value for row in rows for value in row.values()]
    assert len(rows) > len(HOSTILE) and "'=1+1" in texts and "'@SUM(1)" in texts
    for value in texts:
        assert not value.startswith(("=", "+", "@", "\t", "\r")) and (value[:1] != "-" or float(value) < 0)


def test_a_terminal_gets_no_control_and_no_markup(report: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "original", "[red]x[/red]", [0.5])
    for folder, expected in ((report, "\\x1b[31m"), (tmp_path, "[red]x[/red]")):
        console = Console(width=400, file=io.StringIO(), record=True)
        console.print(rich_table(compare_runs(read_runs(folder))))
        shown = console.export_text()
        assert expected in shown and not [one for one in shown if not one.isprintable() and one != "\n"]


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("name", ["_hidden", "a$b$c", "実験", "x" * 200, "line\nbreak\x1b", "\ud800"])
def test_odd_names_are_drawn(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "other", name, [0.5, 0.6], gate=[0.5])
    assert name in write_report(tmp_path).runs and (tmp_path / "curves.svg").stat().st_size > 5000


def test_a_warning_a_summary_and_a_model_card_have_no_control(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "\x1b]0;pwned\x07\u202e"
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back at the end
    print_warnings_as_lines()
    line = warnings.formatwarning(DamageWarning(f"checkpoint {hostile}"), DamageWarning, "file", 1)
    assert line == "gradshare: checkpoint \\x1b]0;pwned\\x07\\u202e\n"
    show_result(RunFolder(make_run(tmp_path / hostile, "shared", [0.5])))
    card = Card("mit", hostile, [], [], {"dataset": hostile}).text(hostile, own=True)
    shown = capsys.readouterr().out + card
    assert shown.count("pwned") >= 4 and not [one for one in shown if not one.isprintable() and one != "\n"]
