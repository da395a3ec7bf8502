"""Recurrent layers and cells in plain operations.

PyTorch's own cannot run under vmap, and on a GPU they have no second derivative. A state is a tuple of tensors:
(hidden,), and for an LSTM (hidden, cell).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradshare.engine.replacements import dropout_message
from gradshare.errors import UserError

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]  # W_ih x + b_ih, W_hh h + b_hh, state -> next state


def _tanh(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    return (torch.tanh(of_input + of_hidden),)


def _relu(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    return (torch.relu(of_input + of_hidden),)


def _gru(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = of_input.chunk(3, -1), of_hidden.chunk(3, -1)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return ((state[0] - new) * torch.sigmoid(update_x + update_h) + new,)


def _lstm(of_input: Tensor, of_hidden: Tensor, state: State) -> State:
    admit, keep, new, show = (of_input + of_hidden).chunk(4, -1)
    cell = torch.sigmoid(keep) * state[1] + torch.sigmoid(admit) * torch.tanh(new)
    return torch.sigmoid(show) * torch.tanh(cell), cell


def _run(
    step: Step,
    x: Tensor,  # [length, n, features]
    state: State,  # each [n, hidden]
    weights: Sequence[Tensor],  # W_ih, W_hh; b_ih, b_hh if there are biases; W_hr if the hidden state is projected
    has_biases: bool,
    backwards: bool,
) -> tuple[Tensor, State]:
    """Run one layer in one direction. Returns its outputs [length, n, hidden] and the state after the last step."""
    b_ih, b_hh = weights[2:4] if has_biases else (None, None)
    inputs, outputs = list(F.linear(x, weights[0], b_ih).unbind(0)), []
    for of_input in reversed(inputs) if backwards else inputs:
        state = step(of_input, F.linear(state[0], weights[1], b_hh), state)
        if len(weights) % 2:
            state = (F.linear(state[0], weights[-1]), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _layers(name: str, step: Step) -> Callable[..., tuple[Tensor, ...]]:
    """Replace torch.rnn_tanh, rnn_relu, gru or lstm; the results are in the same order: outputs, then final states."""

    def layers(*args: Any) -> tuple[Tensor, ...]:
        if isinstance(args[3], Sequence):  # (data, batch_sizes, hx, params, ...)
            raise_for_packed()
        x, hx, params, has_biases, num_layers, dropout, training, bidirectional, batch_first = args
        if training and dropout > 0 and num_layers > 1:
            raise UserError(dropout_message(f"torch.{name}", dropout))
        x, start = x.transpose(0, 1) if batch_first else x, (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if len(x) == 0:
            raise UserError(f"torch.{name} got sequences of 0 steps; it needs at least 1")
        directions = 2 if bidirectional else 1
        size, ends = len(params) // (num_layers * directions), []
        for first in range(0, num_layers * directions, directions):
            runs = [
                _run(
                    step, x, tuple(each[i] for each in start), params[i * size : (i + 1) * size], has_biases, i > first
                )
                for i in range(first, first + directions)
            ]
            x = torch.cat([outputs for outputs, _ in runs], -1)
            ends += [state for _, state in runs]
        return x.transpose(0, 1) if batch_first else x, *(torch.stack(each) for each in zip(*ends, strict=True))

    return layers


def raise_for_packed(*args: Any) -> None:
    raise UserError("a PackedSequence cannot run for many tasks at once: use padded sequences instead")


def _cell(name: str, step: Step) -> Callable[..., Tensor | State]:
    """Replace torch.rnn_tanh_cell, rnn_relu_cell, gru_cell or lstm_cell."""

    def cell(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor | State:
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        expected = (len(input), w_hh.shape[1])
        for each in state:
            if each.shape != expected:
                raise UserError(f"torch.{name} got a state of shape {list(each.shape)}; it must be {list(expected)}")
        state = step(F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
        return state[0] if isinstance(hx, Tensor) else state

    return cell


STEPS = {"rnn_tanh": _tanh, "rnn_relu": _relu, "gru": _gru, "lstm": _lstm}
RECURRENT: dict[Any, Callable[..., Any]] = {getattr(torch, name): _layers(name, step) for name, step in STEPS.items()}
RECURRENT.update({getattr(torch, f"{name}_cell"): _cell(f"{name}_cell", step) for name, step in STEPS.items()})
RECURRENT[torch._pack_padded_sequence] = raise_for_packed


@contextmanager
def weights_kept(module: nn.Module) -> Iterator[None]:
    """Restore the weights of recurrent layers afterwards.

    A recurrent layer keeps a list of the weights that it ran with last, and on a GPU moves them in memory. Here these
    weights would be those of the tasks.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    held = [(layer, layer._flat_weights, layer._flat_weight_refs) for layer in layers]
    for layer in layers:
        layer.flatten_parameters = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, weights, refs in held:
            layer._flat_weights, layer._flat_weight_refs = weights, refs
            del layer.flatten_parameters
