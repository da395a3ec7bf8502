"""Any module as compiled programs: the gradients of an inner step, their derivative, and the query losses.

With the functions of `forms.py` a module runs once for all tasks on stand-ins for tensors, and what it does is written
down as a flat list of operations, derivatives included. PyTorch's compiler, Inductor, makes a few programs of it, which
join everything between two convolutions or products. There are three lists, each for shapes that stay the same:

    gradient   w -> G                     the support gradients of all tasks, for one inner step
    product    w, v -> v dG/dw            the derivative of the same, by what comes back to G
    scores     w -> loss, dloss/dw        the query losses, with their gradient

**Memory.** In training, `gradient` and `product` are the two halves of one list. PyTorch's partitioner cuts it where
least has to be kept between them: results of convolutions, in their own precision; what is cheap is computed again.
In less memory (`add_product`) nothing of an inner step is kept but the weights of its tasks, and `product` stands
alone: it computes the convolutions again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from gradshare.engine.backends import not_installed
from gradshare.engine.convolution import operators
from gradshare.engine.forms import forms
from gradshare.engine.vmapped import Given, VmapBackend, explained
from gradshare.errors import UserError
from gradshare.method.adapt import gradients_of
from gradshare.method.episodes import tensors_of
from gradshare.method.losses import Loss, task_losses
from gradshare.method.rules import Rule, Weights

Kind = Literal["gradient", "product", "both", "scores"]
Program = Callable[[list[Tensor]], list[Tensor]]
MEANING = {"gradient": "an inner step", "product": "its second derivative", "scores": "the query losses"}

MOST_IN_PROGRAMS = 2**24  # weights: our programs for inner rules add up their parts in one block of a GPU

# What PyTorch's partitioner would keep rather than compute again: three times the memory of convolutions alone.
KEPT_FOR_SPEED = ("materialized_backward", "used_far_apart", "long_fusible_chains")

# Programs by module, so that the learners of all epochs have them in common; then by kind, loss and shapes.
PROGRAMS: WeakKeyDictionary[nn.Module, dict[Any, Program]] = WeakKeyDictionary()
_listeners: list[Callable[[str], object]] = []


class Batch(NamedTuple):
    """What the loss of one part of every task is computed from."""

    x: Given
    y: Tensor  # [tasks, n, ...]
    mask: Tensor | None  # [tasks, n]
    loss: Loss


class Scores(NamedTuple):
    """Of a batch of tasks."""

    mean: Tensor  # []: of the losses; differentiable
    losses: Tensor  # [tasks]
    outputs: Tensor  # [tasks, n, ...]


class Traced(VmapBackend):
    """Any module in one precision.

    Args:
        low: type of the operands of convolutions and products; None: that of the weights.
        tf32: whether a GPU may compute products of float32 in TF32.
        any_layout: whether the inner rule accepts all weights as one vector.
    """

    channels_last = True

    def __init__(
        self,
        module: nn.Module,
        adapted: tuple[str, ...],
        low: torch.dtype | None = None,
        tf32: bool = False,
        any_layout: bool = False,
    ) -> None:
        super().__init__(module, adapted, any_layout)
        self.low, self.tf32 = low, tf32
        if low is not None:
            self._functions, self._promotes = forms(low), True

    def rule(self, rule: Rule, one_process: bool) -> Rule:
        """The rule, by our fused programs where a GPU has all tasks."""
        if self._vector is None or self._kinds != {(torch.float32, "cuda")} or not one_process or not_installed():
            return rule
        if sum(self._vector.sizes) > MOST_IN_PROGRAMS:
            return rule
        from gradshare.engine.conv4.triton.programs import with_programs

        return with_programs(rule)

    def compiles(self, fast: Weights, shared: Weights, x: Given) -> bool:
        """Whether an inner step on these inputs is a program; one that runs the tail alone has too few operations."""
        return self.into_tail(self.by_name(fast), shared, x) is None

    def forward(self, fast: Mapping[str, Tensor], shared: Mapping[str, Tensor], x: Any, inner: bool) -> Tensor:
        outputs = super().forward(fast, shared, x, inner)
        return outputs if self.low is None else outputs.to(next(iter(fast.values())).dtype)

    def gradients(self, fast: Weights, shared: Weights, batch: Batch, create_graph: bool) -> Weights:
        """The support gradient of every task, in training."""
        if not create_graph:
            with torch.no_grad():
                found = self._program("gradient", fast, shared, batch)(_values(fast, shared, batch))
        else:
            halves = self._halves(fast, shared, batch)
            found = _Gradients.apply(*halves, len(fast), *_flat((fast, shared, batch))[0])
        return dict(zip(fast, found, strict=True))

    @torch.no_grad()
    def add_product(self, fast: Weights, shared: Weights, batch: Batch, back: Weights) -> None:
        """Add the derivative of the support gradients, by what comes back to them, to the `grad` of the weights."""
        found = self._program("product", fast, shared, batch, back)(_values(fast, shared, batch, back))
        for leaf, value in zip([*fast.values(), *shared.values()], found, strict=True):
            if leaf.requires_grad:
                leaf.grad = value if leaf.grad is None else leaf.grad + value

    def scores(self, fast: Weights, shared: Weights, batch: Batch) -> Scores:
        """The query losses; the mean of those of all tasks is differentiable."""
        program = self._program("scores", fast, shared, batch)
        return Scores(*_Scores.apply(program, *_flat((fast, shared, batch))[0]))

    def share(self, fast: Weights, shared: Weights, batch: Batch) -> str:
        """How many of the operations of an inner step are in programs, and which are PyTorch's own; for people."""
        values, form = _flat((fast, shared, batch))
        graph = traced(self._flat_function("gradient", (fast, shared, batch), form), values).graph
        nodes = [node for node in graph.nodes if node.op == "call_function" and isinstance(node.target, OpOverload)]
        own = [node for node in nodes if _by_pytorch(node.target)]
        names = ", ".join(sorted({node.target.overloadpacket.__name__ for node in own}))
        return f"{1 - len(own) / len(nodes):.0%} of its operations" + (f", all but {names}" if own else "")

    def _program(self, kind: Kind, *arguments: Any) -> Program:
        """The program for these arguments: weights of all tasks, what they share, a batch, what comes back."""
        return self._kept(kind, arguments, lambda graph: self._compiled(graph, MEANING[kind]))

    def _halves(self, fast: Weights, shared: Weights, batch: Batch) -> tuple[Program, Program]:
        """`gradient` and `product` for one step: the first gives more than gradients, which the second takes first."""

        def both(graph: GraphModule) -> tuple[Program, Program]:
            first, second = halves(graph, len(_flat((fast, shared, batch))[0]), len(fast))
            return self._compiled(first, MEANING["gradient"]), self._compiled(second, MEANING["product"])

        return self._kept("both", (fast, shared, batch, fast), both)

    def _compiled(self, graph: GraphModule, what: str) -> Program:
        program = compiled(graph, what)

        def run(values: list[Tensor]) -> list[Tensor]:
            with _products(self.tf32):
                return program(values)

        return run

    def _kept(self, kind: Kind, arguments: Any, build: Callable[[GraphModule], Any]) -> Any:
        """What was compiled for arguments of this kind and these shapes."""
        fast, shared, batch = arguments[:3]
        if batch.mask is not None and not self._keeps_apart:
            self._check_apart(self.by_name(fast), shared, batch.x)
        if any(part.requires_grad for part in tensors_of(batch.x.x)):
            raise UserError("compiled programs give no gradient by the inputs: use precision float32")
        programs = PROGRAMS.setdefault(self.module, {})
        values, form = _flat(arguments)
        kinds = tuple((value.shape, value.dtype, value.device) for value in values)
        key = kind, self.adapted, self.low, self.tf32, batch.loss, form, kinds
        if key not in programs:
            programs[key] = build(traced(self._flat_function(kind, arguments, form), values))
        return programs[key]

    def _flat_function(self, kind: Kind, arguments: Any, form: Any) -> Callable[..., list[Tensor]]:
        """What a program of a kind does, as a function of tensors alone."""
        functions: dict[Kind, Callable[..., list[Tensor]]] = {
            "gradient": self._gradient,
            "product": lambda *given: self._both(*given)[1],
            "both": lambda *given: [value for part in self._both(*given) for value in part],
            "scores": self._score,
        }

        def flat(*values: Tensor) -> list[Tensor]:
            with torch.enable_grad():
                found = functions[kind](*_unflat(list(values), arguments, form))
            return [value.detach().contiguous() for value in found]

        return flat

    def _losses(self, fast: Weights, shared: Weights, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = self._traced_run(fast, shared, batch.x)
        try:
            return task_losses(batch.loss, outputs, batch.y, batch.mask), outputs
        except RuntimeError as error:
            raise explained(error, "loss") from error

    def _traced_run(self, fast: Weights, shared: Weights, x: Given) -> Tensor:
        usual = self._functions, self._promotes
        self._functions, self._promotes = forms(self.low), True
        try:
            outputs = self._run(self.by_name(fast), shared, x)[0]
        finally:
            self._functions, self._promotes = usual
        return outputs.to(next(iter(fast.values())).dtype)

    def _gradient(self, fast: Weights, shared: Weights, batch: Batch) -> list[Tensor]:
        fast = _leaves(fast)
        return list(gradients_of(self._losses(fast, shared, batch)[0], fast, create_graph=False).values())

    def _both(self, fast: Weights, shared: Weights, batch: Batch, back: Weights) -> tuple[list[Tensor], list[Tensor]]:
        """The support gradients, and their derivative by the weights applied to what comes back."""
        fast, shared = _leaves(fast), _leaves(shared)
        gradients = gradients_of(self._losses(fast, shared, batch)[0], fast, create_graph=True)
        used = [name for name, gradient in gradients.items() if gradient.requires_grad]
        leaves = [*fast.values(), *shared.values()]
        if not used:
            return list(gradients.values()), [torch.zeros_like(leaf) for leaf in leaves]
        outputs, coming = [gradients[name] for name in used], [back[name] for name in used]
        return list(gradients.values()), list(torch.autograd.grad(outputs, leaves, coming, materialize_grads=True))

    def _score(self, fast: Weights, shared: Weights, batch: Batch) -> list[Tensor]:
        fast, shared = _leaves(fast), _leaves(shared)
        losses, outputs = self._losses(fast, shared, batch)
        mean = losses.mean()
        leaves = [*fast.values(), *shared.values()]
        return [mean, losses, outputs, *torch.autograd.grad(mean, leaves, materialize_grads=True)]


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Program, product: Program, count: int, *values: Tensor) -> Any:
        found = gradient([value.detach().contiguous() for value in values])
        ctx.product, ctx.inputs = product, len(values)
        ctx.save_for_backward(*found[count:])
        return tuple(found[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *back: Tensor) -> tuple[Any, ...]:
        found = ctx.product([*ctx.saved_tensors, *(value.contiguous() for value in back)])
        return None, None, None, *found, *(None for _ in range(ctx.inputs - len(found)))


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, *values: Tensor) -> Any:
        mean, losses, outputs, *gradients = program([value.detach().contiguous() for value in values])
        ctx.save_for_backward(*gradients)
        ctx.inputs = len(values)
        ctx.mark_non_differentiable(losses, outputs)
        return mean, losses, outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, back: Tensor, *_: Any) -> tuple[Any, ...]:
        found = torch._foreach_mul(ctx.saved_tensors, back)
        return None, *found, *(None for _ in range(ctx.inputs - len(found)))


def _leaves(weights: Weights) -> Weights:
    return {name: weight.detach().requires_grad_() for name, weight in weights.items()}


def _values(*arguments: Any) -> list[Tensor]:
    """All tensors of the arguments, as programs take them."""
    return [value.detach().contiguous() for value in _flat(arguments)[0]]


def _flat(arguments: Any) -> tuple[list[Tensor], Any]:
    """All tensors of the arguments, and the form of the rest."""
    leaves, form = tree_flatten(arguments)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], form


def _unflat(values: list[Tensor], arguments: Any, form: Any) -> Any:
    """The arguments with other tensors."""
    left = iter(values)
    leaves = tree_flatten(arguments)[0]
    return tree_unflatten([next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)


def traced(function: Callable[..., list[Tensor]], values: list[Tensor]) -> GraphModule:
    """What a function of tensors does, as a list of PyTorch's basic operations."""
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    _inductor()
    trace = partial(make_fx, tracing_mode="fake", _allow_non_fake_inputs=True)
    # A tensor that comes twice is two inputs; only shapes and types are looked at.
    examples = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in values]
    module = trace(function, select_decomp_table())(*examples)
    if any(node.op == "call_function" and _writes(node.target) for node in module.graph.nodes):
        module = trace(torch.func.functionalize(module))(*examples)
    for node in module.graph.nodes:
        _shorten(node)
    module = GraphModule(module, fx_graph_cse(module.graph))
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _writes(operation: Any) -> bool:
    """Whether an operation writes in place, as in a few of PyTorch's derivatives; programs must not."""
    return isinstance(operation, OpOverload) and operation._schema.is_mutable


def halves(module: GraphModule, inputs: int, outputs: int) -> tuple[GraphModule, GraphModule]:
    """Cut a list of operations in two, where least has to be kept between them.

    Args:
        inputs, outputs: of the first half, which returns after these outputs what the second half takes first.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for number, node in enumerate(module.graph.find_nodes(op="placeholder")):  # the partitioner knows them by names
        node.target = f"{'primals' if number < inputs else 'tangents'}_{number}"
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.where.self):
        if node.meta["val"].dtype == torch.uint8:  # places of pooling: a byte instead of four values to compare again
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    module.recompile()
    with config.patch({f"ban_recompute_{what}": False for what in KEPT_FOR_SPEED}):
        return min_cut_rematerialization_partition(module, None, num_fwd_outputs=outputs)


def _shorten(node: Node) -> None:
    """Take out an operation that changes nothing: one that stands for its argument, or a permutation undone."""
    aten = torch.ops.aten
    if node.target in (aten.detach.default, aten.alias.default):
        node.replace_all_uses_with(cast(Node, node.args[0]))
    elif node.target == aten.permute.default:
        source, order = cast(Any, node.args)
        if source.target == aten.permute.default:
            inner, before = source.args
            node.args = source, order = inner, [before[dim] for dim in order]
        if list(order) == list(range(len(order))):
            node.replace_all_uses_with(source)


@cache
def _inductor() -> Any:
    """The compiler's module, which is slow to import and which learns our operators here."""
    with warnings.catch_warnings():  # PyTorch's own, about PyTorch
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx
        from torch._inductor.async_compile import maybe_warm_pool
        from torch._inductor.lowering import make_fallback
    if torch.cuda.is_available():
        maybe_warm_pool()  # the processes that compile kernels start while the first program is traced
    for name in ("conv", "images_gradient", "filters_gradient"):
        make_fallback(getattr(operators, name).default, _in_memory)
    return torch._inductor.compile_fx


def _in_memory(node: Node, *arguments: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operands of one of our operators, in memory once for all that read them; else each would make its copy."""
    from torch._inductor.ir import ExternKernel, TensorBox

    def place(value: Any, source: Any) -> Any:
        if not isinstance(value, TensorBox):
            return value
        value.realize()
        return ExternKernel.require_exact_strides(value, source.meta["val"].stride())

    return tuple(place(*pair) for pair in zip(arguments, node.args, strict=True)), {}


def _place(module: GraphModule) -> None:
    """Have each operand of our operators laid out where it is computed, for all that read it.

    The compiler would lay it out for the first that does, such as a sum, and copy it for the operator.
    """
    for node in list(module.graph.nodes):
        users = [user.target for user in node.users]
        if not any(isinstance(target, OpOverload) and target.namespace == "gradshare" for target in users):
            continue
        with module.graph.inserting_after(node):
            place = torch.ops.prims.inductor_force_stride_order.default
            placed = module.graph.call_function(place, (node, node.meta["val"].stride()))
        placed.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(placed, lambda user, placed=placed: user is not placed)


def _by_pytorch(operation: OpOverload) -> bool:
    """Whether the compiler leaves an operation to PyTorch's own kernels; convolutions are ours."""
    _inductor()
    from torch._inductor.lowering import fallbacks, lowerings

    return operation.namespace != "gradshare" and (operation in fallbacks or operation not in lowerings)


def compiled(module: GraphModule, what: str) -> Program:
    """A list of operations as one program, by Inductor; it keeps what it compiled for later processes."""
    from torch._guards import TracingContext, tracing

    inductor = _inductor()
    for listen in _listeners:
        listen(f"compiling {what} ({len(module.graph.nodes):,} operations); later runs find it compiled")
    _place(module)
    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    results = module.graph.output_node()  # which lie in memory as they are written down: another program may take them
    results.meta["user_visible_output_idxs"] = list(range(len(cast(Any, results.args[0]))))
    # Rather compute activations again from a convolution's result than keep them beside it. No gaps between the rows of
    # a tensor: our operators take none, so that each would copy it.
    how = {"realize_reads_threshold": 8, "comprehensive_padding": False}
    if examples[0].device.type == "cuda":  # where that also pays for long expressions of many values
        how |= {"realize_opcount_threshold": 100, "realize_acc_reads_threshold": 24}
    options, fake = inductor.config.patch(how), examples[0].fake_mode
    with warnings.catch_warnings(), options, torch.no_grad(), tracing(TracingContext(fake)):
        warnings.simplefilter("ignore")  # on a GPU the compiler advises TF32, and tells how it computes a softmax
        return cast(Program, inductor.compile_fx_inner(module, examples))


@contextmanager
def announced(listen: Callable[[str], object]) -> Iterator[None]:
    """Call a function with a line of text before something is compiled."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


def interpreted(module: GraphModule, what: str) -> Program:
    """The same without a compiler: one operation after the other."""
    return lambda values: module(*values)


@contextmanager
def _products(tf32: bool) -> Iterator[None]:
    """Allow TF32 in PyTorch's own products."""
    if not tf32:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
