"""The same MAML step in other libraries, written as their own few-shot examples are, and as fast as we know how.

Like for like: the same network (`gs.Conv4`: plain `nn.Conv2d` and `nn.BatchNorm2d` on the batch's own statistics), the
same adapted weights (batch norm's gain and bias are meta-learned, not adapted), the same loss, second order, and Adam.
Their meta-gradients equal ours: `tests/test_bench.py`. They have no gradient sharing, so they are timed without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gradshare.bench.cases import RIVALS, Case, Library
from gradshare.bench.ceilings import tf32_products
from gradshare.engine.networks import Conv4
from gradshare.errors import UserError
from gradshare.method.episodes import Episodes


class Missing(UserError):
    """A library that cannot be used here, and why."""


def load(library: Library) -> Any:
    """Import a rival, or say in one line why that fails."""
    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        raise Missing(f"{library} is not there ({error}); pip install 'gradshare[bench]' installs it") from error
    except Exception as error:  # a compiled part that does not fit this PyTorch can raise anything
        raise Missing(f"{library} does not import: {type(error).__name__}: {' '.join(str(error).split())}") from error


def versions() -> dict[str, str]:
    """The rivals that are installed."""
    found: dict[str, str] = {}
    for library in RIVALS:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def meta_step(case: Case, rate: float, inner_rate: float) -> Callable[[Episodes], None]:
    """A whole meta-iteration with a rival: inner loops task by task, meta-gradient, Adam."""
    network = Conv4(case.ways, case.filters, case.image).to(case.device)
    gradient = GRADIENTS[case.library](network, case.steps, inner_rate)
    adam = torch.optim.Adam(network.parameters(), lr=rate, fused=case.device != "cpu")

    def step(episodes: Episodes) -> None:
        adam.zero_grad()
        with _precision(case):
            gradient(episodes)
        adam.step()

    return step


def _precision(case: Case) -> AbstractContextManager[Any]:
    """TF32 by PyTorch's switch, bf16 by its autocast: what these libraries leave to PyTorch."""
    if case.precision == "bf16":
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)  # the cache would outlive a task
    return tf32_products(case.precision == "tf32") if case.device != "cpu" else nullcontext()


def with_higher(network: Conv4, steps: int, inner_rate: float) -> Callable[[Episodes], None]:
    """`higher.innerloop_ctx`, and a backward pass for each task, as its examples/maml-omniglot.py does.

    higher differentiates an inner loss by all weights of the network, also by those that the inner optimiser leaves
    alone. Were these the same tensors in every step, autograd would go back through all earlier steps to find their
    other uses: 1 + 2 + ... + K steps instead of K. So each step gets views of its own of them.
    """
    higher = load("higher")
    left_alone = [name.startswith("norms") for name, _ in network.named_parameters()]
    inner = torch.optim.SGD(_adapted(network).parameters(), lr=inner_rate)

    def gradient(episodes: Episodes) -> None:
        for task in range(episodes.tasks):
            with higher.innerloop_ctx(network, inner, copy_initial_weights=False) as (fast, optimiser):
                for _ in range(steps):
                    weights = [
                        w.view_as(w) if alone else w for w, alone in zip(fast.fast_params, left_alone, strict=True)
                    ]
                    logits = fast(episodes.support_x[task], params=weights)
                    optimiser.step(F.cross_entropy(logits, episodes.support_y[task]))
                loss = F.cross_entropy(fast(episodes.query_x[task]), episodes.query_y[task])
                (loss / episodes.tasks).backward()

    return gradient


def with_torchopt(network: Conv4, steps: int, inner_rate: float) -> Callable[[Episodes], None]:
    """`torchopt.MetaSGD`, and one backward pass for all tasks, as its examples/few-shot/maml_omniglot.py does."""
    torchopt = load("torchopt")
    inner = torchopt.MetaSGD(_adapted(network), lr=inner_rate)

    def gradient(episodes: Episodes) -> None:
        losses = []
        start = torchopt.extract_state_dict(network, by="reference", detach_buffers=True)
        inner_start = torchopt.extract_state_dict(inner, by="reference")
        for task in range(episodes.tasks):
            for _ in range(steps):
                inner.step(F.cross_entropy(network(episodes.support_x[task]), episodes.support_y[task]))
            losses.append(F.cross_entropy(network(episodes.query_x[task]), episodes.query_y[task]))
            torchopt.recover_state_dict(network, start)
            torchopt.recover_state_dict(inner, inner_start)
        torch.stack(losses).mean().backward()

    return gradient


def _adapted(network: Conv4) -> nn.ModuleList:
    """The layers whose weights the inner loop moves, the very ones of the network."""
    return nn.ModuleList([*network.convs, network.head])


GRADIENTS: dict[str, Callable[[Conv4, int, float], Callable[[Episodes], None]]] = {
    "higher": with_higher,
    "torchopt": with_torchopt,
}
