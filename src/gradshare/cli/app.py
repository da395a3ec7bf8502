"""The command line: commands for one run, and how every command ends. PyTorch is imported only where it is needed."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from cyclopts import App, CycloptsError, Parameter

from gradshare import __version__
from gradshare.cli.bench import bench
from gradshare.cli.data import data_app
from gradshare.cli.grid import compare, grid_app, show_report
from gradshare.cli.options import Given, Options, own_code, unrounded
from gradshare.cli.testing import test
from gradshare.cli.waiting import (
    LEFT,
    load_data,
    names_what_goes_on,
    says_how_to_go_on,
    stoppable,
    typed_command,
    what_is_left,
)
from gradshare.errors import (
    TOO_LITTLE_MEMORY,
    RendezvousFailed,
    UserError,
    check_range,
    out_of_memory,
    print_warnings_as_lines,
    say,
)
from gradshare.method.variants import variant
from gradshare.runs.config import MAY_GROW, Log, RunConfig
from gradshare.runs.folder import RunFolder
from gradshare.runs.workers import one_of_several

app = App(
    name="gradshare",
    version=__version__,
    help="Meta-learning that shares gradients between tasks. Start with: gradshare compare --out runs/first",
    suppress_keyboard_interrupt=False,  # main() handles it
    default_parameter=Parameter(converter=unrounded),
)
app.command(compare)
CODE = ("arm", "backbone")  # options that may name code of the user's own


@app.command
def train(
    options: Options = Given(),
    *,
    preset: str | None = None,
    out: Path | None = None,
    resume: Path | None = None,
    log: Log | None = None,
    timeout: float = 60.0,
) -> None:
    """Train one run: with sharing, unless --arm or the preset names another arm.

    With torchrun --nproc-per-node N -m gradshare train ... the tasks of a batch are spread over N processes.

    Parameters
    ----------
    preset
        One of the paper's experiments, as cub-5shot-5task-maml+gs (gradshare grid list), or of other papers, as
        conv32-mini-1shot-maml; options given win over it.
    out
        Folder for the run; it must not hold one already.
    resume
        Go on with the run in this folder. It has its own options: give no others, except for more --epochs or more
        --patience, and --arm or --backbone again if it is your own.
    log
        Also write the numbers of every epoch to FOLDER/tensorboard (pip install "gradshare[tensorboard]").
    timeout
        With torchrun: seconds that a process waits for another before it gives up.
    """
    folder = out or resume
    if folder is None or (out and resume):
        raise UserError("give the run's folder: --out FOLDER for a new run, or --resume FOLDER to go on (one of them)")
    if out and variant(options.arm).rate != 1:
        raise UserError(f"{options.arm} is an arm of compare; here give --arm original and the --inner-lr you mean")
    config = partial(_new, folder, options, preset) if out else partial(_stored, folder, options.given, preset)
    own = own_code([options.over(preset).arm], options.given.get("backbone"))
    go_on = _to_go_on(folder, options, preset, resume is not None, own) + (f" --log {log}" if log else "")
    if not one_of_several():
        config()  # finds a mistake before PyTorch is loaded
        names_what_goes_on(folder, typed_command(), f"gradshare {go_on}")
    from gradshare.runs.torchrun import command, ends_at_once, first_of_machine_first, processes, report_once

    with ends_at_once(), processes(timeout) as group, report_once(group, f"{command(group)} {go_on}"):
        from gradshare.runs.build import choice_for, run, with_share

        chosen = group.from_first(config)
        group.share(chosen.tasks)  # raises an error if there are more processes than tasks
        with first_of_machine_first(group):
            dataset = load_data(chosen.dataset, chosen.pixels)
        if group.first:
            say(str(with_share(choice_for(chosen, group), chosen, dataset.image, own)))
        with says_how_to_go_on(f"{command(group)} {go_on}") if group.first else nullcontext():
            run(chosen, folder, resume is not None, None, dataset, group, own, log)


def _new(folder: Path, options: Given, preset: str | None) -> RunConfig:
    """The options of a new run."""
    if RunFolder(folder).exists():
        raise UserError(f"{folder} already holds a run: go on with it (--resume), or choose another folder")
    return options.over(preset)


def _stored(folder: Path, given: dict[str, Any], preset: str | None) -> RunConfig:
    """The options of a run to go on with, and those given that it may take on."""
    if set(given) - {*MAY_GROW, *CODE} or preset is not None:
        more = "give --resume alone, or with more --epochs or --patience"
        raise UserError(f"the run in {folder} has its own options: {more}")
    stored = RunFolder(folder).config()
    if stored is None:
        raise UserError(f"the run in {folder} was started from Python: go on with it there")
    for what in CODE:
        if given.get(what, has := getattr(stored, what)) != has:
            raise UserError(f"the run in {folder} has the {what} {has}, not {given[what]}")
    return replace(stored, **given)


def _to_go_on(folder: Path, options: Given, preset: str | None, resume: bool, own: Sequence[str]) -> str:
    """The command that goes on with the run, without the program's name."""
    given, chosen = options.given if resume else {}, options.over(preset)
    more = "".join(f" --{name} {given[name]}" for name in MAY_GROW if name in given)
    code = "".join(f" --{name} {getattr(chosen, name)}" for name in CODE if getattr(chosen, name) in own)
    return f"train --resume {shlex.quote(str(folder))}{more}{code}"


app.command(test)


@app.command
def report(folder: Path) -> None:
    """Write table, plots and report.html for a run, or for all runs below a folder.

    Parameters
    ----------
    folder
        A run folder, or a folder of runs.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    show_report(folder)


@app.command
def export(
    run: Path, folder: Path, *, epoch: int | None = None, license: str = "unknown", half_memory: bool = False
) -> None:
    """Write a trained model as a folder to pass on: config.json, model.safetensors and a model card.

    It follows the convention of the Hugging Face hub and holds no code. gradshare.from_pretrained(FOLDER) reads it.

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
    half_memory
        Write the memory of shared gradients, which is larger than the weights, in bfloat16.
    """
    from gradshare.runs.export import load_run

    if epoch is not None:
        check_range("epoch", epoch, 1)
    saved = load_run(run)
    saved.save_pretrained(folder, epoch, license, half_memory)
    say(f"epoch {epoch or saved.best_epochs[0]} of {run} is in {folder}: config.json, model.safetensors, README.md")


app.command(data_app)
app.command(grid_app)
app.command(bench)


def main() -> None:
    """Run the command line: exit code 0 done, 1 a run failed, 2 the user can mend it, 3 stopped and saved."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name may be no valid text
    print_warnings_as_lines()
    try:
        if any("\0" in word for word in sys.argv):
            raise UserError("there is a NUL character in the command, which no name of a file can have")
        LEFT.clear()
        with nullcontext() if one_of_several() else stoppable(what_is_left):
            app(sys.argv[1:], exit_on_error=False, print_error=False)
    except (CycloptsError, UserError) as error:
        _end(str(error), each=isinstance(error, RendezvousFailed))
    except OSError as error:
        _end(f"{error.strerror or error}{'' if error.filename is None else f': {error.filename}'}")
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        _end(TOO_LITTLE_MEMORY)


def _end(reason: str, each: bool = False) -> NoReturn:
    """Print one line and end with exit code 2; of several processes only the first prints it, or each."""
    if not one_of_several() or os.environ["RANK"] == "0" or each:  # the others have the same reason
        say(f"gradshare: {' '.join(reason.split())}", error=True)
    raise SystemExit(2) from None
