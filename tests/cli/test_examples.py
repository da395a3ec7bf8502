"""The examples and the README's code run, and do what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_sinusoid_example_learns_to_regress(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "examples" / "sinusoid.py"), "--out", str(tmp_path), "--epochs", "2"]
    result = subprocess.run([*words, "--iterations", "40"], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    for arm in ("original", "shared"):
        lines = [json.loads(line) for line in (tmp_path / arm / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["val_loss"] < 0.98 * lines[0]["val_loss"]
        assert lines[-1]["val_accuracy"] is None
        best = json.loads((tmp_path / arm / "summary.json").read_text())["best_epoch"]
        assert best == min(lines, key=lambda line: line["val_loss"])["epoch"]
    assert (tmp_path / "report.html").exists()


def readme_code() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(readme_code())))
def test_the_readme_code_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(readme_code()[number], "README.md", "exec"), {"__name__": "readme"})
