"""Several processes that share the tasks of a batch. Each adapts to its own tasks, and sums go over all processes.

A `Group` is a value that is passed as an argument. Nothing here looks for a process group by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from gradshare.errors import UserError

T = TypeVar("T")


class PeerLost(Exception):
    """Another process ended, or did not answer in time."""


class OutOfStep(Exception):
    """The processes no longer have the same weights."""


@dataclass(frozen=True)
class Group:
    """The processes that work on one run, as one of them sees them. `Group()` is a single process.

    Every process has the whole state and gets the same batches of tasks. A method that communicates must be called by
    all processes, and returns the same value, to the last bit, in all of them.

    Example:
        >>> Group(rank=0, size=3).share(4), Group(rank=2, size=3).share(4)
        (slice(0, 2, None), slice(3, 4, None))
        >>> Group().sum([torch.ones(2)])
        [tensor([1., 1.])]
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # rank among the processes of this machine
    local_size: int = 1
    store: Store | None = None  # where the processes leave short messages for each other

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints for all."""
        return self.rank == 0

    def share(self, tasks: int) -> slice:
        """Return this process's tasks of a batch: equal shares, where the first processes may have one task more."""
        if tasks < self.size:
            raise UserError(
                f"{self.size} processes for {tasks} task{'s' * (tasks > 1)} a batch: each process needs a task;"
                f" start at most {tasks}, or use more tasks a batch"
            )
        each, more = divmod(tasks, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def sum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Sum each of these tensors over the processes, as one vector in one reduction. Differentiable to any order.

        Each process computes its own loss from the sums. The gradient is that of the sum of all these losses.
        """
        if self.size == 1:
            return list(parts)
        flat = _Sum.apply(torch.cat([part.reshape(-1) for part in parts]), self)
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts, strict=True)]

    def sum_tasks(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum `{name: [own tasks, *shape]}` over the tasks of all processes. Returns `{name: [*shape]}`."""
        totals = self.sum([gradient.sum(0) for gradient in gradients.values()])
        return dict(zip(gradients, totals, strict=True))

    def placed(self, own: Tensor, tasks: int) -> Tensor:  # [own tasks] -> [tasks]
        """Return the values of this process's tasks at their places in the batch, and zero elsewhere.

        The sum over processes then holds the values of all tasks.
        """
        whole = own.new_zeros(tasks)
        whole[self.share(tasks)] = own
        return whole

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any process. Computed on the CPU, so that no GPU waits for it."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag))
        with self._checked():
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return bool(value)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of their ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._checked():
            dist.all_gather_object(values, value)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` in the first process and return its result in all. A UserError or OSError is raised in all."""
        if self.size == 1:
            return make()
        made: list[Any] = [None, None]
        if self.first:
            try:
                made[0] = make()
            except (UserError, OSError) as error:
                made[1] = error
        with self._checked():
            dist.broadcast_object_list(made, src=0)
        if made[1] is not None:
            raise made[1]
        return made[0]

    def check_same(self, tensors: Mapping[str, Tensor], when: str) -> None:
        """Raise `OutOfStep` unless all processes have the same tensors, to the last bit."""
        if self.size == 1:
            return
        digest = hashlib.sha256()
        for tensor in tensors.values():
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digests = self.gather(digest.hexdigest())
        if len(set(digests)) > 1:
            other = next(rank for rank, one in enumerate(digests) if one != digests[0])
            raise OutOfStep(
                f"{when} processes 0 and {other} no longer have the same weights: all processes must run the same"
                " versions on the same kind of machine"
            )

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise `PeerLost` for the many errors with which PyTorch reports a failed reduction."""
        try:
            yield
        except RuntimeError as error:
            reason = shorten(str(error).strip().splitlines()[0].rpartition("] ")[2], 200, placeholder=" …")
            raise PeerLost(
                f"process {self.rank} of {self.size} lost another one, which ended or did not answer in time ({reason})"
            ) from error


ALONE = Group()


class _Sum(torch.autograd.Function):
    """The sum over processes. `dist.all_reduce` in place would give wrong outer gradients without any error."""

    @staticmethod
    def forward(flat: Tensor, group: Group) -> Tensor:
        total = flat.detach().clone(memory_format=torch.contiguous_format)
        with group._checked():
            dist.all_reduce(total)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # The result of every process contains this process's input once, so their gradients are summed.
        return _Sum.apply(gradients[0], ctx.group), None
