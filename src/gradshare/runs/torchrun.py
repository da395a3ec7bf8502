"""The processes that torchrun started as one group: how they meet, and how they end together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from textwrap import shorten

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from gradshare.engine.processes import ALONE, Group, OutOfStep, PeerLost
from gradshare.errors import MOST, RendezvousFailed, UserError, say
from gradshare.runs.workers import FAILED, STOPPED, Interrupted, one_of_several

TIMEOUT = 60.0  # seconds
BUILDING = timedelta(hours=6)  # how long the first process of a machine may take to build a data set


@contextmanager
def processes(timeout: float = TIMEOUT) -> Iterator[Group]:
    """The group of processes that this one belongs to; without torchrun, a group of one.

    The processes talk by gloo on CPUs and by NCCL on GPUs.

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
    except (ValueError, RuntimeError) as error:  # of PyTorch, of many kinds
        reason = shorten(str(error).strip().partition("\n")[0], 200, placeholder=" …")
        raise RendezvousFailed(f"the processes did not meet: {reason}") from None
    store.set_timeout(limit)
    gpus = torch.cuda.device_count()
    if local_rank < gpus:
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=PrefixStore("sums", store), rank=rank, world_size=size, timeout=limit)
    try:
        yield Group(rank, size, local_rank, local_size, PrefixStore("words", store))
    except PeerLost:
        raise  # destroying the group would wait for the lost process
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def ends_at_once() -> Iterator[None]:
    """After the block, one process of several exits at once, without Python's clean-up.

    During the clean-up a thread of gloo may still hold a tensor, and abort the process (pytorch/pytorch#179291).
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
    """Run the block in the first process of each machine, then in the others: one builds, the others find it built."""
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
def report_once(group: Group, resume_command: str) -> Iterator[None]:
    """Print an error that ends the block in several processes once; each process exits with its code."""
    try:
        yield
    except (UserError, OSError) as error:
        if group.size == 1:
            raise
        text = str(error) if isinstance(error, UserError) else f"{error.strerror}: {error.filename}"
        _print_once(group, text, f"gradshare: {' '.join(text.split())}")
        raise SystemExit(2) from None
    except Interrupted:
        if group.first:
            raise
        raise SystemExit(STOPPED) from None
    except (PeerLost, OutOfStep) as error:
        text = f"gradshare: {error}; all up to the last checkpoint is kept\nto go on: {resume_command}"
        _print_once(group, type(error).__name__, text)
        sys.stdout.flush()
        os._exit(FAILED)  # a normal exit would wait for the GPU work of the lost process


def _print_once(group: Group, topic: str, text: str) -> None:
    """Print a text unless another process printed one on the same topic."""
    try:
        first = group.store is None or group.store.add(f"said/{topic}", 1) == 1
    except RuntimeError:  # the store is gone with its process
        first = True
    if first:
        for line in text.splitlines():
            say(line, error=True)


def command(group: Group) -> str:
    """How this program was started, for the command that resumes a run."""
    if group.size == 1:
        return "gradshare"
    nodes = f"--nnodes {group.size // group.local_size} " if group.size > group.local_size else ""
    return f"torchrun {nodes}--nproc-per-node {group.local_size} -m gradshare"
