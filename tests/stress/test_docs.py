"""The site: built from nothing with its notebooks, whole without a network, and looked at in a browser."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import gradshare as gs
from tests.support.browser import CHROMIUM, PATIENCE, Page, browser
from tests.support.shared import made_once

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.md"))
MOST_SECONDS = 240  # of processor time for all notebooks, on two cores
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "site", build_site) / "html"


def build_site(folder: Path) -> None:
    """The site as `make docs` builds it, with every notebook run anew."""
    source = shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("_build", "__pycache__"))
    for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "results/paper/report.html"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)  # what pages include
        shutil.copy(ROOT / name, folder / name)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["--fail-on-warning", "--keep-going", "-d", folder / "doctrees", source, folder / "html"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *map(str, words)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("Executed notebook") == len(NOTEBOOKS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_SECONDS


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


class Links(HTMLParser):
    """What a page loads, what it links to, and the places that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("index", "search", "next", "prev", "canonical"):
            self.loads.append(found["href"])
        elif tag != "a" and "src" in found:
            self.loads.append(found["src"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {path: Links(path) for path in sorted(site.rglob("*.html"))}


def test_every_public_name_has_its_place(pages: dict[Path, Links], site: Path) -> None:
    wanted = {f"gradshare.{name}" for name in gs.__all__ if name != "testing"}
    wanted |= {"module-gradshare.testing", "gradshare.testing.check_rule"}
    assert wanted - pages[site / "api.html"].places == set()
    text = (site / "api.html").read_text(encoding="utf-8")
    bare = [name for name in gs.__all__ if not re.search(rf'id="gradshare.{name}".*?</dt>\s*<dd>\s*<p>', text, re.S)]
    assert bare == ["testing"]  # a module: its function has the text


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Links], site: Path) -> None:
    loads = {(path.name, one) for path, page in pages.items() for one in page.loads if not one.startswith("data:")}
    assert len(loads) > 100
    assert [one for one in loads if urlsplit(one[1]).scheme or one[1].startswith("//")] == []
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(url\(|@import|href=)\s*[\"']?(https?:)?//", text), path


def test_links_inside_the_site_lead_somewhere(pages: dict[Path, Links], site: Path) -> None:
    lost = []
    for path, page in pages.items():
        if path.name in ("search.html", "genindex.html", "404.html"):
            continue
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not target.exists() or (place and target in pages and place not in pages[target].places):
                lost.append((path.relative_to(site).as_posix(), link))
    assert lost == []


def test_mathematics_is_in_the_page_itself(site: Path) -> None:
    text = (site / "concepts.html").read_text(encoding="utf-8")
    assert text.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') >= 3
    assert "<mfrac>" in text and not re.search(r"<script[^>]*(mathjax|katex)", text, re.I)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_pictures_and_no_complaints(notebook: Path, site: Path) -> None:
    text = (site / "notebooks" / f"{notebook.stem}.html").read_text(encoding="utf-8")
    assert len(re.findall(r'<img[^>]*src="\.\./_images/[^"]*\.svg"', text)) >= (1 if notebook.stem == "rule" else 2)
    run = json.loads((site.parent / "jupyter_execute" / "notebooks" / f"{notebook.stem}.ipynb").read_text())
    outputs = [one for cell in run["cells"] for one in cell.get("outputs", [])]
    assert outputs and not [one for one in outputs if one.get("name") == "stderr" or one["output_type"] == "error"]


@in_a_browser
def test_pages_in_a_browser(tab: Page, site: Path, pages: dict[Path, Links]) -> None:
    """Light and dark, wide and narrow: nothing sticks out, nothing complains, nothing is asked of a network."""
    shown = {}
    for path in pages:
        for width, dark in ((1400, False), (390, True)):
            tab.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
            )
            tab.complaints.clear()
            tab.open(path, dark=dark)
            assert tab.value("document.documentElement.scrollWidth") <= width, (path.name, width)
            assert tab.complaints == [] and all(url.startswith(("file:", "data:")) for url in tab.requests), path.name
            shown[dark] = tab.value("getComputedStyle(document.body).backgroundColor")
    tab.call("Emulation.clearDeviceMetricsOverride")
    assert shown == {False: "rgb(255, 255, 255)", True: "rgb(19, 20, 22)"}


@in_a_browser
def test_search_finds_a_name_and_a_word(tab: Page, site: Path) -> None:
    for query, page in (("GradientSharing", "api.html"), ("contact sheet", "data.html")):
        tab.call("Page.navigate", url=f"{(site / 'search.html').as_uri()}?q={query.replace(' ', '+')}")
        until = time.monotonic() + PATIENCE
        while page not in (found := tab.value("[...document.querySelectorAll('ul.search a')].map(a => a.href).join()")):
            assert time.monotonic() < until, (query, found)
            time.sleep(0.1)
