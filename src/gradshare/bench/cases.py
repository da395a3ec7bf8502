"""What is timed: one meta-iteration of one method, by one library, on one machine. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gradshare.errors import UserError, check_range

Library = Literal["gradshare", "higher", "torchopt"]
Method = Literal["maml", "metasgd", "mamlpp"]
Arm = Literal["original", "shared"]
Engine = Literal["eager", "graph"]
Precision = Literal["float32", "tf32", "bf16"]
ShapeName = Literal["5task-5shot", "5task-1shot", "1task-5shot", "1task-1shot", "cpu"]
SweepName = Literal["tasks", "steps", "shots", "size"]

RIVALS: tuple[Library, ...] = ("higher", "torchopt")
PAPER: tuple[ShapeName, ...] = ("5task-5shot", "5task-1shot", "1task-5shot", "1task-1shot")
SHAPES: dict[ShapeName, dict[str, Any]] = {
    "5task-5shot": {"tasks": 5, "shots": 5, "image": (3, 84, 84)},
    "5task-1shot": {"tasks": 5, "shots": 1, "image": (3, 84, 84)},
    "1task-5shot": {"tasks": 1, "shots": 5, "image": (3, 84, 84)},
    "1task-1shot": {"tasks": 1, "shots": 1, "image": (3, 84, 84)},
    "cpu": {"tasks": 5, "shots": 1, "image": (1, 28, 28)},
}
SWEEPS: dict[SweepName, tuple[int, ...]] = {
    "tasks": (1, 2, 5, 10, 20),
    "steps": (1, 2, 3, 5, 8),
    "shots": (1, 2, 5, 10, 20),
    "size": (28, 42, 56, 84, 112, 168),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time. The defaults are the paper's largest setting: Conv-4, 48 filters, 84x84x3, 5-way 5-shot."""

    library: Library = "gradshare"
    method: Method = "maml"
    arm: Arm = "shared"
    tasks: int = 5
    shots: int = 5
    ways: int = 5
    queries: int = 15
    steps: int = 5
    filters: int = 48
    image: tuple[int, int, int] = (3, 84, 84)  # channels, height, width
    device: str = "cpu"
    engine: Engine = "eager"
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        for name in ("tasks", "shots", "queries", "steps", "filters"):
            check_range(name, getattr(self, name), 1)
        check_range("ways", self.ways, 2)
        if min(self.image[1:]) < 16:
            raise UserError(
                f"size is {min(self.image[1:])}; Conv-4 halves an image four times, so it must be at least 16"
            )
        check_range("size", max(self.image), 1)
        if self.device == "cpu" and self.engine == "graph":
            raise UserError("engine graph is a CUDA graph and needs a GPU: use engine eager on a CPU")
        if self.device == "cpu" and self.precision != "float32":
            raise UserError(f"precision {self.precision} needs a GPU: use precision float32 on a CPU")
        if self.library in RIVALS and (self.method, self.arm, self.engine) != ("maml", "original", "eager"):
            raise UserError(f"{self.library} is timed on the original MAML, operation by operation, and nothing else")

    @property
    def setting(self) -> dict[str, Any]:
        """What two cases have in common where they do the same work."""
        apart = ("library", "method", "arm", "engine", "precision")
        return {name: value for name, value in asdict(self).items() if name not in apart}

    @property
    def shape(self) -> str:
        """The name of the setting, or what it is."""
        for name, fields in SHAPES.items():
            if replace(self, **fields) == self and replace(self, **BASE) == self:
                return name
        channels, height, width = self.image
        text = f"{self.tasks}task-{self.shots}shot {height}x{width}x{channels}"
        differing = {name: getattr(self, name) for name, usual in BASE.items() if getattr(self, name) != usual}
        return " ".join([text, *(f"{name}={value}" for name, value in differing.items())])

    @property
    def what(self) -> str:
        """Who computes what, in a few characters: `maml+gs`, or the name of another library."""
        return self.library if self.library in RIVALS else self.method + ("+gs" if self.arm == "shared" else "")


BASE = {name: getattr(Case, name) for name in ("ways", "queries", "steps", "filters")}  # as every shape has them


def cases_of(
    setting: dict[str, Any],
    methods: tuple[Method, ...],
    arms: tuple[Arm, ...],
    engines: tuple[Engine, ...],
    precisions: tuple[Precision, ...],
    rivals: bool,
) -> list[Case]:
    """All that is to be timed at one setting, the rivals first: then a broken run has something to compare with."""
    ours = [
        Case(method=method, arm=arm, engine=engine, precision=precision, **setting)
        for engine in engines
        for precision in precisions
        for method in methods
        for arm in arms
    ]
    theirs = [
        Case(library=library, arm="original", precision=precision, **setting)
        for precision in dict.fromkeys(as_pytorch_has_it(setting.get("device", "cpu"), each) for each in precisions)
        for library in RIVALS
        if rivals
    ]
    return theirs + ours


def as_pytorch_has_it(device: str, precision: Precision) -> Precision:
    """On a GPU, PyTorch's convolutions take float32 through the TF32 units, unless they are told not to."""
    return "tf32" if device != "cpu" and precision == "float32" else precision


def swept(setting: dict[str, Any], sweep: SweepName, value: int) -> dict[str, Any]:
    """The setting with one of its sizes changed."""
    if sweep != "size":
        return {**setting, sweep: value}
    channels = setting.get("image", Case.image)[0]
    return {**setting, "image": (channels, value, value)}
