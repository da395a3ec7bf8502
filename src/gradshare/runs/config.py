"""What a run is: every option, its default and its meaning, in one place. Imports nothing heavy."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gradshare.errors import MOST, MOST_SEED, MOST_THREADS, UserError, check_range, shown
from gradshare.files import opened, parse_json, read_text, sealed, written_by_newer

Method = Literal["maml", "metasgd", "mamlpp", "fomaml", "anil"]
Arm = Literal["original", "shared", "half-rate", "gate-only", "batch-only", "memory-only", "conditioned"]
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
    """With sharing, the original without, one of the controls, or sharing conditioned on the task."""
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
    """CPU threads; 0 is one for each core that the process may use."""
    deterministic: bool = False
    """The same bits in every run on a GPU too, by PyTorch's slower algorithms; on a CPU that is always so."""

    @property
    def rate_falls(self) -> bool:
        """Whether the outer rate of an epoch depends on how many there are."""
        if self.method != "mamlpp":
            return False
        from gradshare.learners.algorithms import RECIPES

        given = self.final_outer_rate
        return (RECIPES[self.recipe].final_outer_rate if given is None else given) != 1


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
HIGHEST = {"seed": MOST_SEED, "threads": MOST_THREADS}  # of every other number: MOST
ABOVE_ZERO = ("outer_lr", "inner_lr")


def _check(name: str, kind: Any, value: Any) -> None:
    """Refuse a value of the wrong kind, or out of range."""
    kinds = get_args(kind) or (kind,)
    if get_origin(kind) is Literal:
        if value not in kinds:
            raise UserError(f"{name} is one of {', '.join(kinds)}, not {shown(value)}")
    elif type(value) not in kinds and not (type(value) is int and float in kinds):
        raise UserError(f"{name} is {shown(value)}; it must be a {WORDS[kinds[0]]}")
    elif name in ABOVE_ZERO and not 0 < value < math.inf:
        raise UserError(f"{name} is {shown(value)}; it must be above 0")
    elif type(value) in (int, float):
        check_range(name, value, 0 if name in ABOVE_ZERO else LOWEST.get(name, 1), HIGHEST.get(name, MOST))


WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def config_text(config: dict[str, Any]) -> str:
    """What `config.json` holds."""
    return json.dumps(sealed({"version": VERSION, **config}), indent=2) + "\n"


def read_config(folder: Path) -> dict[str, Any]:
    """The options of a run, as `config.json` in its folder has them."""
    path = folder / "config.json"
    try:
        content = parse_json(read_text(path))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a run: it has no config.json") from None
    except NotADirectoryError:
        raise UserError(f"{folder} is not a run: it is a file") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict) or type(content.get("version")) is not int:
        raise UserError(f"{path} is not a run's configuration: it has no version")
    try:
        content = opened(content) if "sha256" in content else content  # runs begun before 0.1 have none
    except ValueError as error:
        raise UserError(f"{path} was changed or is damaged: {error}; restore it from a copy") from None
    version = content.pop("version")
    if version > VERSION:
        raise UserError(f"{path} {written_by_newer('configuration', version, VERSION)}")
    if version < VERSION:
        raise UserError(f"{path} is of version {version}, which never was")
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


def identity(config: dict[str, Any]) -> str:
    """What tells runs apart: a digest of all options but how long to go on."""
    return str(sealed({name: value for name, value in config.items() if name != "epochs"})["sha256"])


def another_run(folder: Path, epochs: int, more: int) -> UserError:
    """Why a run whose outer rate falls over its epochs cannot have more of them."""
    return UserError(
        f"the outer rate of the run in {folder} falls over its {epochs} epochs, so one of {more} is another run:"
        " choose another folder"
    )


def taken_up(config: RunConfig, folder: Path, longer: bool = False) -> RunConfig:
    """The configuration of a run that may have begun in `folder`, with what it settled for the machine then.

    A run goes on with the device, the threads, ... that it began with, wherever it is taken up. Refuses other options
    than its own, but for more epochs where `longer`.
    """
    if not (folder / "config.json").exists():
        return config
    stored = asdict(run_config(read_config(folder), folder))
    left_open = {name for name, value in asdict(config).items() if value == "auto"}
    left_open |= {"threads"} if config.threads == 0 else set()
    if longer and config.epochs > stored["epochs"]:
        if config.rate_falls:
            raise another_run(folder, stored["epochs"], config.epochs)
        stored["epochs"] = config.epochs
    for name, value in asdict(config).items():
        if name not in left_open and value != stored[name]:
            raise UserError(
                f"the run in {folder} has {stored[name]} epochs, not {value}; give --epochs with as many, or more"
                if name == "epochs"
                else f"the run in {folder} was begun with {name} = {stored[name]!r}, not {value!r};"
                " give the same options as then, or choose another folder"
            )
    return RunConfig(**stored)
