"""Apply one module to many tasks at once, each task with its own weights.

`torch.func.vmap` does most of it. A few of PyTorch's functions are wrong, slow or not twice differentiable that way;
while a module runs they are replaced by those of `replacements.py` and `recurrent.py`, so that a user's module works
unchanged.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Size, Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gradshare.engine.networks import start_statistics
from gradshare.engine.recurrent import RECURRENT, weights_kept
from gradshare.engine.replacements import (
    FIXED_NORMS,
    REPLACED,
    dropout_message,
    masked_norms,
    moments,
    promoted,
)
from gradshare.errors import UserError, out_of_memory
from gradshare.method.episodes import Inputs, map_inputs, tensors_of
from gradshare.method.rules import Rule, Tree, Weights

BATCH_NORMS = nn.modules.batchnorm._BatchNorm
INSTANCE_NORMS = nn.modules.instancenorm._InstanceNorm
DROPOUTS = nn.modules.dropout._DropoutNd
FUNCTIONS = {**REPLACED, **RECURRENT}
ALL = "weights"  # the one name under which an inner rule sees all weights


def prepare(model: nn.Module) -> nn.Module:
    """Copy a module for use with many tasks; raise an error for layers whose results would be wrong.

    Batch norm in the copy always normalises with the statistics of the batch at hand (transductive), and instance norm
    with those of each image, unless it has been put in eval mode with running statistics.
    """
    _check_kind(model)
    model = copy.deepcopy(model)
    for name, layer in model.named_modules():
        where = f"'{name}' ({type(layer).__name__})"
        if isinstance(layer, DROPOUTS) and layer.training and layer.p > 0:
            raise UserError(dropout_message(f"layer {where}", layer.p))
        dropout = getattr(layer, "dropout", 0.0)
        drops = isinstance(layer, nn.MultiheadAttention) or (isinstance(layer, nn.RNNBase) and layer.num_layers > 1)
        if drops and layer.training and dropout > 0:
            raise UserError(dropout_message(f"layer {where}", dropout))
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise UserError(f"layer {where} has no shape yet: run the model once on an example batch first")
        if isinstance(layer, BATCH_NORMS) or (isinstance(layer, INSTANCE_NORMS) and layer.training):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return model


def _check_kind(model: nn.Module) -> None:
    """Raise an error for a model that runs by other code than its own, or that has hooks we would not run."""
    for name, layer in model.named_modules():
        where = f"layer '{name}'" if name else "the model"
        kind = type(layer).__name__
        if isinstance(layer, torch.jit.ScriptModule):
            raise UserError(f"{where} is a torch.jit module, which cannot run for many tasks: give the original module")
        if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise UserError(f"{where} is wrapped in {kind}: give the module inside, model.module")
        if kind == "OptimizedModule":  # of torch._dynamo, which is slow to import
            raise UserError(f"{where} is compiled by torch.compile: give the original module")
        if layer._backward_hooks or layer._backward_pre_hooks:
            raise UserError(f"{where} has a backward hook, which would have no effect on the gradients of a task")
    for name, weight in model.named_parameters():
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            raise UserError(
                f"parameter '{name}' has a hook, which would have no effect on the gradients of a task: remove it; an"
                " inner rule of your own can change gradients"
            )


def initialises(module: nn.Module) -> bool:
    """Whether a module has a method `initialise` that takes a generator."""
    try:
        inspect.signature(cast(Any, module).initialise).bind(None)
    except (AttributeError, TypeError):
        return False
    return True


def initialised(module: nn.Module, seed: int) -> nn.Module:
    """A copy whose method `initialise` has drawn its weights, on the CPU: the same weights whatever the device."""
    module = prepare(module).cpu()
    cast(Any, module).initialise(torch.Generator().manual_seed(seed))
    return module


class Kept:
    """What comes into the tail of a module, `[tasks, n, ...]`, and the weights that it was computed with."""

    def __init__(self) -> None:
        self.into: Tensor | None = None
        self.shared: Mapping[str, Tensor] | None = None

    def by(self, shared: Mapping[str, Tensor]) -> Tensor | None:
        """What was computed with these weights, if it is here."""
        return self.into if self.shared is shared else None


class Given(NamedTuple):
    """The inputs of a batch of tasks. Padding has been filled with copies of real examples."""

    x: Inputs
    mask: Tensor | None = None  # [tasks, n]: True for a real example
    fewest: int | None = None  # real examples of the task that has the fewest; None where that is not known
    kept: Kept | None = None  # from one inner step to the next; None: every step computes all

    def afresh(self) -> Given:
        """The same inputs, of which every inner step computes all."""
        return self._replace(kept=None)


def given(x: Inputs, mask: Tensor | None = None) -> Given:
    """Inputs with their padding filled by each task's first real example, so that nothing strange is computed there."""
    if mask is None:
        return Given(x)
    if not any(part.shape[:2] == mask.shape for part in tensors_of(x)):
        raise UserError("with a mask, at least one of the inputs starts with [tasks, examples] as the mask does")
    real = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), mask.int().argmax(1, keepdim=True))
    tasks = torch.arange(len(mask), device=mask.device).unsqueeze(1)
    filled = map_inputs(lambda part: part[tasks, real] if part.shape[:2] == mask.shape else part, x)
    return Given(filled, mask, int(mask.sum(1).min()) if mask.is_cpu else None)


class VmapBackend:
    """Any module, by PyTorch's operations.

    The *tail* of a module is the submodule that has all adapted weights, such as the head in ANIL, or the last layers
    of an `nn.Sequential`, if the module ends with it. What comes into it is the same at every inner step, and is
    computed once for a batch of tasks.

    Args:
        any_layout: whether the inner rule accepts all weights as one vector. Then it gets them so, if they are of one
            type: a few large operations in place of some for each weight.
        fixed_norms: the module comes from `with_fixed_norms`, and its running statistics are among the weights.
    """

    # The order of filters in the vector. A user's module may take a view of its filters, which needs them as they are.
    channels_last = False

    def __init__(
        self, module: nn.Module, adapted: tuple[str, ...], any_layout: bool = False, fixed_norms: bool = False
    ) -> None:
        self.module, self.adapted = module, adapted
        weights = {name: module.get_parameter(name) for name in adapted} if any_layout else {}
        self._kinds = {(weight.dtype, weight.device.type) for weight in weights.values()}
        shapes = {name: weight.shape for name, weight in weights.items()}
        self._vector = Vector(shapes, self.channels_last) if len(self._kinds) == 1 else None
        self._fixed_norms = fixed_norms
        self._functions: dict[Any, Any] = {**FUNCTIONS, **FIXED_NORMS} if fixed_norms else FUNCTIONS
        self._promotes = False  # whether activations may have another type than weights
        self._tied = _tied(module)
        self._has_run = self._keeps_apart = False  # what needs to be looked at once alone
        self.tail, self._tail, self._entrance = _tail(module, adapted)
        self._ends_with_tail = False if self._tail is module or self._tied else None  # None: nobody has looked yet

    def start(self, params: Mapping[str, Tensor]) -> Weights:
        named = {name: params[name] for name in self.adapted if name in params}  # a task may have others of its own
        return named if self._vector is None else {ALL: self._vector.pack(named)}

    def by_name(self, fast: Weights) -> Weights:
        return fast if self._vector is None else self._vector.unpack(fast[ALL])

    def pack(self, tree: Tree) -> Tree:
        vector = self._vector
        return tree if vector is None else packed_tree(tree, vector.shapes, vector.pack)

    def unpack(self, tree: Tree) -> Tree:
        return tree if self._vector is None else unpacked_tree(tree, self._vector.unpack)

    def rule(self, rule: Rule, one_process: bool) -> Rule:
        return rule

    def inputs(self, x: Inputs, mask: Tensor | None = None) -> Any:
        return given(x, mask)._replace(kept=Kept())

    def shared(self, shared: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return shared

    def forward(
        self,
        fast: Mapping[str, Tensor],  # in this network's layout: one value per task
        shared: Mapping[str, Tensor],  # {name: [*shape]}: the same value for all tasks
        x: Any,
        inner: bool,
    ) -> Tensor:  # [tasks, n, ...]
        """Run the module on each task's inputs with that task's weights."""
        fast = self.by_name(fast)
        if x.mask is not None and not self._keeps_apart:
            self._check_apart(fast, shared, x)
        into = self.into_tail(fast, shared, x)
        return self._run(fast, shared, x)[0] if into is None else self._run_tail(fast, shared, x, into)

    def into_tail(self, fast: Mapping[str, Tensor], shared: Mapping[str, Tensor], x: Given) -> Tensor | None:
        """What comes into the tail, computed once for these inputs; None where a step has to run the whole module."""
        if x.kept is None or self._ends_with_tail is False:
            return None
        if x.kept.by(shared) is None:
            leaves = [weight for weight in fast.values() if weight.requires_grad]
            if self._ends_with_tail is None and not (leaves and torch.is_grad_enabled()):
                return None  # it takes gradients to look
            outputs, _, caught = self._run(fast, shared, x, catch=True)
            if self._ends_with_tail is None:
                self._ends_with_tail = len(caught) == 1 and not _depends(caught[0], leaves)
                if self._ends_with_tail:
                    again = self._run_tail(fast, shared, x, caught[0])
                    self._ends_with_tail = _near(again, outputs)
            if not self._ends_with_tail:
                return None
            x.kept.into, x.kept.shared = caught[0], shared
        return x.kept.into

    def _run_tail(self, fast: Mapping[str, Tensor], shared: Mapping[str, Tensor], given: Given, into: Tensor) -> Tensor:
        prefix = f"{self.tail}." if self.tail else ""
        own_tensors = (*self._tail.named_parameters(), *self._tail.named_buffers())
        names = {name: prefix + name for name, _ in own_tensors}

        def one_task(fast: Mapping[str, Tensor], into: Tensor, mask: Tensor | None) -> Tensor:
            values = {**shared, **fast}
            own = {name: values[whole] for name, whole in names.items() if whole in values}
            with _Replacing(self._functions_for(given, mask), self._promotes):
                return functional_call(self._tail, own, (into,))

        return self._of_tasks(one_task, fast, given._replace(x=into))

    def statistics(
        self, fast: Mapping[str, Tensor], shared: Mapping[str, Tensor], x: Given
    ) -> dict[str, Tensor]:  # {name: [tasks, C]}
        """Mean and biased variance of what comes into each batch norm, as `running_mean` and `running_var`.

        A layer that runs several times has those of all its inputs together; one that does not run has 0 and 1.
        """
        layers = norms(self.module)
        if not layers:
            return {}
        found = self._run(fast, shared, x, watch=True)[1]
        like = next(iter(fast.values()))
        for layer in layers:
            mean, variance = _statistics(layer)
            if mean not in found:
                size = (len(like), cast(Any, layers[layer]).num_features)
                found |= {mean: like.new_zeros(size), variance: like.new_ones(size)}
        return found

    def _run(
        self,
        fast: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        given: Given,
        watch: bool = False,
        catch: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """The outputs; if asked for, the statistics of batch norm's inputs; if asked for, what comes into the tail."""
        with torch.inference_mode(False):  # a tensor of that mode does not count how often it was written
            buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        versions = {name: buffer._version for name, buffer in buffers.items()}

        def one_task(fast: Mapping[str, Tensor], x: Inputs, mask: Tensor | None) -> Any:
            replacing = _Replacing(self._functions_for(given, mask), self._promotes)
            watched = norms(self.module) if watch else {}
            with replacing, _watching(watched, mask) as seen, _catching(self._entrance if catch else None) as caught:
                values = {**buffers, **shared, **fast}
                values |= {name: values[first] for name, first in self._tied.items() if first in values}
                after = dict(values)  # functional_call puts in what the module has then
                outputs = functional_call(self.module, after, *self._arguments(x), tie_weights=False)
            if replaced := [name for name in buffers if after[name] is not values[name]]:
                raise UserError(_writes(replaced[0]))
            if not isinstance(outputs, Tensor):
                kind = "None" if outputs is None else f"a {type(outputs).__name__}"
                raise UserError(f"the model returns {kind}; it must return one tensor, such as the logits")
            return outputs, _pooled(seen), caught

        outputs, statistics, caught = self._of_tasks(one_task, fast, given)
        if outputs.dim() < 2:
            raise UserError("the model returns a single number for a task; its outputs start with the examples")
        for name, buffer in buffers.items():
            if buffer._version != versions[name]:
                raise UserError(_writes(name))
        return outputs, statistics, caught

    def _functions_for(self, given: Given, mask: Tensor | None) -> dict[Any, Any]:
        """The functions to replace while a task runs, by what."""
        if mask is None or self._fixed_norms:
            return self._functions
        return {**self._functions, **masked_norms(mask, given.fewest)}

    def _of_tasks(self, one_task: Callable[..., Any], fast: Mapping[str, Tensor], given: Given) -> Any:
        """What a function of a task's weights, inputs and mask returns for all tasks."""
        try:
            # Attention by its formula: the fused kernels have no second derivative.
            with sdpa_kernel(SDPBackend.MATH), weights_kept(self.module), self._noticing():
                in_dims = (0, 0, None if given.mask is None else 0)
                return vmap(one_task, in_dims)(dict(fast), given.x, given.mask)
        except RuntimeError as error:
            raise (
                _of_other_types(error, given.x, fast) or _misfit(error, given.x) or explained(error, "model")
            ) from error
        except TypeError as error:  # several inputs may be others than the model's arguments
            raise (_misfit(error, given.x, every=True) if not isinstance(given.x, Tensor) else None) or error from error

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.module.forward)

    def _arguments(self, x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments of the model; one argument where it cannot take several inputs so."""
        if isinstance(x, Tensor):
            return (x,), {}
        args, named = ((), x) if isinstance(x, dict) else (x, {})
        try:
            self._signature.bind(*args, **named)
        except TypeError:
            return (x,), {}
        return args, named

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """At the first run, raise an error if the model draws random numbers where vmap does not see it."""
        if self._has_run:
            yield
            return
        before = _generators()
        yield
        for module, now in _generators().items():
            if now != before[module]:
                raise UserError(
                    f"the model draws random numbers with Python's module {module} when it runs, which would make the"
                    " inner loop's gradients irreproducible: remove the random operation"
                )
        self._has_run = True

    @torch.no_grad()
    def _check_apart(self, fast: Mapping[str, Tensor], shared: Mapping[str, Tensor], given: Given) -> None:
        """Raise an error unless padding has no effect on real examples: seen by leaving it out, once for a learner."""
        assert given.mask is not None
        one = {name: _without_zeros(weight[:1]) for name, weight in fast.items()}
        shared = {name: _without_zeros(weight) for name, weight in shared.items()}
        n = given.mask.shape[1]
        for padded, real in ((0, -1), (-1, 0)) if n > 1 else ():
            filled = [i % n + n * (i % 2) for i in range(max(n, 3))]  # without one of them, batch norm still has two
            filled[padded] = filled[real]
            rest = filled[1:] if padded == 0 else filled[:-1]
            mask = given.mask.new_ones(1, len(filled))
            mask[:, padded] = False
            found = self._run(one, shared, Given(map_inputs(partial(_examples, n, filled), given.x), mask))[0]
            expected = self._run(one, shared, Given(map_inputs(partial(_examples, n, rest), given.x)))[0].flatten(0, 1)
            if found.shape[:2] != mask.shape:
                raise UserError(
                    f"the model returns {list(found.shape[1:])} for {len(filled)} examples: with a mask, its outputs"
                    " start with the axis of examples"
                )
            most = torch.finfo(found.dtype).eps ** 0.5 * expected.abs().amax()
            if (found[mask] - expected).abs().amax() > most:
                raise UserError(
                    "the model mixes the examples of a task by more than batch norm, or uses how many there are, so"
                    " that padding would change the results: masks cannot be used with it; take tasks of equal size"
                )
        self._keeps_apart = n > 1


class Vector:
    """Weights one after the other, then zeros up to a multiple of 16, at which the vector of the next task begins.

    Args:
        shapes: of the weights, without the task axis.
        channels_last: the order of filters in memory, as fast convolutions take them.
    """

    def __init__(self, shapes: Mapping[str, Size], channels_last: bool) -> None:
        self.shapes, self._channels_last = shapes, channels_last
        self.sizes = [shape.numel() for shape in shapes.values()]
        self._zeros = -sum(self.sizes) % 16
        self.sizes[-1] += self._zeros

    def pack(self, weights: Weights) -> Tensor:  # {name: [..., *shape]} -> [..., P]
        parts = [(weights[name], len(shape)) for name, shape in self.shapes.items()]
        flat = [(w.movedim(-3, -1) if self._moves(dims) else w).flatten(w.dim() - dims) for w, dims in parts]
        return torch.cat([*flat, flat[0].new_zeros(*flat[0].shape[:-1], self._zeros)], -1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        parts = zip(self.shapes.items(), packed.split(self.sizes, -1), strict=True)
        return {name: self._in_shape(part[..., : shape.numel()], shape) for (name, shape), part in parts}

    def _in_shape(self, part: Tensor, shape: Size) -> Tensor:
        if not self._moves(len(shape)):
            return part.view(*part.shape[:-1], *shape)
        outputs, inputs, height, width = shape
        return part.view(*part.shape[:-1], outputs, height, width, inputs).movedim(-1, -3)

    def _moves(self, dims: int) -> bool:
        return self._channels_last and dims == 4


def packed_tree(tree: Tree, shapes: Mapping[str, Size], pack: Callable[[Weights], Tensor]) -> Tree:
    """A rule's learned values or memory, those that belong to weights in one vector."""
    if set(tree) != set(shapes):
        return {n: packed_tree(v, shapes, pack) if isinstance(v, dict) else v for n, v in tree.items()}
    if all(tree[name].shape[-len(shape) :] == shape for name, shape in shapes.items()):
        return {ALL: pack(tree)}
    # a value for each weight tensor, [...]: the same for all its elements
    spread = {name: tree[name].view(*tree[name].shape, *(1 for _ in shape)) for name, shape in shapes.items()}
    return {ALL: pack({name: value.expand(*tree[name].shape, *shapes[name]) for name, value in spread.items()})}


def unpacked_tree(tree: Tree, unpack: Callable[[Tensor], Tree]) -> Tree:
    """The reverse of `packed_tree`, for a memory."""
    if set(tree) == {ALL}:
        return unpack(tree[ALL])
    return {n: unpacked_tree(v, unpack) if isinstance(v, dict) else v for n, v in tree.items()}


def _tied(module: nn.Module) -> dict[str, str]:
    """Tensors that further layers hold too: the name there, and the first name.

    `functional_call` would find them itself, but for a layer that has two names it puts back a wrong tensor.
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for prefix, layer in module.named_modules():
        for named in (layer.named_parameters, layer.named_buffers):
            for name, tensor in named(prefix, recurse=False, remove_duplicate=False):
                if first.setdefault(id(tensor), name) != name:
                    tied[name] = first[id(tensor)]
    return tied


def _writes(buffer: str) -> str:
    return (
        f"the model writes to its buffer '{buffer}' when it runs, so its results would depend on what ran before: call"
        " eval() on that layer, or replace it, before handing the model over"
    )


def _generators() -> dict[str, Any]:
    """The states of the random generators that vmap does not know."""
    numpy: Any = np.random.get_state(legacy=False)
    return {"random": random.getstate(), "numpy.random": (numpy["state"]["pos"], numpy["state"]["key"].tobytes())}


def norms(module: nn.Module) -> dict[str, nn.Module]:
    """The batch norm layers by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, BATCH_NORMS)}


def with_fixed_norms(module: nn.Module) -> nn.Module:
    """A copy in eval mode, whose batch norm layers have running statistics, 0 and 1 for now."""
    module = copy.deepcopy(module).eval()
    like = next(module.parameters())
    for layer in norms(module).values():
        start_statistics(layer, like)
    return module


@contextmanager
def _watching(layers: Mapping[str, nn.Module], mask: Tensor | None) -> Iterator[dict[str, list[Any]]]:
    """Collect the moments of what comes into these layers, each time that one runs."""
    seen: dict[str, list[Any]] = {name: [] for name in layers}

    def note(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["input"]
        seen[name].append((*moments(x, mask), x.numel() // x.shape[1]))  # with a mask, all runs have the same examples

    hooks = [layer.register_forward_pre_hook(partial(note, name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _tail(module: nn.Module, names: Sequence[str]) -> tuple[str, nn.Module, nn.Module]:
    """The smallest submodule that has all these weights, without layers of an `nn.Sequential` before the first of them:
    its name ("" is the module itself), it, and its first layer where it is an `nn.Sequential`."""
    steps = zip(*(name.split(".")[:-1] for name in names), strict=False)
    name = ".".join(step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps))
    tail = module.get_submodule(name)
    if type(tail) is not nn.Sequential or not names:
        return name, tail, tail
    layers = list(tail._modules)  # named_children() leaves out a layer that comes twice
    first = min(layers.index(weight.removeprefix(f"{name}.").partition(".")[0]) for weight in names)
    return name, tail[first:] if first else tail, tail[first]


def _depends(value: Tensor, leaves: list[Tensor]) -> bool:
    if not value.requires_grad:
        return False
    found = torch.autograd.grad(value.sum(), leaves, retain_graph=True, allow_unused=True)
    return any(gradient is not None for gradient in found)


def _near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, equal_nan=True)


@contextmanager
def _catching(layer: nn.Module | None) -> Iterator[list[Tensor]]:
    """Collect what comes into a layer, where it is one tensor, each time that it runs."""
    caught: list[Tensor] = []
    if layer is None:
        yield caught
        return

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alone = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        caught.extend(args if alone else (torch.zeros(()), torch.zeros(())))  # two: not as it should be

    hook = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield caught
    finally:
        hook.remove()


def _pooled(seen: Mapping[str, list[tuple[Tensor, Tensor, int]]]) -> dict[str, Tensor]:
    """Running statistics of each layer, from the moments of each time that it ran."""
    statistics: dict[str, Tensor] = {}
    for layer, runs in seen.items():
        total = sum(count for _, _, count in runs)
        if total:
            mean = torch.stack([own * (count / total) for own, _, count in runs]).sum(0)
            spreads = [(variance + (own - mean).square()) * (count / total) for own, variance, count in runs]
            statistics.update(zip(_statistics(layer), (mean, torch.stack(spreads).sum(0)), strict=True))
    return statistics


def statistics_of(module: nn.Module) -> list[str]:
    """The names that the running statistics of its batch norm layers have in a module."""
    return [name for layer in norms(module) for name in _statistics(layer)]


def _statistics(layer: str) -> tuple[str, str]:
    prefix = f"{layer}." if layer else ""
    return f"{prefix}running_mean", f"{prefix}running_var"


def _examples(n: int, places: list[int], x: Tensor) -> Tensor:
    """Some of 2n examples: the n of the first task, and the same with other values of the same range."""
    one = x[:1]
    if x.dim() < 2 or x.shape[1] != n:
        return one
    other = ~one if one.dtype == torch.bool else one.amin() + one.amax() - one
    return torch.cat([one, other], 1)[:, places]


def _without_zeros(weight: Tensor) -> Tensor:
    """Other values for elements that are zero: a head of zeros would hide what comes into it."""
    places = torch.arange(weight.numel(), device=weight.device).view(weight.shape)
    return torch.where(weight == 0, 0.05 * torch.cos(places).to(weight.dtype), weight)


class _Replacing(TorchFunctionMode):
    def __init__(self, functions: Mapping[Any, Any], promotes: bool) -> None:
        super().__init__()
        self.functions, self.promotes = functions, promotes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.functions:
            return self.functions[func](*args, **kwargs)
        if self.promotes:
            args, kwargs = promoted(func, (args, kwargs))
        return func(*args, **kwargs)


def _of_other_types(error: Exception, x: Inputs, fast: Mapping[str, Tensor]) -> UserError | None:
    """What to say if it may be the types of inputs and weights that do not fit."""
    inputs, weights = (str(part.dtype).removeprefix("torch.") for part in (tensors_of(x)[0], next(iter(fast.values()))))
    if inputs == weights or not any(sign in str(error) for sign in ("dtype", "scalar type", "data type", "Input type")):
        return None
    return UserError(f"the model cannot take inputs of type {inputs} with weights of type {weights}: convert one")


MISFITS = ("shape", "size", "channels", "dimension", "must match", "mat1", "batch2")  # in messages about shapes


def _misfit(error: Exception, x: Inputs, every: bool = False) -> UserError | None:
    """What to say if it may be the shapes of the inputs that do not fit the model."""
    text = " ".join(str(error).split())
    if "vmap:" in text or out_of_memory(error) or not (every or any(sign in text for sign in MISFITS)):
        return None
    if isinstance(x, Tensor):
        form = f"of shape {list(x.shape[1:])}"
    else:
        parts = x.items() if isinstance(x, dict) else enumerate(x)
        form = "that are " + ", ".join(f"{name}: {list(part.shape[1:])}" for name, part in parts)
    return UserError(f"the model cannot take the inputs of a task {form}: {text}")


@contextmanager
def explaining(who: str) -> Iterator[None]:
    """Raise vmap's errors as advice for the user."""
    try:
        yield
    except RuntimeError as error:
        raise explained(error, who) from error


def explained(error: Exception, who: str) -> Exception:
    """vmap's errors as advice for the user; any other error unchanged."""
    text = " ".join(str(error).split())
    if "randomness" in text:
        return UserError(
            f"the {who} draws random numbers when it runs, which would make the inner loop's gradients"
            " irreproducible: remove the random operation, or call model.eval() first if that switches it off"
        )
    if "escaped from inside a function being vmapped" in text:
        return UserError(
            f"the {who} runs a part again on the way back, as torch.utils.checkpoint does, which cannot be done for"
            " many tasks at once: call that part directly; checkpoint=True or micro_batch=, of gs.meta_step and"
            " gs.train, take less memory"
        )
    if "must only return Tensors" in text:
        return UserError(f"the {who} must return one tensor for a task ({text})")
    signs = (
        "Batching rule not implemented",
        "data-dependent control flow",
        "vmap: we do not yet support",
        "vmap: inplace",
        "vmap: We do not support",
        "vmap: It looks like you're",
        "under vmap transform is not allowed",
        "must override the setup_context",
        "data pointer of Tensor",
    )
    if any(sign in text for sign in signs):
        return UserError(f"the {who} uses an operation that cannot run for many tasks at once; replace it ({text})")
    return error
