"""What a run is: every option, its default and its meaning, in one place. Imports nothing heavy."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gradshare.errors import UserError

Method = Literal["maml", "metasgd", "mamlpp", "fomaml", "anil"]
Arm = Literal["original", "shared", "half-rate", "gate-only", "batch-only", "memory-only"]
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long to train, on which tasks, and how to judge it."""

    ways: int = 5
    """Classes in a task."""
    shots: int = 1
    """Support examples of each class."""
    queries: int = 15
    """Query examples of each class."""
    tasks: int = 5
    """Tasks in a batch (the paper's T)."""
    outer_lr: float = 1e-3
    """Rate of the outer Adam."""
    gradient_clamp: float = 0.0
    """Clamp the outer gradient by the network's weights to plus or minus this; 0 is off (MAML++ for ImageNet: 10)."""
    epochs: int = 20
    """Epochs to train."""
    iterations: int = 100
    """Meta-iterations in an epoch."""
    val_tasks: int = 600
    """Validation tasks after each epoch, always the same."""
    test_tasks: int = 600
    """Test tasks at the end; 0 leaves the test out."""
    eval_batch: int = 25
    """Tasks evaluated at a time."""
    seed: int = 0
    """Decides initial weights and tasks: two methods with one seed see the same tasks."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            _check(name, kind, getattr(self, name))
        if self.test_tasks == 1:
            raise UserError("test_tasks is 1; an interval over tasks needs at least 2, and 0 leaves the test out")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Training):
    """One run: a method on a data set."""

    dataset: str = "glyphs"
    """Name of a data set (see `gradshare data list`), or a folder."""
    method: Method = "maml"
    """The algorithm."""
    arm: Arm = "shared"
    """With sharing, the original without, or one of the controls."""
    norm: Literal["global", "tensor"] = "global"
    """What the shared gradient is normalised over."""
    inner_lr: float = 0.1
    """Inner learning rate; where rates are learned, their start."""
    steps: int = 5
    """Inner steps (the paper's K)."""
    filters: int = 48
    """Filters in each layer of the Conv-4 backbone."""
    adapt_norm: bool = False
    """Adapt the gain and bias of batch norm in the inner loop too."""
    recipe: Literal["reference", "paper"] = "reference"
    """MAML++: values of the next three as its code ships, or as its paper says."""
    multi_step_epochs: int | None = None
    """MAML++: epochs until the last step's loss is the only one."""
    first_order_epochs: int | None = None
    """MAML++: epochs of first-order gradients at the start."""
    final_outer_rate: float | None = None
    """MAML++: end of the cosine on the outer rate, as a share of its start."""
    pixels: Literal["unit", "imagenet"] = "unit"
    """Pixels from 0 to 1, or with ImageNet's mean and deviation taken out."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto is a GPU where there is one."""
    engine: Literal["auto", "eager", "graph"] = "auto"
    """A meta-iteration operation by operation, or recorded as one CUDA graph; auto is graph on a GPU."""
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    """float32: PyTorch's operations; tf32, bf16: our GPU kernels; auto is tf32 where they fit, else float32."""
    threads: int = 0
    """CPU threads; 0 is one for each core."""


LOWEST = {
    "ways": 2,
    "val_tasks": 2,
    "gradient_clamp": 0,
    "test_tasks": 0,
    "seed": 0,
    "threads": 0,
    "multi_step_epochs": 0,
    "first_order_epochs": 0,
    "final_outer_rate": 0,
}  # of every other whole number: 1
ABOVE_ZERO = ("outer_lr", "inner_lr")


def _check(name: str, kind: Any, value: Any) -> None:
    """Refuse a value of the wrong kind, or out of range."""
    kinds = get_args(kind) or (kind,)
    if get_origin(kind) is Literal:
        if value not in kinds:
            raise UserError(f"{name} is one of {', '.join(kinds)}, not {value!r}")
    elif type(value) not in kinds and not (type(value) is int and float in kinds):
        raise UserError(f"{name} is {value!r}; it must be a {WORDS[kinds[0]]}")
    elif name in ABOVE_ZERO and not 0 < value < math.inf:
        raise UserError(f"{name} is {value}; it must be above 0")
    elif type(value) in (int, float) and name not in ABOVE_ZERO and not LOWEST.get(name, 1) <= value < math.inf:
        raise UserError(f"{name} is {value}; it must be at least {LOWEST.get(name, 1)}")


WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def config_text(config: dict[str, Any]) -> str:
    """What `config.json` holds."""
    return json.dumps({"version": VERSION, **config}, indent=2, default=str) + "\n"


def read_config(folder: Path) -> dict[str, Any]:
    """The options of a run, as `config.json` in its folder has them."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a run: it has no config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict) or content.pop("version", None) != VERSION:
        raise UserError(f"{path} is of another version of gradshare, or not a run's configuration")
    return content


def run_config(content: dict[str, Any], where: Path) -> RunConfig:
    """A RunConfig from `config.json`, refusing what it does not know."""
    unknown = set(content) - {field.name for field in fields(RunConfig)}
    if unknown:
        raise UserError(
            f"{where / 'config.json'} has options that this version does not know: {', '.join(sorted(unknown))}"
        )
    try:
        return RunConfig(**content)
    except TypeError as error:
        raise UserError(f"{where / 'config.json'} is damaged: {error}") from None
