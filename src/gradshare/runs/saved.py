"""Run folders, finished or not, opened for use: their learner, the state of an epoch, and as a model to pass on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradshare.data.dataset import Dataset, load_dataset
from gradshare.errors import UserError, path_of
from gradshare.learners.learner import Learner
from gradshare.method.state import MetaState, check_fit
from gradshare.runs import checkpoints
from gradshare.runs.build import build_learner
from gradshare.runs.config import RunConfig, identity, read_config, run_config
from gradshare.runs.finished import test_of
from gradshare.runs.model_card import Card, Score
from gradshare.runs.pretrained import write_model
from gradshare.runs.run_folder import best_epochs, load_epoch

OF_THE_MACHINE = ("device", "engine", "precision", "threads")
PIXELS = {"unit": "from 0 to 1", "imagenet": "from 0 to 1, then with ImageNet's mean and deviation taken out"}


@dataclass(frozen=True)
class SavedRun:
    """A run folder, finished or not, opened for use."""

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]

    @property
    def best_epochs(self) -> list[int]:
        """The best epochs by validation, best first; their checkpoints are kept."""
        return best_epochs(self.metrics)

    @property
    def run_config(self) -> RunConfig:
        if "method" not in self.config:
            raise UserError(f"the model of the run in {self.folder} is your own: build its learner in code")
        return run_config(self.config, self.folder)

    def dataset(self) -> Dataset:
        """The data set, where the command line made the run."""
        return load_dataset(self.run_config.dataset, self.run_config.pixels)

    def learner(self) -> Learner:
        """The learner, where the command line made the run."""
        return build_learner(self.run_config, self.dataset().image)

    def state(self, epoch: int | None = None) -> MetaState:
        """The state after an epoch; None is the best one."""
        if not self.metrics:
            raise UserError(f"the run in {self.folder} has not finished an epoch yet")
        tensors = load_epoch(self.folder, self.best_epochs[0] if epoch is None else epoch)
        return MetaState.of(
            {name: t for name, t in tensors.items() if name.startswith(("params/", "learned/", "memory/"))}
        )

    def save_pretrained(self, folder: str | Path, epoch: int | None = None, license: str = "unknown") -> Path:
        """Write the state after an epoch, None for the best one, as a folder to pass on; see `gs.from_pretrained`.

        Args:
            folder: it must be new, or empty.
            license: of the model, as the Hugging Face hub names it: `mit`, `cc-by-4.0`, ...
        """
        state = self.state(epoch)
        epoch = self.best_epochs[0] if epoch is None else epoch
        after = f"The state after epoch {epoch} of {self.config['epochs']}, meta-trained with gradshare."
        if "method" not in self.config:
            about = ["A model that learns a task from a few examples.", after]
            return write_model(Path(folder), None, state, Card(license, "", about, self._scores(epoch), self.config))
        config, dataset = self.run_config, self.dataset()
        check_fit(self.learner().init().tensors(), state.tensors())
        options = {name: value for name, value in asdict(config).items() if name not in OF_THE_MACHINE}
        options["dataset"] = dataset.name  # not where it lies
        channels, height, width = dataset.image
        about = [
            f"A Conv-4 of {config.filters} filters that learns a {config.ways}-way {config.shots}-shot task from its"
            f" support images. Method: {config.method}; arm: {config.arm}. {after}",
            f"Images: {channels} x {height} x {width}, pixels {PIXELS[config.pixels]}.",
            "Batch norm normalises with the batch at hand (transductive), at test too.",
        ]
        card = Card(license, dataset.name, about, self._scores(epoch), options)
        return write_model(Path(folder), {"options": options, "image": list(dataset.image)}, state, card)

    def _scores(self, epoch: int) -> list[Score]:
        """What is known of the state after an epoch."""
        line = self.metrics[epoch - 1]
        values = (line["val_accuracy"], line["val_loss"], line["val_interval"])
        scores = [Score("validation", self.config["val_tasks"], *values)]
        test = test_of(self.folder, epoch)
        if test is not None:
            scores += [Score("test", self.config["test_tasks"], test["accuracy"], test["loss"], test["interval"])]
        return scores


def load_run(folder: str | Path) -> SavedRun:
    """Open a run folder.

    Then `run.learner()` and `run.state()` adapt and predict as in training, and `run.save_pretrained(folder)` writes
    the model as a folder to pass on. A damaged newest checkpoint is named in a warning, and the one before it is used.
    """
    folder = path_of(folder)
    config = read_config(folder)
    if "method" in config:
        run_config(config, folder)  # refuses what it does not know
    newest = checkpoints.newest(folder / "checkpoints", identity(config))
    return SavedRun(folder, config, newest[0].metrics if newest else [])
