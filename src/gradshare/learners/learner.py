"""A learner: a model, an inner rule and a loss, as pure functions of a MetaState."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from gradshare.engine import backends, vmapped
from gradshare.engine.backends import Precision
from gradshare.engine.choose import check_device
from gradshare.engine.processes import ALONE, Group
from gradshare.engine.traced import Batch, Scores, Traced
from gradshare.errors import MOST_SEED, UserError, check_whole, short_repr
from gradshare.method.adapt import adapt, gradients_of
from gradshare.method.episodes import Episodes, Inputs, check_examples, check_inputs, check_mask, map_inputs, tensors_of
from gradshare.method.heads import prototype_head
from gradshare.method.losses import Loss, accuracy, task_losses
from gradshare.method.network import Network, NormStatistics
from gradshare.method.rules import Rule, Tree, Weights, checked, sum_of_tasks
from gradshare.method.state import MetaState, check_fit

MOST_STEPS = 1_000_000  # at test
HeadStart = Literal["learned", "zero-init", "zero"]  # where the head of a task starts: the user's choice


class Outcome(NamedTuple):
    """The result of one batch of tasks."""

    loss: Tensor
    """The outer loss, []: differentiable from `outer_loss`, detached from `meta_step`."""
    losses: Tensor
    """Query loss of every task after the last step, [tasks], detached."""
    accuracy: Tensor | None
    """Share of query examples classified correctly, [tasks]; None where targets are not classes."""
    memory: Tree
    """The memory for the next meta-iteration, detached."""
    fault: Tensor | None = None
    """Of `meta_step`, []: 0, or which value was not finite, so that no step was taken."""

    @property
    def taken(self) -> Tensor:  # []
        """Whether `meta_step` took the step. Not defined for an outcome of `outer_loss`."""
        assert self.fault is not None
        return self.fault == 0


@dataclass(frozen=True, repr=False)
class Learner:
    """A meta-learning algorithm bound to a model. Made by `gs.maml` and its siblings.

    Example:
        >>> import gradshare as gs
        >>> learner = gs.maml(gs.Conv4(filters=8, image=(1, 28, 28)), steps=2)
        >>> state = learner.init(seed=0)
        >>> episodes = gs.load_dataset("glyphs").sample("train", gs.Shape(5, 1, 15), tasks=3, key=(0,))
        >>> fast = learner.adapt(state, episodes.support_x, episodes.support_y)
        >>> learner.predict(fast, episodes.query_x).shape
        torch.Size([3, 75, 5])
    """

    module: nn.Module  # prepared by `vmapped.prepare`
    rule: Rule
    steps: int
    loss: Loss
    adapted: tuple[str, ...]  # names of the weights that the inner loop moves
    per_step: tuple[str, ...] = ()  # names of weights, not adapted, that have one meta-learned value per inner step
    step_weights: tuple[float, ...] = ()  # weight of the query loss after each inner step; empty: the last step alone
    schedule: Callable[[int], dict[str, object]] | None = None  # epoch -> fields that differ in that epoch
    final_outer_rate: float = 1.0  # end of a cosine on the outer rate, as a share of its start; 1: constant
    precision: Precision = "float32"  # tf32 and bf16: the GPU kernels, where they fit, else compiled programs
    group: Group = ALONE  # the processes that the tasks of a batch are spread over
    inner_loss: Loss | None = None  # of the inner loop; None: the same as `loss`
    algorithm: str = "maml"  # the function that made it
    head_start: HeadStart | Literal["prototypes"] = "learned"
    head: tuple[str, ...] = ()  # names of the head's weights, unless they are learned as all others are
    ways: int | None = None  # outputs of a head that starts at prototypes; None: as many as the labels say
    outer: Literal["gradient", "reptile"] = "gradient"  # what the outer optimiser gets as the gradient
    compiled: bool = False  # in float32 too

    def __repr__(self) -> str:
        weights = sum(weight.numel() for weight in self.module.parameters())
        links = ", ".join(map(repr, getattr(self.rule, "links", [self.rule])))
        losses = _name(self.loss) + ("" if self.inner_loss is None else f", inner_loss={_name(self.inner_loss)}")
        model = f"{type(self.module).__name__} of {weights:,} weights, {len(self.adapted)} of its tensors adapted"
        head = "" if self.head_start == "learned" else f", head_start={self.head_start!r}"
        return f"Learner({model}; rule {links}; steps={self.steps}, loss={losses}{head})"

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the fields, without what was computed from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def at(self, epoch: int) -> Learner:
        """The learner for one epoch of training. MAML++ changes with the epoch; the others do not."""
        if self.schedule is None:
            return self
        return replace(self, **cast(Any, self.schedule(epoch)))

    def to(self, device: torch.device | str, precision: Precision = "float32", compiled: bool = False) -> Learner:
        """The same learner with the model's constants on another device.

        Args:
            precision: `"float32"` runs any module by PyTorch's own operations. `"tf32"` (on a GPU) and `"bf16"` have
                the products of convolutions, linear layers and attention in TF32, or all activations in bfloat16;
                weights, sums and statistics stay float32. `Conv4` runs by our GPU kernels where they fit, or by code
                for a CPU, and any other module as compiled programs: see docs/performance.md.
            compiled: compile it in float32 too. The first step takes a minute or so; later processes are faster.
        """
        place = check_device(device)
        if precision not in get_args(Precision):
            raise UserError(f"a precision is {', '.join(get_args(Precision))}, not {short_repr(precision)}")
        moved = replace(self, module=vmapped.prepare(self.module).to(place), precision=precision, compiled=compiled)
        if precision == "tf32" and place.type == "cpu" and not moved._kernels:
            raise UserError("precision tf32 is arithmetic of NVIDIA GPUs: use precision float32 on a CPU")
        return moved

    def over(self, group: Group) -> Learner:
        """The same learner with the tasks of a batch divided among processes.

        Every process gives `outer_loss` the same whole batch and works on its own part: `loss` is one term of the outer
        loss, `losses` and `accuracy` are those of its own tasks, and the memory is that of all tasks. `meta_step` sums
        losses and gradients over the processes.
        """
        return replace(self, group=group)

    @cached_property
    def network(self) -> Network:
        """How the module is run."""
        how = self.precision, self._kernels, self.compiled
        any_layout = self.rule.any_layout and self.head_start != "prototypes"  # whose head is of each task's own size
        return backends.backend(self.module, self.adapted, any_layout, *how)

    @cached_property
    def _kernels(self) -> bool:
        """Whether our GPU kernels run it."""
        if self.precision == "float32" or self.head_start == "prototypes":  # whose head has the size that a task has
            return False
        return backends.lacking(self.module, self.adapted) is None

    @cached_property
    def _general(self) -> vmapped.VmapBackend:
        """The module by PyTorch's operations, on every device and in every precision."""
        return vmapped.VmapBackend(self.module, self.adapted)

    @cached_property
    def _inductive(self) -> vmapped.VmapBackend:
        """The module with batch norm's running statistics among the weights of a task."""
        names = (*self.adapted, *vmapped.statistics_of(self.module))
        return vmapped.VmapBackend(vmapped.with_fixed_norms(self.module), names, fixed_norms=True)

    def programs_share(self, x: Tensor, y: Tensor) -> str | None:  # [tasks, n, ...], [tasks, n]
        """How much of an inner step is in compiled programs, for people; None for a learner that has none."""
        network, state = self.network, self.init()
        if not isinstance(network, Traced):
            return None
        shared, support = self._shared_of_steps(state)[0], self._batch(x, y, None, inner=True)
        fast = self._fast(network.start(self._start(state)), shared, support, training=True)
        if not network.compiles(fast, shared, support.x):
            return f"none: an inner step runs {network.tail} alone"
        return network.share(fast, shared, support)

    def init(self, seed: int | None = None) -> MetaState:
        """The state before training.

        Args:
            seed: initialises a model that has a method `initialise(generator)`, as ours do. Any other model keeps the
                weights it has, and with `seed=None` every model does.
        """
        module = self.module
        if seed is not None:
            check_whole("seed", seed, 0, MOST_SEED)
        if seed is not None and vmapped.initialises(module):
            module = vmapped.initialised(module, seed).to(next(module.parameters()).device)
        weights = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
        for name in self.head:
            if self.head_start == "prototypes":
                del weights[name]  # each task computes its own
            else:
                weights[name] = torch.zeros_like(weights[name])
        adapted = {name: weights[name] for name in self.adapted if name in weights}
        learned, memory = self.rule.init(adapted, self.steps)
        if self.per_step:
            learned["per_step"] = {name: torch.stack([weights.pop(name)] * self.steps) for name in self.per_step}
        state = MetaState(weights, learned, memory)
        for tensor in state.trainable().values():
            tensor.requires_grad_()
        return state

    def outer_loss(self, state: MetaState, episodes: Episodes) -> Outcome:
        """The loss on the query sets after adapting to the support sets, differentiable in the state (equation 5).

        Reads the memory of `state`, returns the next one, and changes nothing. For `gs.reptile` the loss has the same
        value, and its gradient is the mean over tasks of w - w[t], with w[t] the adapted weights.
        """
        self._check(state)
        if self.outer == "gradient":
            return self._scored(state, episodes)[0]
        with torch.no_grad():
            outcome, after = self._scored(state, episodes)
        start = self.network.start(self._start(state))
        moved = [(w * (w.detach() - after[name]).sum(0)).sum() for name, w in start.items()]
        way = torch.stack(moved).sum() / episodes.tasks
        return outcome._replace(loss=outcome.loss + (way - way.detach()))

    def _scored(self, state: MetaState, episodes: Episodes) -> tuple[Outcome, Weights]:
        """The outcome of a batch, and the weights of each task after the last step in the network's layout."""
        shared, batch = self._shared_of_steps(state), episodes.tasks
        episodes = episodes if self.group.size == 1 else episodes[self.group.share(batch)]
        trajectory, memory = self._adapt(state, shared, self._support(episodes), self.steps, training=True)
        query = self._query(episodes)
        total: Tensor | float = 0.0
        for step, weight in enumerate(self._weights_of_steps):
            if weight or step == self.steps - 1:
                scores = self._scores(trajectory[step], shared[step], query)
                total = total + weight * (episodes.tasks / batch) * scores.mean
        assert isinstance(total, Tensor)
        share = accuracy(scores.outputs, query.y, query.mask)
        return Outcome(total, scores.losses, share, self.network.unpack(memory)), trajectory[-1]

    @property
    def _weights_of_steps(self) -> tuple[float, ...]:
        """Of the query loss after each inner step."""
        return self.step_weights or (0.0,) * (self.steps - 1) + (1.0,)

    def _support(self, episodes: Episodes) -> Batch:
        return self._batch(episodes.support_x, episodes.support_y, episodes.support_mask, inner=True)

    def _query(self, episodes: Episodes) -> Batch:
        return self._batch(episodes.query_x, episodes.query_y, episodes.query_mask, inner=False)

    def _batch(self, x: Inputs, y: Tensor, mask: Tensor | None, inner: bool) -> Batch:
        return Batch(self.network.inputs(x, mask), y, mask, self._loss(inner))

    def _loss(self, inner: bool) -> Loss:
        return self.inner_loss if inner and self.inner_loss is not None else self.loss

    def _scores(self, fast: Weights, shared: Weights, query: Batch) -> Scores:
        """The query losses of every task at these weights."""
        if torch.is_grad_enabled() and self._compiles(fast, shared, query):
            return cast(Traced, self.network).scores(fast, shared, query)
        logits = self.network.forward(fast, shared, query.x, inner=False)
        losses = self.losses(logits, query.y, query.mask)
        return Scores(losses.mean(), losses.detach(), logits)

    def _compiles(self, fast: Weights, shared: Weights, batch: Batch) -> bool:
        """Whether compiled programs compute this batch."""
        return isinstance(self.network, Traced) and self.network.compiles(fast, shared, batch.x)

    def _support_gradients(
        self, fast: Weights, shared: Weights, support: Batch, create_graph: bool, training: bool = True
    ) -> Weights:
        """The support gradients of every task at these weights."""
        if training and self._compiles(fast, shared, support):  # other sizes than in training are not worth compiling
            return cast(Traced, self.network).gradients(fast, shared, support, create_graph)
        logits = self.network.forward(fast, shared, support.x, inner=True)
        return gradients_of(self.losses(logits, support.y, support.mask, inner=True), fast, create_graph)

    def adapt(
        self,
        state: MetaState,
        support_x: Inputs,  # [tasks, n, ...]
        support_y: Tensor,  # [tasks, n]
        support_mask: Tensor | None = None,  # [tasks, n]
        *,
        steps: int | None = None,
    ) -> dict[str, Tensor]:
        """Adapt to new tasks, each independent of the others. Reads the memory and never writes it.

        Returns what `predict` and `module_for` need: all weights, `{name: [tasks, *shape]}`, and the mean and variance
        of each batch norm on the support set at the final weights, as `running_mean` and `running_var` of the layer.

        Args:
            support_x, support_y: the examples to adapt to, `[tasks, examples, ...]`, and their targets.
            support_mask: True for a real example, False for padding; None: all are real.
            steps: inner steps, if not as many as in training. Past the last step that has values of its own (MAML++'s
                rates, m and lambda, the running mean), those of the last one are used.
        """
        return self._adapted(state, support_x, support_y, support_mask, steps, statistics=True)

    def predict(
        self,
        fast: Weights,
        query_x: Inputs,  # [tasks, n, ...]
        query_mask: Tensor | None = None,  # [tasks, n]
        *,
        norm_statistics: NormStatistics = "batch",
    ) -> Tensor:  # [tasks, n, ways]
        """Apply adapted weights to new inputs of the same tasks.

        Args:
            fast: what `adapt` returned.
            query_x: new inputs, `[tasks, examples, ...]`.
            query_mask: True for a real example, False for padding, whose outputs mean nothing; None: all are real.
            norm_statistics: what batch norm normalises with: `"batch"`, the statistics of these inputs (transductive,
                as in the reference codes), or `"support"`, those of the support set (inductive): then each example's
                output depends on that example alone.
        """
        check_norm_statistics(norm_statistics)
        check_inputs(query_x, "query")
        network = self.network if norm_statistics == "batch" else self._inductive
        self._check_complete(fast, norm_statistics)
        tasks, found = len(fast[self.adapted[0]]), len(tensors_of(query_x)[0])
        if found != tasks:
            raise UserError(f"the weights are adapted to {tasks} tasks, and query_x has {found}")
        if query_mask is not None:
            check_mask(query_mask, query_x.shape[:2] if isinstance(query_x, Tensor) else None, "query")
        own, shared = self._split(fast)
        inputs = network.inputs(query_x, query_mask)
        return network.forward(network.start(own), network.shared(shared), inputs, inner=False)

    def logits(
        self,
        state: MetaState,
        episodes: Episodes,
        *,
        steps: int | None = None,
        norm_statistics: NormStatistics = "batch",
    ) -> Tensor:  # [tasks, n, ways]
        """Adapt to the support sets, each task independent of the others, and predict the query sets."""
        check_norm_statistics(norm_statistics)
        support = (episodes.support_x, episodes.support_y, episodes.support_mask)
        fast = self._adapted(state, *support, steps, statistics=norm_statistics == "support")
        return self.predict(fast, episodes.query_x, episodes.query_mask, norm_statistics=norm_statistics)

    def module_for(self, fast: Weights, i: int) -> nn.Module:
        """Task i's adapted network as an ordinary module in eval mode, with parameters of its own.

        Its batch norm layers have the statistics of the support set as their running statistics, so that its outputs
        are those of `predict(fast, x, norm_statistics="support")`, for one example as for many. What the model computes
        without a layer, such as its own call of `F.batch_norm`, stays as the model has it.

        Example:
            >>> import gradshare as gs
            >>> learner = gs.maml(gs.Conv4(filters=8, image=(1, 28, 28)), steps=2)
            >>> episodes = gs.load_dataset("glyphs").sample("test", gs.Shape(5, 1, 15), tasks=3, key=(0,))
            >>> fast = learner.adapt(learner.init(seed=0), episodes.support_x, episodes.support_y)
            >>> learner.module_for(fast, 0)(episodes.query_x[0, :1]).shape
            torch.Size([1, 5])
        """
        self._check_complete(fast, "support")
        check_whole("i", i, 0, len(fast[self.adapted[0]]) - 1)
        module = vmapped.with_fixed_norms(self.module)
        if self.head_start == "prototypes":
            owner = module.get_submodule(self.head[0].rpartition(".")[0])
            cast(nn.Linear, owner).out_features = fast[self.head[0]].shape[1]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in fast:
                tensor.data = fast[name][i].detach().clone(memory_format=torch.contiguous_format)
        return module

    def _adapted(
        self, state: MetaState, x: Inputs, y: Tensor, mask: Tensor | None, steps: int | None, statistics: bool
    ) -> dict[str, Tensor]:
        """All weights after the inner loop; the statistics of batch norm take another run of the model."""
        check_examples(x, y, "support", mask)
        if torch.is_inference_mode_enabled():  # adapting needs gradients, and tensors that can have them
            with torch.inference_mode(False), torch.no_grad():
                mask = None if mask is None else mask.clone()
                return self._adapted(state, map_inputs(torch.clone, x), y.clone(), mask, steps, statistics)
        self._check(state)
        if steps is None:
            steps = self.steps
        check_whole("steps", steps, 0 if self.head_start == "prototypes" else 1, MOST_STEPS)
        in_form = self._shared_of_steps(state, steps)
        trajectory, _ = self._adapt(state, in_form, self._batch(x, y, mask, inner=True), steps, training=False)
        shared = self._shared(state, steps - 1)
        if not torch.is_grad_enabled():  # a view of a leaf asks for gradients even here
            shared = {name: weight.detach() for name, weight in shared.items()}
        adapted = dict(self.network.by_name(trajectory[-1]))
        fast = {name: w.expand(len(y), *w.shape) for name, w in shared.items()} | adapted
        if not statistics:
            return fast
        return fast | self._general.statistics(adapted, shared, self._general.inputs(x, mask))

    def _adapt(
        self, state: MetaState, shared: list[Weights], support: Batch, steps: int, training: bool
    ) -> tuple[list[Weights], Tree]:
        """Fast weights of each step, and the memory after them, in the network's layout."""
        network, alone = self.network, self.group.size == 1
        total = (sum_of_tasks if alone else self.group.sum_tasks) if training else None

        def support_gradients(fast: Weights, k: int, create_graph: bool) -> Weights:
            return self._support_gradients(fast, shared[k], support, create_graph, training)

        with vmapped.explaining("model"):
            found = adapt(
                self._fast(network.start(self._start(state)), shared[0], support, training),
                support_gradients,
                self._rule(),
                network.pack(state.learned),
                network.pack(state.memory),
                steps=steps,
                total=total,
            )
        vars(self)["_rule_seen"] = True
        return found

    def _rule(self) -> Rule:
        """The rule in the network's layout; until it has run once, with a look at what it computes."""
        seen = "_rule_seen" in vars(self) or (self._kernels and self.rule.any_layout)  # the latter by fused programs
        return self.network.rule(self.rule if seen else checked(self.rule), one_process=self.group.size == 1)

    def _split(self, fast: Weights) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What each task has of its own, `[tasks, *shape]`, and what all tasks have in common, `[*shape]`."""
        own = {*self.adapted, *vmapped.statistics_of(self.module)}
        return (
            {name: weight for name, weight in fast.items() if name in own},
            {name: weight[0] for name, weight in fast.items() if name not in own},
        )

    def _check_complete(self, fast: Weights, norm_statistics: NormStatistics) -> None:
        """Raise an error unless this is all that `adapt` returned."""
        if not isinstance(fast, Mapping):
            raise UserError(f"the adapted weights are what `adapt` returned, not {value_or_type(fast)}")
        needed = [name for name, p in self.module.named_parameters() if p.requires_grad]
        if norm_statistics == "support":
            needed += vmapped.statistics_of(self.module)
        missing = sorted(name for name in needed if name not in fast)
        if missing:
            raise UserError(f"the adapted weights lack {missing[0]}: use everything that `adapt` returned")

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """All tensors of a state of this learner, without values."""
        return {name: tensor.to("meta") for name, tensor in self.init().tensors().items()}

    def _check(self, state: MetaState) -> None:
        """Raise an error unless the state fits this learner. What has been checked is not checked again."""
        check_state(state)
        parts = (state.params, state.learned, state.memory)
        if not all(one is other for one, other in zip(parts, vars(self).get("_checked", (None,) * 3), strict=True)):
            check_fit(self._tensors, state.tensors(), "the state", types=False)
            self.accept(state)

    def accept(self, state: MetaState) -> None:
        """Take a state as one that fits: `meta_step` has just made its memory."""
        vars(self)["_checked"] = (state.params, state.learned, state.memory)

    def _start(self, state: MetaState) -> dict[str, Tensor]:
        """Weights before the first inner step, without the task axis; those that each task computes are missing."""
        if self.head_start != "zero":
            return state.params
        return state.params | {name: torch.zeros_like(state.params[name]) for name in self.head}

    def _fast(
        self,
        start: Weights,  # of all tasks, in the network's layout
        shared: Weights,
        support: Batch,
        training: bool,
    ) -> Weights:
        """Weights of each task before the first inner step, in the network's layout."""
        y, mask = support.y, support.mask
        fast = {name: weight.expand(len(y), *weight.shape) for name, weight in start.items()}
        if self.head_start != "prototypes":
            return fast
        weight, bias = self.head
        own = self.module.get_parameter(weight)
        size = own.shape[1]
        identity = {weight: torch.eye(size, dtype=own.dtype, device=own.device), bias: own.new_zeros(size)}
        # Other tensors than `fast`: the inner gradient of the body is at a fixed head.
        body = {name: weight.expand(len(y), *weight.shape) for name, weight in start.items()}
        if "_rule_seen" not in vars(self) and not (own.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._check_head(body, shared, support)
        features = self.network.forward(body, {**shared, **identity}, support.x, inner=False)
        # In training the model's ways: a GPU does not wait for labels.
        ways = len(own) if training else self.ways_of(y, mask)
        return fast | dict(zip(self.head, prototype_head(features, y, mask, ways), strict=True))

    @torch.no_grad()
    def _check_head(self, body: Weights, shared: Weights, support: Batch) -> None:
        """Raise an error where something follows the head of prototypes: what it takes would not be the features."""
        weight, bias = map(self.module.get_parameter, self.head)
        ones = dict(zip(self.head, (torch.zeros_like(weight), torch.ones_like(bias)), strict=True))
        outputs = self.network.forward(body, {**shared, **ones}, support.x, inner=False)
        if not ((outputs == 1) | ~outputs.isfinite()).all():
            raise UserError("proto_maml needs a head whose outputs are those of the model: something follows it")

    def ways_of(self, y: Tensor, mask: Tensor | None) -> int:
        """Outputs of a head that follows the task: one more than the highest label."""
        if self.ways is not None:
            return self.ways
        return int((y if mask is None else torch.where(mask, y, 0)).max()) + 1

    def _shared(self, state: MetaState, step: int) -> dict[str, Tensor]:
        """Weights that are not adapted, as they are at one inner step."""
        fixed = {name: weight for name, weight in state.params.items() if name not in self.adapted}
        per_step = state.learned.get("per_step", {})
        return fixed | {name: values[min(step, len(values) - 1)] for name, values in per_step.items()}

    def _shared_of_steps(self, state: MetaState, steps: int | None = None) -> list[Weights]:
        """Weights that are not adapted, at each inner step, in the network's layout."""
        steps = max(self.steps if steps is None else steps, 1)
        if not self.per_step:
            return [self.network.shared(self._shared(state, 0))] * steps
        return [self.network.shared(self._shared(state, step)) for step in range(steps)]

    def losses(
        self,
        logits: Tensor,  # [tasks, n, ...]
        targets: Tensor,  # [tasks, n, ...]
        mask: Tensor | None = None,  # [tasks, n]
        *,
        inner: bool = False,
    ) -> Tensor:  # [tasks]
        """The loss of every task, of its real examples alone; with `inner`, the loss of the inner loop."""
        loss = self._loss(inner)
        if loss == "cross_entropy" and self._kernels and not targets.is_floating_point() and mask is None:
            return backends.cross_entropy(logits, targets.long())
        try:
            return task_losses(loss, logits, targets, mask)
        except UserError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            raise vmapped.explained(error, "loss") if callable(loss) else error from error


def _name(loss: Loss) -> str:
    return repr(loss) if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)


def check_learner(learner: Any) -> None:
    if not isinstance(learner, Learner):
        raise UserError(f"a learner is what gs.maml(model) and its siblings make, not {value_or_type(learner)}")


def check_norm_statistics(value: Any) -> None:
    if value not in get_args(NormStatistics):
        raise UserError(f"norm_statistics is 'batch' or 'support', not {short_repr(value)}")


def check_state(state: Any) -> None:
    if not isinstance(state, MetaState):
        raise UserError(f"a state is what learner.init() gives, not {value_or_type(state)}")


def value_or_type(value: Any) -> str:
    """A value of the wrong type for a message: itself where that is short, else its type."""
    return (
        short_repr(value)
        if value is None or isinstance(value, str | int | float)
        else f"an instance of {type(value).__name__}"
    )
