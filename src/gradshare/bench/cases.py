"""What is timed: one meta-iteration of one method, by one library, on one device. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gradshare.errors import UserError, check_range

Library = Literal["gradshare", "higher", "torchopt"]
Method = Literal[
    "maml", "metasgd", "mamlpp", "momentum", "adam", "sparsemaml", "metacurvature", "alfa", "anil", "boil", "adaptnorm"
]
Arm = Literal["original", "shared"]
Engine = Literal["eager", "graph", "compiled"]
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
    """One thing to time. The defaults are the paper's largest setting: Conv-4, 48 filters, 84x84x3, 5-way 5-shot.

    Example:
        >>> Case(shots=1).shape, Case(shots=1, steps=2).shape
        ('5task-1shot', '5task-1shot 84x84x3 steps=2')
    """

    library: Library = "gradshare"
    method: Method = "maml"
    arm: Arm = "shared"
    tasks: int = 5
    shots: int = 5
    ways: int = 5
    queries: int = 15
    steps: int = 5
    filters: int = 48  # of conv4
    backbone: str = "conv4"  # or resnet12, vit, package.module:Class
    image: tuple[int, int, int] = (3, 84, 84)  # channels, height, width
    device: str = "cpu"
    engine: Engine = "eager"
    precision: Precision = "float32"
    checkpoint: bool = False

    def __post_init__(self) -> None:
        for name in ("tasks", "shots", "queries", "steps", "filters"):
            check_range(name, getattr(self, name), 1)
        check_range("ways", self.ways, 2)
        if self.backbone == "conv4" and min(self.image[1:]) < 16:
            raise UserError(
                f"size is {min(self.image[1:])}; Conv-4 halves an image four times, so it must be at least 16"
            )
        check_range("size", max(self.image), 1)
        if self.device == "cpu" and self.engine == "graph":
            raise UserError("engine graph needs a GPU: use engine eager on a CPU")
        if self.device != "cpu" and self.engine == "compiled":
            raise UserError("engine compiled is for a CPU: on a GPU precisions tf32 and bf16 compile a network")
        if self.device == "cpu" and self.precision == "tf32":
            raise UserError("precision tf32 is arithmetic of NVIDIA GPUs: on a CPU use precision float32 or bf16")
        if self.library in RIVALS and (self.method, self.arm, self.engine) != ("maml", "original", "eager"):
            raise UserError(f"{self.library} is timed with method maml, arm original and engine eager only")

    @property
    def setting(self) -> dict[str, Any]:
        """The fields that are equal in two cases that do the same work."""
        different = ("library", "method", "arm", "engine", "precision", "checkpoint")
        return {name: value for name, value in asdict(self).items() if name not in different}

    @property
    def shape(self) -> str:
        """The name of the setting, or a description if it has no name."""
        for name, fields in SHAPES.items():
            if replace(self, **fields) == self and replace(self, **BASE) == self:
                return name
        channels, height, width = self.image
        text = f"{self.tasks}task-{self.shots}shot {height}x{width}x{channels}"
        differing = {name: getattr(self, name) for name, usual in BASE.items() if getattr(self, name) != usual}
        return " ".join([text, *(f"{name}={value}" for name, value in differing.items())])

    @property
    def what(self) -> str:
        """A short label: the method, such as `maml+gs`, or the name of the other library."""
        if self.library in RIVALS:
            return self.library
        return self.method + ("+gs" if self.arm == "shared" else "") + (", checkpoint" if self.checkpoint else "")


BASE = {
    name: getattr(Case, name) for name in ("ways", "queries", "steps", "filters", "backbone")
}  # the same in every named shape


def cases_of(
    setting: dict[str, Any],
    methods: tuple[Method, ...],
    arms: tuple[Arm, ...],
    engines: tuple[Engine, ...],
    precisions: tuple[Precision, ...],
    rivals: bool,
) -> list[Case]:
    """Return all cases of one setting; the rivals come first, so that an interrupted run has them to compare with."""
    ours = [
        Case(method=method, arm=arm, engine=engine, precision=precision, **setting)
        for engine in engines
        for precision in precisions
        for method in methods
        for arm in arms
    ]
    theirs = [
        Case(library=library, arm="original", precision=precision, **setting)
        for precision in dict.fromkeys(precision_in_pytorch(setting.get("device", "cpu"), each) for each in precisions)
        for library in RIVALS
        if rivals
    ]
    return theirs + ours


def precision_in_pytorch(device: str, precision: Precision) -> Precision:
    """Return the precision of PyTorch's convolutions: on a GPU, float32 uses the TF32 units by default."""
    return "tf32" if device != "cpu" and precision == "float32" else precision


def swept(setting: dict[str, Any], sweep: SweepName, value: int) -> dict[str, Any]:
    """Return the setting with one of its sizes changed."""
    if sweep != "size":
        return {**setting, sweep: value}
    channels = setting.get("image", Case.image)[0]
    return {**setting, "image": (channels, value, value)}
