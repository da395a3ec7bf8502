"""`gradshare export`: a trained run as a folder to pass on. Heavy modules are imported by the command."""

from __future__ import annotations

from pathlib import Path

from gradshare.errors import check_range


def export(run: Path, folder: Path, *, epoch: int | None = None, license: str = "unknown") -> None:
    """Write a trained model as a folder to pass on: config.json, model.safetensors and a model card.

    It is in the convention of the Hugging Face hub, holds no code, and is read by gradshare.from_pretrained(FOLDER).

    Parameters
    ----------
    run
        A run folder.
    folder
        Where the model goes; it must be new, or empty.
    epoch
        The state after this epoch; by default the best one by validation.
    license
        Of the model, as the hub names it: mit, cc-by-4.0, ...
    """
    from gradshare.runs.saved import load_run

    if epoch is not None:
        check_range("epoch", epoch, 1)
    saved = load_run(run)
    saved.save_pretrained(folder, epoch, license)
    print(f"epoch {epoch or saved.best_epochs[0]} of {run} is in {folder}: config.json, model.safetensors, README.md")
