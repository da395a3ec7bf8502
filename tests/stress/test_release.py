"""The wheel and the sdist: built as for a release, installed into an empty environment, and used there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import gradshare
from tests.support.shared import made_once

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
SMOKE = """
import torch, gradshare as gs
assert all(getattr(gs, name) is not None for name in gs.__all__)
x, y = torch.randn(200, 8), torch.arange(20).repeat(10)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
learner = gs.maml(model, steps=2, sharing=gs.GradientSharing())
source = gs.tasks(x, y, splits=(10, 5, 5))
run = gs.train(learner, source, "run", epochs=1, iterations=2, queries=3, val_tasks=4, test_tasks=4)
assert 0 <= gs.evaluate(run, tasks=4).accuracy <= 1
print(gs.__file__)
"""


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a program that sees nothing of this checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path) -> None:
    """The sdist, and the wheel that is built from it."""
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for name in filter(lambda name: name and (ROOT / name).is_file() and not name.startswith("results/"), files):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "source", cwd=folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "release", build) / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and what it needs, and nothing else."""

    def make(folder: Path) -> None:
        run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
        pip = folder / "venv" / "bin" / "pip"
        run(pip, "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=folder)

    return made_once(tmp_path_factory, "empty", make) / "venv" / "bin" / "python"


def test_the_files_of_the_wheel_and_the_sdist(built: Path, wheel: Path) -> None:
    version = gradshare.__version__
    assert {path.name for path in built.iterdir()} == {
        f"gradshare-{version}-py3-none-any.whl", f"gradshare-{version}.tar.gz",
    }  # fmt: skip
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    package = ROOT / "src"
    wanted = {path.relative_to(package).as_posix() for path in (package / "gradshare").rglob("*") if path.is_file()}
    assert inside == {name for name in wanted if "__pycache__" not in name}
    assert {"gradshare/py.typed", "gradshare/reports/templates/page.html"} <= inside
    with tarfile.open(built / f"gradshare-{version}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "src/gradshare/py.typed"} <= names


def test_the_metadata_of_the_wheel(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    text = archive.read(name).decode()
    assert "Typing :: Typed" in text and "License-Expression: MIT" in text and "Requires-Python: >=3.11" in text
    assert {line.split()[1] for line in text.splitlines() if line.startswith("Provides-Extra")} == set(EXTRAS)


def test_the_wheel_works_in_an_empty_environment(python: Path, blobs: Path, tmp_path: Path) -> None:
    command = python.with_name("gradshare")
    assert run(command, "--version", cwd=tmp_path).strip() == gradshare.__version__
    place = run(python, "-c", SMOKE, cwd=tmp_path, OMP_NUM_THREADS="1").splitlines()[-1]
    assert Path(place).is_relative_to(python.parents[1])
    options = "--filters 2 --epochs 1 --iterations 2 --val-tasks 4 --test-tasks 4 --ways 3 --queries 3 --threads 1"
    words = ["compare", "--dataset", blobs, *options.split(), "--out", "both"]
    assert "report: both/report.html" in run(command, *words, cwd=tmp_path)
    assert "No broken requirements found" in run(python, "-m", "pip", "check", cwd=tmp_path)


def test_every_extra_can_be_installed(python: Path, wheel: Path, tmp_path: Path) -> None:
    """pip finds everything that they name, beside each other and the rest; nothing is installed."""
    extras = sorted(set(EXTRAS) - {"dev"})
    options = ["--quiet", "--dry-run", "--report", tmp_path / "report.json", "-c", ROOT / "constraints.txt"]
    run(python, "-m", "pip", "install", *options, f"{wheel}[{','.join(extras)}]", cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    found = {one["metadata"]["name"].lower() for one in report["install"]}
    assert {re.split("[>=;]", name)[0] for extra in extras for name in EXTRAS[extra]} <= found
