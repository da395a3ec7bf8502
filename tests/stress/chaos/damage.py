"""Damaged files: named and not used, or an error that names them, or harmless; never loaded silently."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from gradshare.errors import UserError
from gradshare.runs import checkpoints
from gradshare.runs.locks import lock_of

from .children import Broken, Ended, gradshare
from .moments import Trap, send
from .runs import Run
from .settings import Chaos


def flip(content: bytearray, random: Random) -> str:
    bit = random.randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    return f"bit {bit} flipped"


def truncate(content: bytearray, random: Random) -> str:
    length = random.randrange(len(content))
    del content[length:]
    return f"cut to {length} bytes"


def zero(content: bytearray, random: Random) -> str:
    start = random.randrange(len(content))
    end = min(len(content), start + random.choice((1, 16, 512, 4096)))
    content[start:end] = bytes(end - start)
    return f"bytes {start} to {end} zeroed"


def empty(content: bytearray, random: Random) -> str:
    content.clear()
    return "emptied"


def garbage(content: bytearray, random: Random) -> str:
    content[:] = random.randbytes(len(content))
    return "random bytes"


def appended(content: bytearray, random: Random) -> str:
    content += random.randbytes(random.randint(1, 64))
    return "bytes added"


WAYS: list[Callable[[bytearray, Random], str]] = [flip] * 8 + [truncate] * 5 + [zero] * 3 + [empty, garbage, appended]
WHAT = "damaged files"


def files(chaos: Chaos, random: Random) -> Iterator[None]:
    """One file of a finished or an unfinished run is damaged; then the run is resumed and finished."""
    origins = _origins(chaos)
    for i in range(chaos.damaged):
        run, origin = origins[i % len(origins)]
        name, change = _choose(origin, random)
        with chaos.trying(WHAT, f"{run.name}, {origin.name}/{name}: {change.__name__}") as place:
            shutil.copytree(origin, place / "run")
            how = _apply(place / "run" / name, change, random)
            resume = random.random() < 0.25  # to load a checkpoint is quick, to resume a run is not
            try:
                outcome = _take_up(run, place / "run", name, resume)
            except Broken as error:
                raise Broken(f"{how}\n{error}") from None
        chaos.outcomes[f"{WHAT}: {outcome}"] += 1
        yield


def _origins(chaos: Chaos) -> list[tuple[Run, Path]]:
    return [(run, origin) for run in chaos.runs for origin in (stopped(chaos, run), run.whole)]


def checkpoints_of_another_run(chaos: Chaos, random: Random) -> Iterator[None]:
    """A whole checkpoint of the same run with another seed: its shapes and checksums are right."""
    run = chaos.runs[1]
    other, seed = chaos.folder / "other-seed", run.options.index("--seed") + 1
    gradshare("train", *run.options[:seed], 999, *run.options[seed + 1 :], "--out", other)
    for origin in (stopped(chaos, run), run.whole):
        for path in checkpoints.listing(other / "checkpoints"):
            name = Path("checkpoints", path.name, "tensors.safetensors")
            if not (origin / name).exists():
                continue
            with chaos.trying("checkpoints of another run", f"{run.name}, {origin.name}: {path.name}") as place:
                shutil.copytree(origin, place / "run")
                shutil.copytree(path, (place / "run" / name).parent, dirs_exist_ok=True)
                outcome = _resume(run, place / "run", name)
            chaos.outcomes[f"checkpoints of another run: {outcome}"] += 1
            yield


def lock_files(chaos: Chaos, random: Random) -> Iterator[None]:
    """The lock file of a process that is gone, damaged: it does not matter."""
    for i in range(chaos.damaged // 30):
        run, change = chaos.runs[i % len(chaos.runs)], random.choice(WAYS)
        with chaos.trying("damaged lock files", f"{run.name}: {change.__name__}") as place:
            lock = lock_of(place / "run")
            lock.write_text("process 1 on another machine, since 2026-01-01 00:00:00\n")
            _apply(lock, change, random)
            run.finish(place / "run")
        yield


def stopped(chaos: Chaos, run: Run) -> Path:
    """The run, stopped in the middle of its last epoch."""
    folder = chaos.folder / f"stopped-{run.whole.name}" / "run"
    if not folder.exists():
        folder.parent.mkdir()
        draws = [n for n, moment in enumerate(run.moments, 1) if moment.kind == "train"]
        ended = gradshare(*run.start(folder), before=Trap(folder.parent, draws[-2], send(signal.SIGTERM)).set)
        ended.must(ended.code == 3, "a run could not be stopped")
    return folder


def _choose(origin: Path, random: Random) -> tuple[Path, Callable[[bytearray, Random], str]]:
    """A file, mostly of a checkpoint, and a way to damage it."""
    files = sorted(path.relative_to(origin) for path in origin.rglob("*") if path.is_file())
    inside = [path for path in files if path.parts[0] == "checkpoints"]
    name = random.choice(inside if random.random() < 0.8 else files)
    return name, random.choice([*WAYS, _swap] if len(name.parts) > 1 else WAYS)


def _swap(content: bytearray, random: Random) -> str:
    raise NotImplementedError("needs another file: see _apply")


def _apply(path: Path, change: Callable[[bytearray, Random], str], random: Random) -> str:
    if change is _swap:
        everyone = path.parents[4].glob(f"whole-*/checkpoints/*/{path.name}")
        others = sorted({*path.parents[1].glob(f"*/{path.name}"), *everyone} - {path})
        others = [other for other in others if other.read_bytes() != path.read_bytes()]
        other = random.choice(others)
        path.write_bytes(other.read_bytes())
        return f"replaced by {other}"
    content = bytearray(path.read_bytes())
    if not content:  # nothing to flip
        change = appended
    how = change(content, random)
    path.write_bytes(content)
    return how


def _take_up(run: Run, folder: Path, name: Path, whole: bool) -> str:
    """Loads, resumes, and says which promise was kept; not `whole`: a checkpoint's file is only loaded."""
    if len(name.parts) == 1:
        return _resume(run, folder, name)
    if _loads(run, folder.joinpath(*name.parts[:2]), folder):
        return "did not matter: the same content"
    return _resume(run, folder, name) if whole else "an error named it"


def _resume(run: Run, folder: Path, name: Path) -> str:
    newest = checkpoints.listing(folder / "checkpoints")[-1]
    ended = gradshare(*run.start(folder))
    ended.must_be_tidy()
    if ended.code == 2:
        return _must_name(ended, name)
    ended.must(ended.code == 0, "a damaged file ended the command otherwise than with 2")
    _must_have_the_same_results(run, folder)
    if len(name.parts) == 1:
        return "did not matter, or was rebuilt"
    if name.parts[1] == newest.name:
        ended.must(newest.name in ended.text, "a damaged newest checkpoint was passed over without a word")
        return "named, and the checkpoint before was used"
    return "not needed, and an error named it when asked for"


def _loads(run: Run, checkpoint: Path, folder: Path) -> bool:
    """Whether a damaged checkpoint loads; then it must be as it was."""
    try:
        checkpoints.load(checkpoint)
    except UserError as error:
        if checkpoint.name not in str(error):
            raise Broken(f"the damaged checkpoint is not named: {error}") from None
        return False
    tensors = Path("checkpoints", checkpoint.name, "tensors.safetensors")
    for origin in (run.whole, folder.parent.parent / f"stopped-{run.whole.name}" / "run"):
        if (origin / tensors).exists() and (origin / tensors).read_bytes() == (folder / tensors).read_bytes():
            return True
    raise Broken(f"{checkpoint} was loaded silently")


def _must_name(ended: Ended, name: Path) -> str:
    complaints = [line for line in ended.text.splitlines() if line.startswith("gradshare: ")]
    ended.must(len(complaints) == 1 and name.parts[min(1, len(name.parts) - 1)] in complaints[0], "file not named")
    return "an error named it and ended the command"


def _must_have_the_same_results(run: Run, folder: Path) -> None:
    for name in ("metrics.jsonl", "summary.json", "config.json"):
        if (run.whole / name).read_bytes() != (folder / name).read_bytes():
            raise Broken(f"{name} is another one")
    last = checkpoints.listing(run.whole / "checkpoints")[-1].name
    first, second = (f / "checkpoints" / last / "tensors.safetensors" for f in (run.whole, folder))
    if first.read_bytes() != second.read_bytes():
        raise Broken(f"the tensors of {last} are others")
