"""The core needs PyTorch and NumPy alone."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("matplotlib", "PIL", "rich", "cyclopts", "safetensors", "platformdirs", "h5py"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import gradshare as gs, torch

learner = gs.maml_plus_plus(gs.Conv4(filters=3, image=(1, 16, 16)), steps=1, sharing=gs.GradientSharing())
state, x, y = learner.init(seed=0), torch.rand(2, 5, 1, 16, 16), torch.arange(5).expand(2, 5)
gs.meta_step(learner, state, gs.optimiser(state, 1e-3), gs.Episodes(x, y, x, y))
print(learner.predict(learner.adapt(state, x, y), x).shape)
"""


def test_the_core_imports_and_learns_with_torch_and_numpy_alone() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert "torch.Size([2, 5, 5])" in result.stdout, result.stderr
