"""The options of a run: every one with its default and its meaning, in one place. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar, get_type_hints

from gradshare.errors import MOST, MOST_SEED, MOST_THREADS, UserError, check_range, short_repr
from gradshare.files import add_checksum, parse, verify_checksum, written_by_newer
from gradshare.learners.fingerprint import BUILT_IN
from gradshare.method.variants import OWN, parse_inner, variant

Log = Literal["tensorboard"]  # where else the numbers of a run go: `gradshare.runs.trackers`
Method = Literal[
    "maml", "metasgd", "mamlpp", "fomaml", "anil", "boil", "protomaml", "reptile", "metacurvature", "sparsemaml", "alfa"
]
BACKBONES = ("conv4", "resnet12", "vit")  # built by `gradshare.runs.build`
VERSION = 1


NORM_STATISTICS = {
    "batch": "Evaluation is transductive: batch norm, if the network has it, uses the statistics of the query batch.",
    "support": "Evaluation is inductive: batch norm, if the network has it, uses the statistics of the support set.",
}
"""What reports and model cards say about the option `norm_statistics`."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long to train, on which tasks, and how to evaluate."""

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
    gates: float = 1.0
    """Factor on the outer rate of what is learned beside the network's weights: gates, learned inner rates."""
    gradient_clamp: float = 0.0
    """Clamp the outer gradient of the network's weights to plus or minus this; 0 is off (MAML++ for ImageNet: 10)."""
    epochs: int = 20
    """Epochs to train."""
    iterations: int = 100
    """Meta-iterations in an epoch."""
    val_tasks: int = 600
    """Validation tasks after each epoch, always the same; 0: no validation, and the last epoch is the best one."""
    test_tasks: int = 600
    """Test tasks at the end; 0: no test."""
    eval_batch: int = 25
    """Tasks evaluated at a time."""
    seed: int = 0
    """Determines the initial weights and the tasks: two methods with one seed see the same tasks."""
    patience: int = 0
    """End the run when validation has not improved for so many epochs; 0: train all epochs."""
    norm_statistics: Literal["batch", "support"] = "batch"
    """Batch norm in validation and test: statistics of the query batch (transductive), or of the support set."""
    micro_batch: int | None = None
    """Tasks that are differentiated at a time: less memory, more time, the same gradients. By default all."""
    checkpoint: bool = False
    """Recompute inner steps in the backward pass instead of keeping them: less memory, more time, same gradients."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            _check(name, kind, getattr(self, name))
        for name, what in (("val_tasks", "validation"), ("test_tasks", "test")):
            if getattr(self, name) == 1:
                raise UserError(f"{name} is 1; an interval over tasks needs at least 2, and 0 means no {what}")
        if self.patience and not self.val_tasks:
            raise UserError(f"patience is {self.patience}, and val_tasks is 0: patience needs validation")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Training):
    """One run: a method on a data set."""

    dataset: str = "glyphs"
    """Name of a data set (see `gradshare data list`), or a folder."""
    method: Method = "maml"
    """The algorithm."""
    arm: str = "shared"
    """The sharing variant: original, shared, a control such as gate-only, or `package.module:Class` of your own."""
    norm: Literal["global", "tensor"] = "global"
    """Normalise the shared gradient over all parameters together, or each tensor by itself."""
    inner_lr: float = 0.1
    """Inner learning rate as it is used: half of the experiment's for the arm half-rate. Learned rates start there."""
    steps: int = 5
    """Inner steps (the paper's K); protomaml also takes 0, which is a prototypical network."""
    inner: str | None = None
    """Between sharing and the rate: momentum:0.9, adam, or head:4, the head four times as fast; by default nothing."""
    backbone: str = "conv4"
    """The network: conv4, resnet12, vit, or `package.module:Class` of your own, called as Class(ways, image)."""
    filters: int = 48
    """Filters in each layer of the backbone conv4."""
    start: str | None = None
    """Begin with the weights in this file, a state_dict: safetensors, or of torch.save. By default, random weights."""
    adapt_norm: bool = False
    """Adapt the gain and bias of batch norm in the inner loop too. Reptile always does."""
    adapt: str | None = None
    """Weights that the inner loop moves, by comma: names of weights or of submodules, convs.3,head; by default all."""
    head_start: Literal["learned", "zero-init", "zero"] = "learned"
    """Head of a task: learned; zero before training, then learned; or zero for each task, never learned."""
    recipe: Literal["reference", "paper"] = "reference"
    """MAML++: the defaults of the next three options as in its code, or as in its paper."""
    multi_step_epochs: int | None = None
    """MAML++: epochs until the last step's loss is the only one."""
    first_order_epochs: int | None = None
    """MAML++: epochs of first-order gradients at the start."""
    final_outer_rate: float | None = None
    """MAML++: where the cosine of the outer rate ends, as a fraction of its start."""
    pixels: Literal["unit", "imagenet"] = "unit"
    """Pixels from 0 to 1, or normalised by ImageNet's mean and standard deviation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto is a GPU if there is one."""
    engine: Literal["auto", "eager", "graph", "compiled"] = "auto"
    """Run a meta-iteration operation by operation, or record it as one CUDA graph; auto is graph on a GPU. On a CPU,
    compiled makes programs of the network first, which takes a minute or two: for long runs."""
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    """float32: PyTorch's operations; tf32, bf16: on a GPU, our kernels for conv4, and compiled programs for any other
    network; auto is tf32 if the kernels support the run. On a CPU, bf16 rounds the operands of convolutions: faster
    where the processor has instructions for it (lscpu: avx512_bf16, amx_bf16)."""
    threads: int = 0
    """CPU threads; 0: as OMP_NUM_THREADS says, else one for each core that the process may use."""
    deterministic: bool = False
    """The same bits in every run on a GPU too, by slower algorithms of PyTorch; on a CPU it is always so."""

    def __post_init__(self) -> None:
        super().__post_init__()
        variant(self.arm)  # raises an error for a name that it does not know
        if self.inner is not None:
            parse_inner(self.inner)
        check_backbone(self.backbone)
        if self.backbone != "conv4" and self.filters != (usual := RunConfig.filters):
            raise UserError(
                f"filters is {self.filters}, and only conv4 has that choice, not {self.backbone}: leave {usual}"
            )
        if self.steps == 0 and self.method != "protomaml":
            raise UserError("steps is 0; it must be at least 1, but for the method protomaml")
        if self.method == "reptile":
            object.__setattr__(self, "adapt_norm", True)  # always: it learns what it adapts, and nothing else

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
    "steps": 0,
    "val_tasks": 0,
    "gradient_clamp": 0,
    "test_tasks": 0,
    "seed": 0,
    "patience": 0,
    "threads": 0,
    "multi_step_epochs": 0,
    "first_order_epochs": 0,
    "final_outer_rate": 0,
}  # of every other whole number: 1
HIGHEST = {"seed": MOST_SEED, "threads": MOST_THREADS, "iterations": 1_000_000}  # of every other number: MOST
ABOVE_ZERO = ("outer_lr", "inner_lr", "gates")


def _check(name: str, kind: Any, value: Any) -> None:
    """Raise an error for a value of the wrong type, or out of range."""
    try:
        parse(kind, value, name)
    except ValueError as error:
        raise UserError(str(error)) from None
    if name in ABOVE_ZERO and value <= 0:
        raise UserError(f"{name} is {short_repr(value)}; it must be above 0")
    if type(value) in (int, float):
        check_range(name, value, 0 if name in ABOVE_ZERO else LOWEST.get(name, 1), HIGHEST.get(name, MOST))


def check_backbone(name: str) -> str:
    """The name of a network, one of ours or of the user's own; a UserError for any other."""
    if name not in BACKBONES and not OWN.fullmatch(name):
        known = f"{', '.join(BACKBONES)}, or package.module:Class"
        raise UserError(f"backbone is one of {known}, not {short_repr(name)}")
    return name


def with_arm(config: RunConfig, arm: str) -> RunConfig:
    """The same experiment for another arm: its name, and its factor on the inner rate.

    config.json stores the inner rate that is used, so a run of the arm half-rate has half of the experiment's.

    Example:
        >>> half = with_arm(RunConfig(inner_lr=0.1), "half-rate")
        >>> half.inner_lr, with_arm(half, "shared").inner_lr
        (0.05, 0.1)
    """
    rate = original_rate(config.arm, config.inner_lr) * variant(arm).rate
    return replace(config, arm=arm, inner_lr=rate)


def original_rate(arm: str, inner_lr: float) -> float:
    """The inner rate of the experiment, from that of one arm."""
    return inner_lr / variant(arm).rate


def recorded(options: dict[str, Any]) -> dict[str, Any]:
    """Options as config.json holds them: without those that older versions lack, where they have their default."""
    return {name: value for name, value in options.items() if name not in LATER or value != LATER[name]}


def options_text(options: dict[str, Any]) -> str:
    """The content of config.json."""
    return json.dumps(add_checksum({"version": VERSION, **options}), indent=2) + "\n"


TRAINING = frozenset(field.name for field in fields(Training))
RUN = frozenset(field.name for field in fields(RunConfig)) - TRAINING
LATER = {
    name: getattr(RunConfig, name)
    for name in (
        *("deterministic", "patience", "norm_statistics", "micro_batch", "checkpoint"),
        *("inner", "backbone", "start", "adapt", "head_start", "gates"),
    )
}
"""Options that the first version did not have, with their defaults. config.json holds only those that differ from
them, so the runs of older versions, which lack them, can be resumed."""
Options = TypeVar("Options", bound=Training)


def parse_options(content: Any, path: Path) -> dict[str, Any]:
    """The options in the content of config.json, after checks of its checksum, its version and its Training options."""
    if not isinstance(content, dict) or type(content.get("version")) is not int:
        raise UserError(f"{path} is not the configuration of a run: it has no version")
    try:
        content = verify_checksum(content) if "sha256" in content else dict(content)  # runs before 0.1 have none
    except ValueError as error:
        raise UserError(f"{path} was changed or is damaged: {error}; restore it from a copy") from None
    version = content.pop("version")
    if version != VERSION:
        raise UserError(f"{path} {written_by_newer('configuration', version, VERSION)}")
    _build(Training, {name: value for name, value in content.items() if name in TRAINING}, path)
    return content


def parse_config(options: dict[str, Any], path: Path) -> RunConfig:
    """The options of config.json as a RunConfig."""
    if unknown := set(options) - TRAINING - RUN:
        raise UserError(f"{path} has options that this version does not know: {', '.join(sorted(unknown))}")
    return _build(RunConfig, options, path)


def _build(kind: type[Options], options: dict[str, Any], path: Path) -> Options:
    try:
        return kind(**options)
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}") from None


MAY_GROW = ("epochs", "patience")
FINGERPRINT = "fingerprint"  # the entry of config.json that describes the learner of a run from Python
NOT_USED = ("per_step", "recipe", "schedule", "data")  # entries of a fingerprint that most learners do not have
NAMED = 3  # differences of fingerprints that an error names


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for people: the entries of the fingerprint beside them, without the layers of the model."""
    entries = options.get(FINGERPRINT)
    return {
        name: value
        for name, value in {**options, **(entries if isinstance(entries, dict) else {})}.items()
        if name not in (FINGERPRINT, "layers") and not (name in NOT_USED and not value)
    }


def identity(options: dict[str, Any]) -> str:
    """A digest that differs between runs: of all options but those that may grow, and what older runs do not have."""
    left_out = (*MAY_GROW, FINGERPRINT)
    return str(add_checksum({name: value for name, value in options.items() if name not in left_out})["sha256"])


def grows(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The options by which a run is to train longer than it has.

    Example:
        >>> grows({"epochs": 20, "patience": 3}, {"epochs": 30, "patience": 5}), grows({"epochs": 20}, {"epochs": 10})
        (['epochs', 'patience'], [])
    """
    return [name for name in MAY_GROW if wanted.get(name, 0) > stored.get(name, 0) > 0]  # a patience of 0 is none


def check_same_options(
    folder: Path, stored: dict[str, Any], wanted: dict[str, Any], longer: bool, rate_falls: bool
) -> None:
    """Raise an error unless the run in a folder has the wanted options.

    Args:
        longer: whether more epochs, or more patience, may be wanted than the run has.
        rate_falls: whether the outer rate falls over the epochs; a run with more of them is another run then.
    """
    more = grows(stored, wanted) if longer else []
    for name in sorted((stored.keys() | wanted.keys()) - {FINGERPRINT}):
        has, want = (options.get(name, LATER.get(name)) for options in (stored, wanted))
        if has != want and name not in more:
            raise UserError(
                f"the run in {folder} has {name} = {has!r}, not {want!r}: give the same options"
                + (f" ({name} may be more)" if name in MAY_GROW and longer and has else "")
                + ", or choose another folder"
            )
    if "epochs" in more and rate_falls:
        raise UserError(
            f"the outer rate of the run in {folder} falls over its {stored['epochs']} epochs, so a run of"
            f" {wanted['epochs']} is another one: choose another folder"
        )


OF_THE_OUTER_LOOP = ("optimiser", "schedule", "data", "final_outer_rate")


def check_same_learner(folder: Path, stored: Any, wanted: Any, but: Container[str] = (), what: str = "run") -> None:
    """Raise an error that says what differs, if a run is used with another learner than it was trained with.

    A run of an older version has no fingerprint; it was trained with the built-in Adam.

    Args:
        but: entries that are not compared.
    """
    if not isinstance(wanted, dict):
        return
    has = stored if isinstance(stored, dict) else {"optimiser": BUILT_IN, "schedule": None}
    has = {name: value for name, value in has.items() if name not in but}
    found = list(islice(_differences(has, wanted), NAMED + 1))
    if found:
        more = ", and more" if len(found) > NAMED else ""
        data = " or on other data" if any(one.startswith("data ") for one in found) else ""
        raise UserError(
            f"the {what} in {folder} was trained with another learner{data}: {'; '.join(found[:NAMED])}{more}."
            " Give the same, or choose another folder"
        )


def _differences(has: dict[str, Any], want: dict[str, Any]) -> Iterator[str]:
    for name in has:
        one, other = has[name], want.get(name)
        if name == "schedule" and one and other:  # a run may become longer
            one, other = one[: len(other)], other[: len(one)]
        if one == other or (name == "data" and None in (one, other)):  # a source of one's own may not say it
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            for key in [*one, *(key for key in other if key not in one)]:
                if one.get(key) != other.get(key):
                    yield f"{key} {one.get(key, 'absent')}, not {other.get(key, 'absent')}"
        else:
            yield f"{name} {_shown(one)}, not {_shown(other)}"


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 120 else short_repr(value, 120)


def check_further_entries(about: Any) -> dict[str, Any]:
    """What a user adds to config.json: JSON values under names that it does not use itself.

    `method` marks a run that can be built again from its config.json alone; such a run has all options of RunConfig.
    """
    if about is None:
        return {}
    if not isinstance(about, Mapping) or not all(isinstance(name, str) for name in about):
        raise UserError(f"about is a dict with names for its keys, not {short_repr(about)}")
    if taken := set(about) & {*TRAINING, FINGERPRINT, "version", "sha256"}:
        raise UserError(f"about has {', '.join(sorted(taken))}, which config.json has already: choose other names")
    if "method" in about and {*about} | (RUN & LATER.keys()) != RUN:
        raise UserError("about has method, which config.json has for models of the command line: choose another name")
    for name, value in about.items():
        try:
            json.dumps(value, allow_nan=False, default=_path_text)
        except (TypeError, ValueError, RecursionError):
            raise UserError(f"about has {name} = {short_repr(value)}, which config.json cannot hold") from None
    return dict(about)


def _path_text(value: Any) -> str:
    if not isinstance(value, PurePath):
        raise TypeError(type(value).__name__)
    return str(value)
