"""The report page in a real browser, where one is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from gradshare.reports import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "<script>document.title = 'broken into'</script>"
CURVES = {"original": [0.2, 0.3], "shared": [0.3, 0.5], "half-rate": [0.25, 0.4], HOSTILE: [0.2, 0.2]}

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    for number, (arm, curve) in enumerate(CURVES.items()):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"arm": arm, "method": "maml", "dataset": "glyphs", "ways": 5}))
        lines = [{"epoch": e, "val_accuracy": v, "val_interval": 0.01} for e, v in enumerate(curve, start=1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)
    return tmp_path / "report.html"


def rendered(page: Path) -> str:
    quiet = ["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    plain = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-sync",
        f"--user-data-dir={page.parent / 'profile'}",
    ]
    command = [str(BROWSER), *plain, *quiet, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def first_cells(dom: str) -> list[str]:
    body = dom.split("<tbody>")[1].split("</tbody>", maxsplit=1)[0]
    return [unescape(re.sub(r"<[^>]*>", "", row.split("</td>")[0])) for row in body.split("<tr>")[1:]]


def test_report_in_browser(page: Path) -> None:
    dom = rendered(page)
    assert first_cells(dom) == [f"{arm} (unfinished)" for arm in CURVES]
    assert "<title>Gradient sharing: MAML on glyphs, 5-way</title>" in dom
    assert dom.count("<svg") == 1 and "What this shows" in dom
    assert dom.count("<th><button>") == 11  # our own script did run: the headings can be clicked


def test_a_click_on_a_heading_sorts(page: Path) -> None:
    click = "<script>document.querySelectorAll('table.sortable button')[1].click()</script></body>"
    text = page.read_text()
    without_policy = re.sub(r"<meta http-equiv[^>]*>", "", text)
    page.write_text(without_policy.replace("</body>", click))
    names = first_cells(rendered(page))
    assert [name.removesuffix(" (unfinished)") for name in names] == ["shared", "half-rate", "original", HOSTILE]
