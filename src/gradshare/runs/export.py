"""Runs opened for use, and trained models as folders to share, in the layout of the Hugging Face hub.

`config.json` describes the model, `model.safetensors` holds its state, `README.md` is the model card. Only the first
two are read again. They hold numbers and text, never code: nothing in such a folder, or in a run folder, is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor

from gradshare import __version__
from gradshare.data.dataset import Dataset, load_dataset
from gradshare.data.sources import terms_of
from gradshare.data.store import data_folder
from gradshare.engine.choose import Choice
from gradshare.errors import UserError, path_of, printable
from gradshare.files import (
    add_checksum,
    read_bytes,
    read_json,
    reading,
    sha256,
    verify_checksum,
    write_folder,
    written_by_newer,
)
from gradshare.learners.fingerprint import fingerprint
from gradshare.learners.learner import Learner, check_learner, check_state
from gradshare.method.episodes import TaskSource
from gradshare.method.network import NormStatistics
from gradshare.method.state import MetaState, check_fit
from gradshare.method.variants import VARIANTS
from gradshare.runs.build import build_learner, choice_for
from gradshare.runs.config import (
    BACKBONES,
    FINGERPRINT,
    NORM_STATISTICS,
    OF_THE_OUTER_LOOP,
    TRAINING,
    RunConfig,
    Training,
    check_same_learner,
    flat,
    recorded,
)
from gradshare.runs.evaluate import Evaluable, Evaluation, Parts
from gradshare.runs.folder import RunFolder, best_epochs
from gradshare.runs.records import Epoch
from gradshare.runs.train import STATE, load_state

VERSION = 1
MEMORY = "memory/"  # how the names of its tensors begin
OF_THE_MACHINE = ("device", "engine", "precision", "threads")
PIXELS = {"unit": "from 0 to 1", "imagenet": "from 0 to 1, then normalised by ImageNet's mean and standard deviation"}


@dataclass(frozen=True)
class SavedRun(Evaluable):
    """A run folder, finished or not, opened for use. `gs.evaluate(run)` evaluates its best epoch."""

    folder: Path
    config: dict[str, Any]
    epochs: tuple[Epoch, ...]
    own_learner: Learner | None = None  # for a run from Python, as `load_run` got it
    own_dataset: TaskSource | None = None

    def __repr__(self) -> str:
        return f"SavedRun({str(self.folder)!r}, {len(self.epochs)} of {self.config['epochs']} epochs)"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [line.as_json() for line in self.epochs]

    @property
    def best_epochs(self) -> list[int]:
        """The best epochs by validation, best first; their checkpoints are kept."""
        return best_epochs(self.epochs)

    @property
    def norm_statistics(self) -> NormStatistics:
        """Of batch norm in validation and test."""
        return self.config.get("norm_statistics", Training.norm_statistics)

    @property
    def run_config(self) -> RunConfig:
        """The options, if the command line started the run."""
        config = RunFolder(self.folder).config()
        if config is None:
            raise UserError(
                f"the run in {self.folder} was started from Python, with a learner of its own: in Python,"
                f" gs.evaluate(gs.load_run({str(self.folder)!r}, learner, dataset)) tests it"
            )
        return config

    def dataset(self) -> Any:
        """The data set: as `load_run` got it, or that of a run of the command line."""
        if self.own_dataset is not None:
            return self.own_dataset
        return load_dataset(self.run_config.dataset, self.run_config.pixels)

    def learner(self, allowed: Container[str] = (), image: tuple[int, int, int] | None = None) -> Learner:
        """The learner: as `load_run` got it, or that of a run of the command line.

        Args:
            allowed: arms and backbones of your own, `package.module:Class`, that may be imported. What config.json
                names is never imported otherwise.
            image: channels, height and width of the images; None: as those of the run's data set.
        """
        if self.own_learner is not None:
            return self.own_learner
        return build_learner(self.run_config, image or self.dataset().image, allowed)

    def state(self, epoch: int | None = None) -> MetaState:
        """The state after an epoch, read from its checkpoint; None is the best one."""
        if not self.epochs:
            raise UserError(f"the run in {self.folder} has not finished an epoch yet")
        tensors = RunFolder(self.folder).load_epoch(self.best_epochs[0] if epoch is None else epoch)
        return MetaState.of({name: tensor for name, tensor in tensors.items() if name.startswith(STATE)})

    @cached_property
    def best(self) -> MetaState:
        """The state after the best epoch by validation; without validation, after the last one."""
        return self.state()

    @cached_property
    def last(self) -> MetaState:
        """The state after the last epoch."""
        return self.state(self.epochs[-1].epoch if self.epochs else None)

    @cached_property
    def choice(self) -> Choice:
        """Where to evaluate a run of the command line: as it was trained; on the CPU if there is no GPU here."""
        config = self.run_config
        if config.device == "cuda" and not torch.cuda.is_available():
            config = replace(config, device="cpu", engine="auto", precision="float32", threads=0)
        return choice_for(config)

    def parts(self, dataset: TaskSource | None = None, allowed: Container[str] = ()) -> Parts:
        """What the run is evaluated with.

        Args:
            dataset: other data than its own; the network must fit its images.
            allowed: as `learner` has it.
        """
        training = Training(**{name: self.config[name] for name in TRAINING & self.config.keys()})
        source = self.dataset() if dataset is None else dataset
        if self.own_learner is not None:
            return Parts(self.own_learner, source, training)
        device = self.choice.device
        image = source.image if isinstance(source, Dataset) else self.dataset().image
        learner = self.learner(allowed, image)
        state = f"the state of the run in {self.folder}, with images of {' x '.join(map(str, image))},"
        check_fit(learner.init().tensors(), self.best.tensors(), state)
        source = source.to(device) if isinstance(source, Dataset) else source
        return Parts(learner.to(device, self.choice.precision), source, training)

    def save_pretrained(
        self, folder: str | Path, epoch: int | None = None, license: str = "unknown", half_memory: bool = False
    ) -> Path:
        """Write the state after an epoch, None for the best one, as a folder to share; see `gs.from_pretrained`.

        Args:
            folder: it must be new, or empty.
            license: of the model, as the Hugging Face hub names it: `mit`, `cc-by-4.0`, ...
            half_memory: write the memory of shared gradients, which is larger than the weights, in bfloat16.
        """
        state = self.state(epoch)
        epoch = self.best_epochs[0] if epoch is None else epoch
        after = f"The state after epoch {epoch} of {self.config['epochs']}, meta-trained with gradshare."
        if "method" not in self.config:
            about = ["A model that learns a task from a few examples.", after]
            card = Card(license, "", about, self._results(epoch), flat(self.config), self.norm_statistics)
            return write_model(Path(folder), None, state, card, self.config.get(FINGERPRINT), half_memory)
        config = self.run_config
        dataset = load_dataset(config.dataset, config.pixels)
        if config.arm in VARIANTS and config.backbone in BACKBONES:  # code of the user's own is not imported
            check_fit(build_learner(config, dataset.image).init().tensors(), state.tensors())
        options = {name: value for name, value in recorded(asdict(config)).items() if name not in OF_THE_MACHINE}
        options["dataset"] = dataset.name  # its path is of no use to others
        if config.backbone != "conv4":
            del options["filters"]
        if config.start is not None:
            options["start"] = Path(config.start).name
        channels, height, width = dataset.image
        about = [
            f"{_network(config)} that learns a {config.ways}-way {config.shots}-shot task from its"
            f" support images. Method: {config.method}; arm: {config.arm}. {after}",
            f"Images: {channels} x {height} x {width}, pixels {PIXELS[config.pixels]}.",
        ]
        card = Card(license, dataset.name, about, self._results(epoch), options, config.norm_statistics)
        model = {"options": options, "image": list(dataset.image)}
        return write_model(Path(folder), model, state, card, half_memory=half_memory)

    def _results(self, epoch: int) -> list[Result]:
        """What is known of the state after an epoch: its validation, and its test if it is the best one."""
        line, run = self.epochs[epoch - 1], RunFolder(self.folder)
        scores = (self.config["val_tasks"], line.val_accuracy, line.val_loss, line.val_interval)
        results = [Result("validation", *scores)] if line.validated else []
        if damage := run.damage():
            raise UserError(f"the run in {self.folder} is damaged: {damage}; resume it, and it is tested again")
        summary = run.summary() if run.done else None
        if summary is not None and summary.test is not None and summary.best_epoch == epoch:
            test = summary.test
            results += [Result("test", test.tasks, test.best.accuracy, test.best.loss, test.best.interval)]
        return results


def _network(config: RunConfig) -> str:
    """The network in words."""
    ours = {"conv4": f"A Conv-4 of {config.filters} filters", "resnet12": "A ResNet-12", "vit": "A vision transformer"}
    return ours.get(config.backbone, f"A network ({config.backbone})")


def load_run(folder: str | Path, learner: Learner | None = None, dataset: TaskSource | None = None) -> SavedRun:
    """Open a run folder.

    Then `gs.evaluate(run)` tests it, `run.best` and `run.last` are its states, `run.learner()` adapts and predicts as
    in training, and `run.save_pretrained(folder)` writes the model as a folder to share. A warning names a damaged
    newest checkpoint, and the one before it is used.

    Args:
        learner: for a run that was started from Python, the learner as it was trained. Runs of the command line need
            none.
        dataset: the same for its data.
    """
    if learner is not None:
        check_learner(learner)
    run = RunFolder(path_of(folder))
    run.config()  # raises an error for options that this version does not know
    options, newest = run.options(), run.newest()
    if learner is not None and FINGERPRINT in options:
        check_same_learner(run.path, options[FINGERPRINT], fingerprint(learner), but=OF_THE_OUTER_LOOP)
    return SavedRun(run.path, options, newest[0].metrics if newest else (), learner, dataset)


def save_pretrained(
    folder: str | Path,
    learner: Learner,
    state: MetaState,
    dataset: str = "",
    result: Evaluation | None = None,
    license: str = "unknown",
) -> Path:
    """Write a trained model of your own as a folder to share.

    The module itself is code, and is not in the folder: `gs.from_pretrained(folder, learner)` takes the learner as it
    was trained. For a run of the command line, `gs.load_run(run).save_pretrained(folder)` needs no learner.

    Args:
        folder: it must be new, or empty.
        dataset: what the model was trained on, for the model card.
        result: of `gs.evaluate` on test tasks, for the model card.
        license: of the model, as the hub names it: `mit`, `cc-by-4.0`, ...

    Example:
        >>> import gradshare as gs, tempfile
        >>> learner = gs.maml(gs.Conv4(filters=4, image=(1, 28, 28)), steps=1)
        >>> folder = gs.save_pretrained(tempfile.mkdtemp() + "/model", learner, learner.init(seed=0))
        >>> sorted(path.name for path in folder.iterdir())
        ['README.md', 'config.json', 'model.safetensors']
        >>> learner, state = gs.from_pretrained(folder, learner)
    """
    check_learner(learner)
    check_state(state)
    check_fit(learner.init().tensors(), state.tensors(), "the state")
    about = ["A model that learns a task from a few examples, meta-trained with gradshare."]
    card = Card(license, dataset, about, [])
    if result is not None:
        results = [Result("test", len(result.losses), result.accuracy, result.loss, result.interval)]
        card = replace(card, results=results, norm_statistics=result.norm_statistics)
    return write_model(path_of(folder), None, state, card, fingerprint(learner))


def write_model(
    folder: Path,
    model: dict[str, Any] | None,
    state: MetaState,
    card: Card,
    learner: dict[str, Any] | None = None,
    half_memory: bool = False,
) -> Path:
    """Write a folder, whole or not at all.

    Args:
        model: describes one of ours; None is the user's own.
        learner: the fingerprint of the user's own.
        half_memory: write the memory in bfloat16.
    """
    target = Path(os.path.realpath(path_of(folder)))
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{folder} exists already and is not empty: choose another folder")
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.tensors().items()}
    if half_memory:
        memory = {name: tensor for name, tensor in tensors.items() if name.startswith(MEMORY)}
        tensors |= {name: tensor.bfloat16() for name, tensor in memory.items() if tensor.is_floating_point()}
    content = safetensors.save(tensors, metadata={"format": "pt"})
    about = {"library_name": "gradshare", "version": VERSION, "gradshare": __version__, "model": model}
    about |= {} if learner is None else {FINGERPRINT: learner}
    config = json.dumps(add_checksum({**about, "model_sha256": sha256(content)}), indent=2) + "\n"
    readme = card.text(target.name, own=model is None)
    texts = {"config.json": config.encode(), "README.md": readme.encode(errors="backslashreplace")}
    write_folder(target, {"model.safetensors": content, **texts})
    return folder


def from_pretrained(folder: str | Path, learner: Learner | None = None) -> tuple[Learner, MetaState]:
    """A learner and its state from a folder that `save_pretrained` wrote. Nothing in the folder is executed.

    Args:
        folder: a path; or the name of a model, such as `cub-1shot-5task-maml+gs`, in `models/` of a checkout of
            gradshare or in `models/` of the data folder.
        learner: for a model, a backbone or an arm of your own, the learner as it was trained.

    Example:
        >>> import gradshare as gs, tempfile
        >>> trained = gs.maml(gs.Conv4(filters=4, image=(1, 28, 28)), steps=1)
        >>> folder = gs.save_pretrained(tempfile.mkdtemp() + "/model", trained, trained.init(seed=0))
        >>> learner, state = gs.from_pretrained(folder, trained)  # then learner.adapt(state, ...), learner.predict(...)
    """
    if learner is not None:
        check_learner(learner)
    folder = find_model(folder)
    config = _read_config(folder / "config.json")
    if learner is not None and isinstance(config[FINGERPRINT], dict):
        check_same_learner(folder, config[FINGERPRINT], fingerprint(learner), OF_THE_OUTER_LOOP, "model")
    with torch.device("meta"):  # sizes are compared with the file's before any memory is allocated
        shapes = (learner or _build(config["model"], folder)).init().tensors()
    tensors = _read_tensors(folder / "model.safetensors", config["model_sha256"], shapes)
    learner = learner or _build(config["model"], folder)
    state = learner.init()
    load_state(state, tensors)
    return learner, state


CHECKOUT = Path(__file__).resolve().parents[3] / "models"  # of a source tree; an installed package has none


def find_model(name: str | Path) -> Path:
    """The folder at a path, or of a name; the path itself if there is none."""
    path = path_of(name)
    if path.exists():
        return path
    shelves = [shelf for shelf in (CHECKOUT, data_folder() / "models") if shelf.is_dir()]
    for shelf in shelves:
        if (shelf / path).is_dir():
            return shelf / path
    names = sorted({folder.name for shelf in shelves for folder in shelf.iterdir() if folder.is_dir()})
    text = f"there is no model '{name}': it is neither a folder, nor in {data_folder() / 'models'}"
    near = get_close_matches(str(name), names, 3, 0.5)
    raise UserError(text + (f"; did you mean {' or '.join(near)}?" if near else ""))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path.parent} holds no model: it has no {path.name}") from None
    if not isinstance(content, dict) or content.get("library_name") != "gradshare":
        raise UserError(f"{path} does not describe a model of gradshare")
    with reading(f"{path} was changed or is damaged"):
        content = verify_checksum(content)
        version, found = content["version"], {name: content[name] for name in ("model", "model_sha256")}
        found[FINGERPRINT] = content.get(FINGERPRINT)  # older versions wrote none
    if version != VERSION:
        raise UserError(f"{path} {written_by_newer('model', version, VERSION)}")
    return found


def _build(model: Any, folder: Path) -> Learner:
    """The learner that `config.json` describes."""
    if model is None:
        raise UserError(
            f"the model in {folder} is its author's own, and such a folder holds no code: build its learner,"
            " and call from_pretrained(folder, learner)"
        )
    try:
        options = RunConfig(**model["options"])
        channels, height, width = map(int, model["image"])
        return build_learner(options, (channels, height, width))
    except (KeyError, TypeError, ValueError) as error:  # UserError too
        path = folder / "config.json"
        raise UserError(f"{path} does not describe a model that gradshare can build: {error}") from None


def _read_tensors(path: Path, digest: str, shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file that must hold just these."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        raise UserError(f"{path.parent} holds no model: it has no {path.name}") from None
    if sha256(content) != digest:
        raise UserError(f"{path} was changed or is damaged: it does not match its checksum")
    with reading(f"{path} is damaged"):
        tensors = safetensors.load(content)
    for name, tensor in tensors.items():
        if name.startswith(MEMORY) and name in shapes and tensor.dtype == torch.bfloat16:
            tensors[name] = tensor.to(shapes[name].dtype)
    check_fit(shapes, tensors, str(path))
    return tensors


# The model card.

USAGE = """import gradshare as gs

learner, state = gs.from_pretrained({arguments})
fast = learner.adapt(state, support_x, support_y)  # [tasks, examples, ...], [tasks, examples]
outputs = learner.predict(fast, query_x{norm})  # [tasks, examples, ...]
"""
INTERVAL = "± is a 95 % interval over tasks for one training run. It says nothing about another seed."
NO_CODE = (
    "This folder holds numbers and no code: gradshare reads `config.json` and `model.safetensors`, checks their"
    " SHA-256, and executes nothing."
)


@dataclass(frozen=True)
class Result:
    """A mean over tasks."""

    split: str
    tasks: int
    accuracy: float | None
    loss: float | None
    interval: float | None  # half the 95 % interval over tasks: of the accuracy, or else of the loss

    @property
    def metric(self) -> str:
        return "loss" if self.accuracy is None else "accuracy"

    @property
    def value(self) -> float | None:
        return self.loss if self.accuracy is None else self.accuracy

    def __str__(self) -> str:
        if self.value is None:
            return "not finite"
        form = ".4g" if self.accuracy is None else ".2%"
        return f"{self.value:{form}}" + ("" if self.interval is None else f" ± {self.interval:{form}}")


@dataclass(frozen=True)
class Card:
    """The content of a model card: README.md, with the fields at its top that the hub reads."""

    license: str  # as the hub names it: mit, cc-by-4.0, ..., unknown
    dataset: str  # its name; "" if it is not known
    about: list[str]  # sentences
    results: list[Result]
    options: dict[str, Any] = field(default_factory=dict)
    norm_statistics: NormStatistics = "batch"  # of batch norm, in the results

    def text(self, name: str, own: bool) -> str:
        """The whole README.md.

        Args:
            own: whether the module is the author's own, and so not described by the folder.
        """
        norm = "" if self.norm_statistics == "batch" else f', norm_statistics="{self.norm_statistics}"'
        usage = USAGE.format(arguments='"FOLDER", learner' if own else '"FOLDER"', norm=norm)
        parts = [
            f"# {_plain(name)}",
            "\n".join([*self.about, NORM_STATISTICS[self.norm_statistics]]),
            f"Data: {_code(self.dataset)}. {terms_of(self.dataset)}".rstrip() if self.dataset else "Data: not known.",
            *([_table(["split", "", "mean", "tasks"], map(_row, self.results)), INTERVAL] if self.results else []),
            f"```python\n{usage}```",
            NO_CODE,
        ]
        if self.options:
            rows = [[_plain(option), _code(str(value))] for option, value in self.options.items()]
            parts += ["## Options", _table(["option", "value"], rows)]
        return f"---\n{self._front(name)}---\n\n" + "\n\n".join(parts) + "\n"

    def _front(self, name: str) -> str:
        """YAML, of which JSON is a part: written as JSON, no name can be more than a name there."""
        lines = [f"license: {json.dumps(self.license)}", "library_name: gradshare"]
        lines += ["tags:", "- meta-learning", "- few-shot-learning", "- gradient-sharing"]
        if self.dataset:
            lines += ["datasets:", f"- {json.dumps(self.dataset)}"]
        entries = [self._entry(result) for result in self.results if result.value is not None]
        if entries:
            metrics = dict.fromkeys(result.metric for result in self.results)
            lines += ["metrics:", *(f"- {metric}" for metric in metrics)]
            lines += [f"model-index: {json.dumps([{'name': name, 'results': entries}])}"]
        return "\n".join(lines) + "\n"

    def _entry(self, result: Result) -> dict[str, Any]:
        data = self.dataset or "not known"
        interval = "" if result.interval is None else f", 95 % interval ± {result.interval:.4f}"
        mean = f"mean {result.metric} of {result.tasks} tasks{interval}"
        return {
            "task": {"type": "image-classification" if result.accuracy is not None else "other"},
            "dataset": {"type": data, "name": data, "split": result.split},
            "metrics": [{"type": result.metric, "value": result.value, "name": mean}],
        }


def _row(result: Result) -> list[str]:
    return [result.split, result.metric, str(result), str(result.tasks)]


def _table(columns: list[str], rows: Iterable[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text without markup."""
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]<>#|!&~" else sign for sign in printable(" ".join(text.split())))


def _code(text: str) -> str:
    return f"`{printable(' '.join(text.split())).replace('`', chr(39)).replace('|', '¦')}`"
