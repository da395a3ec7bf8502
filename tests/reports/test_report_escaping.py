"""Names that others chose stay text in every file of a report, whatever they look like."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from gradshare.reports.page_style import SCRIPT
from gradshare.runs.model_card import Card
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reports.test_reports import make_run
from tests.support.browser import CHROMIUM, browser
from tests.support.fuzzing import call

import gradshare.reports.write
from gradshare.cli.app import _print_summary
from gradshare.errors import DamageWarning, print_warnings_as_lines, printable
from gradshare.reports import write_report
from gradshare.reports.formats import latex_text

NAMES = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "'><svg/onload=alert(1)>", "</script><b>x"]
NAMES += [
    "</style></title></svg>",
    "<!--",
    "-->]]>",
    "{{7*7}}${7*7}",
    "&lt;b&gt;&amp;",
    "\u202egnp.exe",
    "java\tscript:x",
]
NAMES += [
    "line\nbreak\r\x00\x1b[31m\x07",
    "=1+1",
    "@SUM(1)",
    "-2+3",
    "+1",
    "| a | b |",
    "[2ex]",
    "*",
    "`x` [x](http://x)",
]
NAMES += [
    "\\input{x}%$#_&~^{}",
    "%s%n{0}",
    "![x](http://x)",
    "\ud800",
    "' onmouseover='x",
    "\u2028\u2066x",
    "tab\there",
]
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2", "h3", "p", "dl", "dt"),
    *(
        "dd",
        "div",
        "b",
        "small",
        "i",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "figcaption",
        "code",
        "pre",
    ),
    *("details", "summary", "span", "script", "svg", "g", "path", "defs", "clippath", "rect", "use", "text"),
}


class Reader(HTMLParser):
    """The elements of a page with their attributes, its text, and what its scripts hold."""

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


def write_runs(folder: Path, names: list[str]) -> None:
    """An experiment for each name, which is all in it that has a name; three are data sets, with their own figures."""
    for number, name in enumerate(names):
        plain = re.sub(r"[/\0\ud800]", "_", name)
        place = folder / f"{number} {plain}"
        for arm in ("original", name):
            options = {"dataset": names[number % 3], "method": name, name: name, "seed": name, "precision": [name]}
            make_run(place / ("o" if arm == "original" else "s"), arm, [0.2, 0.3 + number / 100], gate=[0.5], **options)
        note = folder / ".grid" / place.name / "s.failure.txt"
        note.parent.mkdir(parents=True)
        note.write_bytes(name.encode(errors="replace"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    write_runs(folder, NAMES)
    draw = gradshare.reports.write.image
    with pytest.MonkeyPatch.context() as patched:  # a PNG is only slow
        patched.setattr(gradshare.reports.write, "image", lambda one, form: draw(one, form) if form == "svg" else b"")
        write_report(folder, command=" ".join(NAMES))
    return folder


@pytest.fixture(scope="module")
def page(report: Path) -> Reader:
    return Reader((report / "report.html").read_text(encoding="utf-8"))


def test_the_page_holds_our_elements_and_one_script(page: Reader) -> None:
    assert set(page.tags) <= TAGS and page.tags["script"] == 1 and page.comments == 0
    assert page.scripts == SCRIPT
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "action", "formaction")]
    links = [value or "" for name, value in page.attributes if "href" in name]
    assert links and all(value.startswith("#") for value in links)
    styles = [value or "" for name, value in page.attributes if name == "style"]
    assert not [style for style in styles if re.search(r"url\((?!#)|expression|@import", style)]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_in_the_text_of_the_page(page: Reader, name: str) -> None:
    assert printable(name).replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}") in page.text


def test_the_page_shows_no_control_and_turns_no_writing_around(report: Path) -> None:
    text = (report / "report.html").read_text(encoding="utf-8")
    assert {one for one in text if not one.isprintable()} <= {"\n", "\N{NO-BREAK SPACE}"}


def test_the_values_under_the_pointer_are_json_with_the_names_as_text(page: Reader) -> None:
    panels = [json.loads(value or "") for name, value in page.attributes if name == "data-panels"]
    labels = {curve["label"] for figure in panels for panel in figure for curve in panel["curves"]}
    assert any("alert(1)" in label for label in labels) and all(label.isprintable() for label in labels)


def test_the_drawings_are_xml_without_anything_that_acts(report: Path) -> None:
    drawings = list(report.glob("*.svg"))
    assert drawings
    for path in drawings:
        found = ElementTree.parse(path).getroot().iter()
        kinds = {(one.tag.rpartition("}")[2], *one.attrib) for one in found}
        assert not kinds & {("script",), ("image",), ("foreignObject",), ("a",)}
        assert not [one for kind in kinds for one in kind if one.startswith("on")]


def test_a_table_in_markdown_has_its_columns_and_no_markup(report: Path) -> None:
    tables = (report / "table.md").read_text(encoding="utf-8")
    assert "<" not in tables and not re.search(r"(?<!\\)[\[\]`]", tables)
    for table in tables.split("\n## "):
        rows = [re.sub(r"\\.", "", line) for line in table.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) == 1
    assert r"\| a \| b \|" in tables


def test_a_table_in_latex_has_its_columns_and_no_commands_of_others(report: Path) -> None:
    rows, columns = 0, 0
    for line in (report / "table.tex").read_text(encoding="utf-8").splitlines():
        if begun := re.match(r"\\begin\{tabular\}\{(l?r*)\}", line):
            columns = len(begun[1])
        elif line.endswith(r" \\"):
            bare = re.sub(r"\\[&%$#_{}]|\\text\w+\{\}|\$\\?[a-z-]+\$|\{[\[*]\}", "", line.removesuffix(r" \\"))
            assert bare.count("&") == columns - 1 and not re.search(r"[\\%$#_{}~^\[*<>|\"]", bare), line
            rows += 1
    assert rows > len(NAMES)


def test_all_that_means_something_to_latex_is_escaped() -> None:
    assert latex_text(r"a&%$#_{}~^\b") == (r"a\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}b")


@pytest.mark.parametrize("name", ["table.csv", "experiments.csv"])
def test_a_spreadsheet_computes_nothing(report: Path, name: str) -> None:
    """A text that begins as a formula gets an apostrophe; numbers are numbers, below zero too."""
    rows = list(csv.DictReader(io.StringIO((report / name).read_text(encoding="utf-8"))))
    texts = [value for row in rows for value in row.values()]
    assert len(rows) > len(NAMES) and "'=1+1" in texts and "'@SUM(1)" in texts
    for value in texts:
        assert not value.startswith(("=", "+", "@", "\t", "\r")) and (value[:1] != "-" or float(value) < 0)


def test_a_terminal_gets_no_control(report: Path) -> None:
    for words in (
        ["report", str(report / "11 line\nbreak\r_\x1b[31m\x07")],
        ["report", str(report / "nothing\x1b[31m")],
    ):
        ended = call(*words)
        assert "\\x1b[31m" in ended.out + ended.err
        assert not [one for one in ended.err if not one.isprintable() and one != "\n"]
        assert not [one for one in ended.out.rpartition("report: ")[0] if not one.isprintable() and one != "\n"]


def test_a_warning_a_summary_and_a_model_card_have_no_control(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "\x1b]0;pwned\x07\u202e"
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back at the end
    print_warnings_as_lines()
    assert warnings.formatwarning(DamageWarning(f"checkpoint {hostile}"), DamageWarning, "file", 1) == (
        "gradshare: checkpoint \\x1b]0;pwned\\x07\\u202e\n"
    )
    _print_summary(Path(hostile), {"best_epoch": hostile, "test": None})
    card = Card("mit", hostile, [], [], {"dataset": hostile}).text(hostile, own=True)
    shown = capsys.readouterr().out + card
    assert shown.count("pwned") >= 4 and not [one for one in shown if not one.isprintable() and one != "\n"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_a_browser_runs_nothing_and_asks_for_nothing(report: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as tab:
        tab.open(report / "report.html")
        assert tab.value("document.querySelectorAll('script').length") == 1
        assert tab.value("document.querySelectorAll('img, iframe, object, embed, link, form, a[href]').length") == 0
        shown = tab.value("document.body.innerText")
        assert all(name in shown for name in NAMES if name.isprintable() and "  " not in name)
        assert len(tab.requests) == 1 and tab.complaints == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Counter[str]]]:
    """Where pages are written, without their drawings, and the elements of a page with a name as all names are."""
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradshare.reports.write, "image", lambda *_: b'<svg viewBox="0 0 1 1"></svg>')
        yield folder, elements(folder / "plain", "wren")


def elements(folder: Path, name: str) -> Counter[str]:
    make_run(folder / "run", name, [0.2, 0.3], dataset=name, method=name, extra=name)
    write_report(folder)
    return Reader((folder / "report.html").read_text(encoding="utf-8")).tags


@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(name=st.text(st.one_of(st.sampled_from("<>&\"'/!-={}[]()|\\\n#%"), st.characters()), min_size=1, max_size=12))
def test_any_name_gives_the_same_elements(plain: tuple[Path, Counter[str]], name: str) -> None:
    folder, expected = plain
    assert elements(folder / f"{len(list(folder.iterdir()))}", name) == expected
