"""What a finished run says of itself: `summary.json`, and `DONE` with its checksums. Imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType
from typing import Any

from gradshare.errors import UserError
from gradshare.files import parse_json, read_bytes, read_text, sha256, write_whole


def finish(folder: Path, summary: dict[str, Any]) -> None:
    """Write the summary; then `DONE`, which `sha256sum --check` can read."""
    write_whole(folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    write_whole(folder / "DONE", _sums(folder))


def test_of(folder: Path, epoch: int) -> dict[str, Any] | None:
    """The test of an epoch alone, where the run is finished and its best epoch was this one."""
    if not (folder / "DONE").exists():
        return None
    if reason := damage(folder):
        raise UserError(f"the run in {folder} is damaged: {reason}; resume it, and it is tested again")
    test = parse_json(read_bytes(folder / "summary.json"))["test"]
    return test["best"] if test is not None and test["best"]["epoch"] == epoch else None


def damage(folder: Path) -> str:
    """What is not as it was when the run in a folder was finished; "" if all is, or the run is not finished."""
    if not (folder / "DONE").exists():
        return ""
    try:
        _check_summary(parse_json(read_bytes(folder / "summary.json")))
        return "" if read_text(folder / "DONE") == _sums(folder) else "its files do not match the checksums in DONE"
    except (OSError, ValueError) as error:
        return f"summary.json: {error.strerror if isinstance(error, OSError) else error}"


def _check_summary(summary: Any) -> None:
    """Refuse what cannot be shown or passed on as a run's result."""
    try:
        test = summary["test"]
        results = [] if test is None else [test["best"], test["ensemble"]]
        counts = [summary["best_epoch"], *([] if test is None else [test["tasks"], test["best"]["epoch"]])]
        values = [result[name] for result in results for name in ("accuracy", "interval", "loss")]
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is not as gradshare writes it ({error})") from None
    if {*map(type, counts)} != {int} or not {*map(type, values)} <= {int, float, NoneType}:
        raise ValueError("a number in it is none")


def _sums(folder: Path) -> str:
    names = ("config.json", "metrics.jsonl", "summary.json")
    return "".join(f"{sha256(read_bytes(folder / name))}  {name}\n" for name in names)
