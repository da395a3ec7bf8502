"""What each layer needs: `method` PyTorch and NumPy alone, `runs` only what a bare GPU machine has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
"""
METHOD = """
import importlib, pkgutil
import gradshare.method

for module in pkgutil.walk_packages(gradshare.method.__path__, "gradshare.method."):
    importlib.import_module(module.name)
others = {name for name in sys.modules if name.startswith("gradshare.") and not name.startswith("gradshare.method")}
print(sorted(others))
"""
CORE = """
import gradshare as gs, torch

learner = gs.maml_plus_plus(gs.Conv4(filters=3, image=(1, 16, 16)), steps=1, sharing=gs.GradientSharing())
state, x, y = learner.init(seed=0), torch.rand(2, 5, 1, 16, 16), torch.arange(5).expand(2, 5)
gs.meta_step(learner, state, gs.optimiser(state, 1e-3), gs.Episodes(x, y, x, y))
print(learner.predict(learner.adapt(state, x, y), x).shape)
"""
RUNS = """
import importlib, pkgutil
import gradshare as gs
import gradshare.engine, gradshare.runs

for package in (gradshare.runs, gradshare.engine):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

from pathlib import Path
from gradshare.runs.build import run
from gradshare.runs.config import RunConfig
from gradshare.runs.display import Silent

small = dict(ways=3, queries=3, tasks=2, steps=1, filters=3, val_tasks=2, test_tasks=2, epochs=1, iterations=1)
run(RunConfig(dataset=sys.argv[1], device="cpu", threads=1, **small), Path("run"), False, Silent())
print(len(gs.load_run("run").metrics))
"""
READ = """
import gradshare.runs.folder, gradshare.runs.config, gradshare.runs.display, gradshare.runs.workers
print("torch" in sys.modules)
"""


def python(code: str, *words: str, blocked: set[str], folder: Path | None = None) -> str:
    words = ("-c", f"BLOCKED = {blocked}\n{BLOCK}\n{code}", *words)
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


OF_THE_LAB = {"cyclopts", "platformdirs", "pooch", "msgspec", "pydantic", "h5py", "ray"}


def test_the_method_loads_nothing_else_and_needs_no_fcntl() -> None:
    blocked = {"fcntl", "filelock", "safetensors", "triton", "PIL", "rich", "matplotlib", "jinja2", *OF_THE_LAB}
    assert python(METHOD, blocked=blocked) == "['gradshare.errors']"


def test_learners_need_torch_and_numpy_alone() -> None:
    blocked = {"matplotlib", "PIL", "rich", "safetensors", "filelock", "jinja2", *OF_THE_LAB}
    assert python(CORE, blocked=blocked) == "torch.Size([2, 5, 5])"


def test_runs_import_and_train_on_a_machine_without_the_lab(blobs: Path, tmp_path: Path) -> None:
    assert python(RUNS, str(blobs), blocked=OF_THE_LAB, folder=tmp_path) == "1"


def test_runs_are_read_without_torch() -> None:
    assert python(READ, blocked=set()) == "False"
