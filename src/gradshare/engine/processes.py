"""Several processes that share the tasks of a batch: each adapts to its own, and they meet where the tasks meet.

A `Group` is a value: the core gets it as an argument, and nothing here looks for a process group by itself.
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
    """Another process ended, or gave no sign of life in time."""


class OutOfStep(Exception):
    """The processes no longer hold the same weights."""


@dataclass(frozen=True)
class Group:
    """The processes that work on one run, seen from one of them; by itself, `Group()`, a process is alone.

    Every process holds the whole state and is given the same batches of tasks. What a method here returns is the same
    in all processes, to the last bit, and all of them have to call it.

    Example:
        >>> Group(rank=0, size=3).share(4), Group(rank=2, size=3).share(4)
        (slice(0, 2, None), slice(3, 4, None))
        >>> Group().sum([torch.ones(2)])
        [tensor([1., 1.])]
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this machine
    local_size: int = 1
    store: Store | None = None  # what the processes leave word for each other in

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks for all."""
        return self.rank == 0

    def share(self, tasks: int) -> slice:
        """Which tasks of a batch are this process's: equal shares, the first processes one more if need be."""
        if tasks < self.size:
            raise UserError(
                f"{self.size} processes for {tasks} task{'s' * (tasks > 1)} a batch: each process needs a task;"
                f" start {tasks} or fewer, or raise the tasks of a batch"
            )
        each, more = divmod(tasks, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def sum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each of these tensors summed over the processes: one vector, one reduction; differentiable to any order.

        What follows from the sums is different in every process, and its derivative takes in all of them: where each
        process has its own loss, the gradient is that of the sum of all losses.
        """
        if self.size == 1:
            return list(parts)
        flat = _Sum.apply(torch.cat([part.reshape(-1) for part in parts]), self)
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts, strict=True)]

    def sum_tasks(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`{name: [own tasks, *shape]}` summed over the tasks of all processes, `{name: [*shape]}`."""
        totals = self.sum([gradient.sum(0) for gradient in gradients.values()])
        return dict(zip(gradients, totals, strict=True))

    def placed(self, own: Tensor, tasks: int) -> Tensor:  # [own tasks] -> [tasks]
        """Values of the own tasks at their place in the batch, and zero elsewhere: summed, those of all tasks."""
        whole = own.new_zeros(tasks)
        whole[self.share(tasks)] = own
        return whole

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process. On the CPU, so that no GPU has to wait for it."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag))
        with self._together():
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return bool(value)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(values, value)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes, in all; an error that a user can mend is raised in all as well."""
        if self.size == 1:
            return make()
        made: list[Any] = [None, None]
        if self.first:
            try:
                made[0] = make()
            except (UserError, OSError) as error:
                made[1] = error
        with self._together():
            dist.broadcast_object_list(made, src=0)
        if made[1] is not None:
            raise made[1]
        return made[0]

    def check_same(self, tensors: Mapping[str, Tensor], when: str) -> None:
        """Raise `OutOfStep` unless the tensors are the same in all processes, to the last bit."""
        if self.size == 1:
            return
        digest = hashlib.sha256()
        for tensor in tensors.values():
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digests = self.gather(digest.hexdigest())
        if len(set(digests)) > 1:
            other = next(rank for rank, one in enumerate(digests) if one != digests[0])
            raise OutOfStep(
                f"{when} processes 0 and {other} do not hold the same weights any more: they must run the same versions"
                " on machines of one kind"
            )

    @contextmanager
    def _together(self) -> Iterator[None]:
        """PyTorch's many errors of a failed reduction as the one thing that they mean."""
        try:
            yield
        except RuntimeError as error:
            reason = shorten(str(error).strip().splitlines()[0].rpartition("] ")[2], 200, placeholder=" …")
            raise PeerLost(
                f"process {self.rank} of {self.size} lost another one, which ended or gave no sign of life ({reason})"
            ) from error


ALONE = Group()


class _Sum(torch.autograd.Function):
    """The sum over processes; `dist.all_reduce` in place would give wrong outer gradients without any error."""

    @staticmethod
    def forward(flat: Tensor, group: Group) -> Tensor:
        total = flat.detach().clone(memory_format=torch.contiguous_format)
        with group._together():
            dist.all_reduce(total)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every process's result depends on this one's input in the same way: once.
        return _Sum.apply(gradients[0], ctx.group), None
