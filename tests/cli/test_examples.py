"""The code in README.md, docs/ and examples/ runs, and the documents agree with the tree."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest

import gradshare

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/notebooks/*.md", "results/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
NOT_RUN = {"distributed.md": "trains for minutes"}  # page: why its code is not run here
LONGEST = 120  # characters of a line


def code_of(page: Path) -> str:
    """All Python blocks of a page, in one piece: a later block may use what an earlier one defined."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if code_of(page) and page.name not in NOT_RUN], ids=lambda page: page.name
)
def test_the_code_of_a_page_runs(page: Path, blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(blobs, tmp_path / "data" / "glyphs")  # small images: to draw the real ones takes 15 s
    monkeypatch.setenv("GRADSHARE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    code = compile(code_of(page), page.name, "exec", dont_inherit=True)  # as a reader's, without annotations from here
    exec(code, {"__name__": "page"})


def test_the_sinusoid_example_learns_to_regress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--out", str(tmp_path), "--epochs", "2", "--iterations", "60"]
    monkeypatch.setattr("sys.argv", ["sinusoid.py", *words])
    runpy.run_path(str(ROOT / "examples" / "sinusoid.py"), run_name="__main__")
    for arm in ("original", "shared"):
        lines = [json.loads(line) for line in (tmp_path / arm / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["val_loss"] < 0.97 * lines[0]["val_loss"]
        assert lines[-1]["val_accuracy"] is None
        assert json.loads((tmp_path / arm / "summary.json").read_text())["best_epoch"] == lines[-1]["epoch"]
    assert (tmp_path / "report.html").exists()


def prose_of(page: Path) -> list[str]:
    """The lines of a page without code blocks and tables."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for line in text.splitlines() if not line.startswith(("|", "    "))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_documents_are_short(page: Path) -> None:
    without_links = {line: re.sub(r"\]\([^)]*\)", "]", line) for line in prose_of(page)}
    assert [line for line, text in without_links.items() if len(text) > LONGEST] == []


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > LONGEST] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_of_documents_exist(page: Path) -> None:
    """Relative links, and paths in backticks that begin with a folder of the repository."""
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    if page.name not in ("CHANGELOG.md", "log.md"):  # history: it names files as they were
        paths = re.findall(r"`((?:src|tests|docs|examples|benchmarks|results)/[\w./*+~-]*)`", text)
        paths = [path for path in paths if not path.startswith("docs/_build")]  # made by make docs
        missing += [path for path in paths if not any([*at.glob(path.rstrip("/"))] for at in (ROOT, page.parent))]
    assert missing == []


def test_the_picture_of_the_method_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures" / "method.py"))["picture"]()
    assert drawn == (ROOT / "docs" / "pictures" / "method.svg").read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    version = re.escape(gradshare.__version__)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert re.search(rf"^## \[{version}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert f"gradshare-{gradshare.__version__}-py3-none-any.whl" in (ROOT / "docs" / "start.md").read_text("utf-8")


def test_the_map_lists_every_module_and_nothing_else() -> None:
    """docs/architecture.md has a table for each package, with a row for each module."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed: set[str] = set()
    package = ""
    for line in re.findall(r"<!-- modules -->\n(.*?)<!-- end -->", text, flags=re.DOTALL)[0].splitlines():
        if heading := re.match(r"### ([\w/]+/)$", line):
            package = heading[1]
        elif row := re.match(r"\| `([\w.]+)` \|", line):
            listed.add(package.removeprefix("gradshare/") + row[1])
    source = ROOT / "src" / "gradshare"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if has_code(path)}
    assert listed == modules


def has_code(path: Path) -> bool:
    """Whether a module is more than a docstring and a few imports."""
    return path.name != "__init__.py" or len(path.read_text(encoding="utf-8").splitlines()) > 10
