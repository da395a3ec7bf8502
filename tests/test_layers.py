"""The tree has few entries, and imports go one way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"method", "engine", "learners", "data", "runs", "experiments", "reports", "bench", "cli"}
MODULES = {"__init__.py", "__main__.py", "errors.py", "files.py", "py.typed"}

METHOD_ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "PIL", "matplotlib", "rich", "cyclopts", "safetensors", "platformdirs", "triton"):
            raise ImportError(name)

sys.modules.pop("fcntl", None)
sys.meta_path.insert(0, Blocked())
import pkgutil
from importlib import import_module
import gradshare.method

for module in pkgutil.iter_modules(gradshare.method.__path__):
    import_module(f"gradshare.method.{module.name}")
print(*sorted(name for name in sys.modules if name.startswith("gradshare.")))
"""


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


def test_the_method_needs_nothing_but_itself() -> None:
    """PyTorch, NumPy, `method` and `errors`; also where there is no fcntl, as on Windows."""
    result = subprocess.run(
        [sys.executable, "-c", METHOD_ALONE], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    loaded = {name.split(".")[1] for name in result.stdout.split()}
    assert loaded == {"errors", "method"}
