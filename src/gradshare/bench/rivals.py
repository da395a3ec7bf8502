"""The same MAML step in other libraries, written like their own few-shot examples, and as fast as we know how.

The work is the same: the same network (for `gs.Conv4` plain `nn.Conv2d`, and `nn.BatchNorm2d` with the statistics of
the batch), the same adapted weights (gain and bias of batch norm are meta-learned, not adapted), the same loss, second
order, and Adam. A test checks that their meta-gradients equal ours. They have no gradient sharing, so they are timed
without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradshare.bench.cases import RIVALS, Case, Library
from gradshare.bench.roofline import tf32_products
from gradshare.engine.vmapped import norms, prepare
from gradshare.errors import UserError
from gradshare.method.episodes import Episodes


def load(library: Library) -> Any:
    """Import a rival, or raise an error with the reason in one line."""
    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        raise UserError(f"{library} is not installed ({error}): pip install 'gradshare[bench]'") from error
    except Exception as error:  # compiled code for another version of PyTorch can raise any error
        raise UserError(f"{library} does not import: {type(error).__name__}: {' '.join(str(error).split())}") from error


def versions() -> dict[str, str]:
    """Return the versions of the rivals that are installed."""
    found: dict[str, str] = {}
    for library in RIVALS:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def meta_step(case: Case, network: nn.Module, rate: float, inner_rate: float) -> Callable[[Episodes], None]:
    """Return a function that runs a whole meta-iteration with a rival: inner loop of each task, meta-gradient, Adam."""
    network = prepare(network).to(case.device)
    gradient = GRADIENTS[case.library](network, case.steps, inner_rate)
    adam = torch.optim.Adam(network.parameters(), lr=rate, fused=case.device != "cpu")

    def step(episodes: Episodes) -> None:
        adam.zero_grad()
        with _precision(case), sdpa_kernel(SDPBackend.MATH):  # other attention has no second derivative
            gradient(episodes)
        adam.step()

    return step


def _precision(case: Case) -> AbstractContextManager[Any]:
    """Set the precision as a user of these libraries would: PyTorch's option for TF32, its autocast for bf16."""
    if case.precision == "bf16":
        return torch.autocast(
            torch.device(case.device).type, torch.bfloat16, cache_enabled=False
        )  # casts of one task must not serve the next
    return tf32_products(case.precision == "tf32") if case.device != "cpu" else nullcontext()


def with_higher(network: nn.Module, steps: int, inner_rate: float) -> Callable[[Episodes], None]:
    """Use `higher.innerloop_ctx` and a backward pass for each task, as in its examples/maml-omniglot.py.

    higher differentiates an inner loss with respect to all weights of the network, also those that the inner optimiser
    does not change. If these were the same tensors in every step, autograd would go back through all earlier steps to
    find their other uses: 1 + 2 + ... + K steps instead of K. So each step gets its own views of them.
    """
    higher = load("higher")
    layers = norms(network)
    unchanged = [name.rpartition(".")[0] in layers for name, _ in network.named_parameters()]
    inner = torch.optim.SGD(_adapted(network).parameters(), lr=inner_rate)

    def gradient(episodes: Episodes) -> None:
        support, query = _images(episodes)
        for task in range(episodes.tasks):
            with higher.innerloop_ctx(network, inner, copy_initial_weights=False) as (fast, optimiser):
                for _ in range(steps):
                    weights = [
                        w.view_as(w) if fixed else w for w, fixed in zip(fast.fast_params, unchanged, strict=True)
                    ]
                    logits = fast(support[task], params=weights)
                    optimiser.step(F.cross_entropy(logits, episodes.support_y[task]))
                loss = F.cross_entropy(fast(query[task]), episodes.query_y[task])
                (loss / episodes.tasks).backward()

    return gradient


def with_torchopt(network: nn.Module, steps: int, inner_rate: float) -> Callable[[Episodes], None]:
    """Use `torchopt.MetaSGD` and one backward pass for all tasks, as in its examples/few-shot/maml_omniglot.py."""
    torchopt = load("torchopt")
    inner = torchopt.MetaSGD(_adapted(network), lr=inner_rate)

    def gradient(episodes: Episodes) -> None:
        losses = []
        support, query = _images(episodes)
        start = torchopt.extract_state_dict(network, by="reference", detach_buffers=True)
        inner_start = torchopt.extract_state_dict(inner, by="reference")
        for task in range(episodes.tasks):
            for _ in range(steps):
                inner.step(F.cross_entropy(network(support[task]), episodes.support_y[task]))
            losses.append(F.cross_entropy(network(query[task]), episodes.query_y[task]))
            torchopt.recover_state_dict(network, start)
            torchopt.recover_state_dict(inner, inner_start)
        torch.stack(losses).mean().backward()

    return gradient


def _adapted(network: nn.Module) -> nn.Module:
    """The network's own layers whose weights the inner loop changes: all but batch norm."""
    layers = norms(network)
    if not layers:
        return network
    own = [layer for name, layer in network.named_modules() if layer._parameters and name not in layers]
    return nn.ModuleList(own)


GRADIENTS: dict[str, Callable[[nn.Module, int, float], Callable[[Episodes], None]]] = {
    "higher": with_higher,
    "torchopt": with_torchopt,
}


def _images(episodes: Episodes) -> tuple[Tensor, Tensor]:
    assert isinstance(episodes.support_x, Tensor) and isinstance(episodes.query_x, Tensor)
    return episodes.support_x, episodes.query_x
