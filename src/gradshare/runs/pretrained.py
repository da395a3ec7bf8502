"""Trained models as folders to pass on, in the convention of the Hugging Face hub: numbers and words, never code.

`config.json` says what the model is, `model.safetensors` holds its state, `README.md` is the model card. Only the first
two are read again; whatever else lies in such a folder is left alone.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from gradshare import __version__
from gradshare.errors import UserError, check_range, path_of
from gradshare.files import (
    NEW,
    opened,
    parse_json,
    read_bytes,
    sealed,
    sha256,
    sync,
    write_synced,
    writing,
    written_by_newer,
)
from gradshare.learners.arguments import check_learner, check_state
from gradshare.learners.learner import Learner
from gradshare.method.state import MetaState, check_fit
from gradshare.runs.build import build_learner
from gradshare.runs.config import RunConfig
from gradshare.runs.evaluation import Evaluation
from gradshare.runs.model_card import Card, Score
from gradshare.runs.run_folder import load_state

VERSION = 1
MOST = {"steps": 1_000, "ways": 10_000, "filters": 10_000}  # in a folder that others may have made
MOST_PIXELS = 10_000  # of a side, and channels
HEADER = 1 << 20  # bytes that a description may take: config.json, and the names and shapes of the tensors


def save_pretrained(
    folder: str | Path,
    learner: Learner,
    state: MetaState,
    dataset: str = "",
    result: Evaluation | None = None,
    license: str = "unknown",
) -> Path:
    """Write a trained model of your own as a folder to pass on.

    The module itself is code, and is not in it: `gs.from_pretrained(folder, learner)` takes the learner as it was
    trained. The models that the command line trains need none: `gs.load_run(run).save_pretrained(folder)`.

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
    scores = []
    if result is not None:
        scores = [Score("test", len(result.losses), result.accuracy, result.loss, result.interval)]
    return write_model(path_of(folder), None, state, Card(license, dataset, about, scores))


def write_model(folder: Path, model: dict[str, Any] | None, state: MetaState, card: Card) -> Path:
    """Write a folder, whole or not at all; `model` describes one of ours, None is the user's own."""
    target = Path(os.path.realpath(folder))
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{folder} is there already, and not empty: choose another folder")
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.tensors().items()}
    content = safetensors.save(tensors, metadata={"format": "pt"})
    about = {"library_name": "gradshare", "version": VERSION, "gradshare": __version__, "model": model}
    config = json.dumps(sealed({**about, "model_sha256": sha256(content)}), indent=2) + "\n"
    readme = card.text(target.name, own=model is None)
    temporary = target.with_name(f".{target.name}.{uuid4().hex[:12]}{NEW}")  # another process may write there too
    with writing(folder):
        temporary.mkdir(parents=True)
        try:
            write_synced(temporary / "model.safetensors", content)
            write_synced(temporary / "config.json", config.encode())
            write_synced(temporary / "README.md", readme.encode(errors="backslashreplace"))
            sync(temporary)
            temporary.rename(target)
            sync(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def from_pretrained(folder: str | Path, learner: Learner | None = None) -> tuple[Learner, MetaState]:
    """A learner and its state from a folder that `save_pretrained` wrote. Nothing in the folder is run.

    Args:
        learner: for a model of your own, the learner as it was trained.

    Example:
        >>> import gradshare as gs, tempfile
        >>> trained = gs.maml(gs.Conv4(filters=4, image=(1, 28, 28)), steps=1)
        >>> folder = gs.save_pretrained(tempfile.mkdtemp() + "/model", trained, trained.init(seed=0))
        >>> learner, state = gs.from_pretrained(folder, trained)  # then learner.adapt(state, ...), learner.predict(...)
    """
    folder = path_of(folder)
    if learner is not None:
        check_learner(learner)
    config = _read_config(folder)
    with torch.device("meta"):  # sizes are compared with the file's before any memory is asked for
        shapes = (learner or _build(config["model"], folder)).init().tensors()
    tensors = _read_tensors(folder / "model.safetensors", config["model_sha256"], shapes)
    learner = learner or _build(config["model"], folder)
    state = learner.init()
    load_state(state, tensors)
    return learner, state


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        if path.stat().st_size > HEADER:
            raise UserError(f"{path} is not one of gradshare's: it has {path.stat().st_size} bytes")
        content = parse_json(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no model: it has no config.json") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict) or content.get("library_name") != "gradshare":
        raise UserError(f"{path} does not describe a model of gradshare's")
    try:
        content = opened(content)
        version = content["version"]
        if version > VERSION:
            raise UserError(f"{path} {written_by_newer('model', version, VERSION)}")
        if version != VERSION:
            raise ValueError(f"there never was a version {version}")
        return {name: content[name] for name in ("model", "model_sha256")}
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} was changed or is damaged: {error}") from None


def _build(model: Any, folder: Path) -> Learner:
    """The learner that `config.json` describes."""
    path = folder / "config.json"
    if model is None:
        raise UserError(
            f"the model in {folder} is its author's own, and code is not in such a folder: build its learner,"
            " and call from_pretrained(folder, learner)"
        )
    try:
        options = RunConfig(**model["options"])
        channels, height, width = model["image"]
        sizes = {name: getattr(options, name) for name in MOST}
        for name, value in {**sizes, "channels": channels, "height": height, "width": width}.items():
            check_range(name, value, 1, MOST.get(name, MOST_PIXELS))
        return build_learner(options, (int(channels), int(height), int(width)))
    except (KeyError, TypeError, ValueError) as error:  # UserError too
        raise UserError(f"{path} does not describe a model that gradshare can build: {error}") from None


def _read_tensors(path: Path, digest: str, shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file that holds just these."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in shapes.values())
    try:
        size = path.stat().st_size
        if size > needed + HEADER:
            raise UserError(f"{path} does not fit the learner: it has {size:,} bytes, and the learner {needed:,}")
        content = read_bytes(path)
    except FileNotFoundError:
        raise UserError(f"{path.parent} holds no model: it has no {path.name}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if sha256(content) != digest:
        raise UserError(f"{path} was changed or is damaged: it does not match its checksum")
    try:
        tensors = safetensors.load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    check_fit(shapes, tensors, str(path))
    return tensors
