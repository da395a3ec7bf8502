"""The one place that chooses how a module runs: GPU kernels, CPU code, compiled programs, or PyTorch's operations."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from gradshare.engine.conv4.cpu.network import CpuConv4
from gradshare.engine.networks import Conv4, is_plain_conv4
from gradshare.errors import UserError
from gradshare.method.network import Network

Precision = Literal["float32", "tf32", "bf16"]


def backend(
    module: nn.Module, adapted: tuple[str, ...], any_layout: bool, precision: Precision, kernels: bool, compiled: bool
) -> Network:
    """How to run a module on many tasks.

    Args:
        adapted: names of the weights that the inner loop moves.
        any_layout: whether the inner rule accepts all weights as one vector.
        precision: `"float32"`, or on a GPU `"tf32"`, or `"bf16"`.
        kernels: whether our GPU kernels for Conv4 can run it.
        compiled: whether to compile it in any case. Without kernels the other precisions compile all networks but
            `Conv4` on a CPU.
    """
    on_cpu = all(weight.is_cpu for weight in module.parameters())
    if not compiled and (
        precision == "float32" or (precision == "bf16" and on_cpu and not kernels and is_plain_conv4(module))
    ):
        return CpuConv4(module, adapted, any_layout, torch.bfloat16 if precision == "bf16" else None)
    if precision == "float32" or not kernels:
        from gradshare.engine.traced import Traced

        low = torch.bfloat16 if precision == "bf16" else None
        return Traced(module, adapted, low, precision == "tf32", any_layout)
    assert isinstance(module, Conv4)
    from gradshare.engine.conv4.triton.packed import TritonConv4

    return TritonConv4(module, adapted, any_layout, precision)


def check_current(device: torch.device) -> None:
    """Raise an error unless this GPU is the process's current one, where CUDA graphs and kernels run."""
    if device.type != "cuda" or device.index is None or not torch.cuda.is_available():
        return
    if device.index != torch.cuda.current_device():
        raise UserError(f"{device} is not this process's current GPU: call torch.cuda.set_device({device.index}) first")


def lacking(module: nn.Module, adapted: tuple[str, ...]) -> str | None:
    """Why the kernels cannot run this module with these weights adapted; None where they can."""
    if type(module) is not Conv4:
        return f"they know gs.Conv4, not {type(module).__name__}"
    if not is_plain_conv4(module):
        return "they know gs.Conv4 as it is, without hooks or changed layers"
    if any(weight.dtype.itemsize != 4 for weight in module.parameters()):
        return "they keep weights in float32"
    if any(name.startswith("norms") for name in adapted):
        return "they do not adapt batch norm"
    if module.image[0] > 7:
        return f"they take images of at most 7 channels, not {module.image[0]}"
    filters = module.get_parameter("norms.0.weight").numel()
    if filters > 128:
        return f"they have room for at most 128 filters, not {filters}"
    missing = not_installed()
    if missing is not None:
        return missing
    from gradshare.engine.conv4.triton.device import INTERPRETED

    if not (module.head.weight.is_cuda or INTERPRETED):
        return "they need an NVIDIA GPU"
    check_current(module.head.weight.device)
    return None


def not_installed() -> str | None:
    """What is missing of the kernels' language; None where it is there."""
    try:
        import triton  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        return f"Triton does not import ({error})"
    return None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:  # [tasks, n, ways], [tasks, n] -> [tasks]
    """The mean cross-entropy of every task, by our GPU kernels."""
    from gradshare.engine.conv4.triton import head

    return head.cross_entropy(logits, targets)
