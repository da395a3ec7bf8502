"""The processes that torchrun started as a group; one voice for all of them, and a clear end when one is lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from textwrap import shorten

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from gradshare.engine.processes import ALONE, Group, Lost, OutOfStep
from gradshare.errors import MOST, Unmet, UserError
from gradshare.runs.interruption import Interrupted
from gradshare.runs.workers import FAILED, STOPPED, one_of_several

TIMEOUT = 60.0  # seconds
PATIENCE = 10.0  # seconds that the first process stays for others with the same mistake
BUILDING = timedelta(hours=6)  # how long the first process of a machine may take to build a data set


@contextmanager
def processes(timeout: float = TIMEOUT) -> Iterator[Group]:
    """The group of processes that this one belongs to, by gloo on the CPU and NCCL on GPUs; alone, a group of one.

    Args:
        timeout: seconds that a process waits for another before it gives up.

    Example:
        >>> import gradshare as gs
        >>> with gs.processes() as group:  # torchrun --nproc-per-node 4 train.py; then gs.train(..., group=group)
        ...     group.size
        1
    """
    if not one_of_several():
        yield ALONE
        return
    if not 0 < timeout <= MOST:
        raise UserError(f"timeout is {timeout}; it must be above 0 seconds")
    limit = timedelta(seconds=timeout)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        local_rank, local_size = (
            int(os.environ.get(f"LOCAL_{name}", of)) for name, of in (("RANK", rank), ("WORLD_SIZE", size))
        )
    except (ValueError, RuntimeError) as error:  # PyTorch's own, of many kinds
        said = shorten(str(error).strip().partition("\n")[0], 200, placeholder=" …")
        raise Unmet(f"the processes did not meet: {said}") from None
    store.set_timeout(limit)
    gpus = torch.cuda.device_count()
    if local_rank < gpus:
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=PrefixStore("sums", store), rank=rank, world_size=size, timeout=limit)
    try:
        yield Group(rank, size, local_rank, local_size, PrefixStore("words", store))
    except Lost:
        raise  # taking the group apart would wait for the lost one
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def ends_at_once() -> Iterator[None]:
    """One process of several ends with the block, by its exit code, and not by taking Python apart.

    A thread of gloo's may still hold the last tensor then, and would abort the process (pytorch/pytorch#179291).
    """
    code: object = 0
    try:
        yield
    except SystemExit as end:
        if not one_of_several():
            raise
        code = end.code
    if one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


@contextmanager
def first_of_machine_first(group: Group) -> Iterator[None]:
    """The block in the first process of each machine, and then in the others: one builds, the others find it built."""
    if group.store is None:
        yield
        return
    key = f"ready/{group.rank - group.local_rank}"
    if group.local_rank:
        group.store.wait([key], BUILDING)
    try:
        yield
    finally:
        if not group.local_rank:
            group.store.set(key, "")


@contextmanager
def one_voice(group: Group, to_go_on: str) -> Iterator[None]:
    """What ends the block in several processes is said once; each ends with its exit code.

    Args:
        to_go_on: the command that goes on with the run.
    """
    with _deaf_once_lost(group):
        try:
            yield
        except (UserError, OSError) as error:
            if group.size == 1:
                raise
            text = str(error) if isinstance(error, UserError) else f"{error.strerror}: {error.filename}"
            said = f"gradshare: {' '.join(text.split())}"
            _say_once(group, said)
            _stay_for_others(group, said)
            raise SystemExit(2) from None
        except Interrupted:
            if group.first:
                raise
            raise SystemExit(STOPPED) from None
        except (Lost, OutOfStep) as error:
            kind = type(error).__name__  # each process says it in its own words, and one of them is enough
            _say_once(group, f"gradshare: {error}; all up to the last checkpoint is kept\nto go on: {to_go_on}", kind)
            sys.stdout.flush()
            os._exit(FAILED)  # an ordinary end would wait for what the lost one owes the GPU


@contextmanager
def _deaf_once_lost(group: Group) -> Iterator[None]:
    """torchrun sends SIGTERM to those that are left, and it may come before they have said what happened."""

    def hear(number: int, frame: object) -> None:
        if not Lost.happened:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if group.size == 1:
        yield
        return
    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(group: Group) -> str:
    """How this program was started, for the command that goes on."""
    if group.size == 1:
        return "gradshare"
    nodes = f"--nnodes {group.size // group.local_size} " if group.size > group.local_size else ""
    return f"torchrun {nodes}--nproc-per-node {group.local_size} -m gradshare"


def _say_once(group: Group, text: str, topic: str | None = None) -> None:
    try:
        first = group.store is None or group.store.add(f"said/{topic or text}", 1) == 1
    except RuntimeError:  # the store went down with its process
        first = True
    if first:
        print(text, file=sys.stderr, flush=True)


def _stay_for_others(group: Group, text: str) -> None:
    """Have those with the same mistake find it said: without torchrun, the store is the first process's own."""
    if not group.first or group.store is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    until = time.monotonic() + PATIENCE
    while group.store.add(f"said/{text}", 0) < group.size and time.monotonic() < until:
        time.sleep(0.05)
