"""The tree has few entries, and imports go one way. tests/test_imports.py has what each layer needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"method", "engine", "learners", "data", "runs", "experiments", "reports", "bench", "cli"}
MODULES = {"__init__.py", "__main__.py", "errors.py", "files.py", "py.typed"}


def test_the_package_has_few_entries() -> None:
    entries = {path.name for path in (ROOT / "src" / "gradshare").iterdir()} - {"__pycache__"}
    assert entries >= PACKAGES
    assert entries <= PACKAGES | MODULES
    assert len(entries) <= 14


def test_folders_have_about_a_dozen_entries() -> None:
    folders = [path.parent for path in (ROOT / "src" / "gradshare").rglob("__init__.py")]
    sizes = {
        folder.name: len([entry for entry in folder.iterdir() if entry.name not in ("__init__.py", "__pycache__")])
        for folder in folders
    }
    assert {name: size for name, size in sizes.items() if size > 14} == {}


def test_imports_go_one_way() -> None:
    """The layers are in pyproject.toml, for import-linter; it sees imports inside functions too."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
