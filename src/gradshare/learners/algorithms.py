"""The algorithms: each a short composition of rules."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, cast, get_args

from torch import nn

from gradshare.engine import vmapped
from gradshare.errors import UserError, check_range, check_whole, short_repr
from gradshare.learners.learner import HeadStart, Learner
from gradshare.method.losses import LOSSES, Loss
from gradshare.method.mixing import BodyOnly, with_head
from gradshare.method.preconditioners import Alfa, Curvature, Mask
from gradshare.method.rules import Rule, chain, rate_per_element, rate_per_tensor_and_step, scale, stop_gradient
from gradshare.method.state import flatten
from gradshare.method.variants import first_link, inner_rule, variant


class Recipe(NamedTuple):
    """How MAML++ changes over training."""

    multi_step_epochs: int  # epochs over which the multi-step loss fades into the last step's; 0: last step alone
    first_order_epochs: int  # epochs of first-order gradients before second order
    final_outer_rate: float  # where a cosine takes the outer rate, as a share of its start; 1: constant


RECIPES = {
    "reference": Recipe(multi_step_epochs=15, first_order_epochs=0, final_outer_rate=1.0),  # the code, MiniImagenet
    # Antoniou et al., 2018; the end of the cosine is from their Omniglot settings, 1e-3 to 1e-5
    "paper": Recipe(multi_step_epochs=15, first_order_epochs=50, final_outer_rate=0.01),
}


class FirstLink(Protocol):
    """What `sharing=` takes beside a name: `GradientSharing`, a control, or a rule of your own."""

    def rule(self) -> Rule: ...


Sharing = FirstLink | Rule | str | None
Adapt = str | Sequence[str] | Callable[[str], bool] | None
Inner = Rule | str | Sequence[Rule | str] | None


def maml(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    adapt_norm: bool = False,
    *,
    inner_loss: Loss | None = None,
    adapt: Adapt = None,
    inner: Inner = None,
    head_start: HeadStart = "learned",
    head: str | None = None,
) -> Learner:
    """MAML (Finn et al., 2017): w[t] <- w[t] - inner_lr * D[t], where D is the gradient, or the shared direction.

    Args:
        model: any module; it is copied and never changed.
        inner_lr: the inner learning rate.
        steps: inner steps.
        sharing: `gs.GradientSharing()`, a control such as `gs.GateOnly()`, its name (`"gate-only"`), or a rule of your
            own; None is the original algorithm.
        loss: `"cross_entropy"`, `"mse"`, or a function of one task's (outputs, targets) that returns a scalar.
        adapt_norm: whether the inner loop also moves the gain and bias of batch norm; they are meta-learned either way.
        inner_loss: the loss on the support sets, where it is another one; as `loss`.
        adapt: the weights that the inner loop moves: names of weights or of submodules, `["layer4", "head"]`, or a
            function of a weight's name; None: all. The others are meta-learned all the same. Batch norm is adapted
            only if its weights are named in full, or with `adapt_norm`.
        inner: rules between sharing and the learning rate, one or several: `gs.momentum(0.9)`, `gs.adam()`,
            `gs.head_rate(4)`, a name (`"momentum:0.9"`, `"adam"`, `"head:4"`), or rules of your own.
        head_start: where the head starts in each task: `"learned"`; `"zero-init"`, zero before training and learned
            from there; or `"zero"`, zero for every task and never learned.
        head: name of the submodule that is the head; None is the module that owns the last parameter.

    Example:
        >>> import gradshare as gs
        >>> gs.maml(gs.Conv4(), inner_lr=0.1, steps=5, sharing=gs.GradientSharing()).steps
        5
    """
    links = [*_first(sharing, model, head), *_inner(inner, model, head), scale(_rate(inner_lr))]
    adapted = _chosen(model, adapt_norm, adapt)
    return _learner("maml", model, adapted, links, steps, loss, inner_loss, head_start, head)


def first_order_maml(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    adapt_norm: bool = False,
    *,
    inner_loss: Loss | None = None,
    adapt: Adapt = None,
    inner: Inner = None,
    head_start: HeadStart = "learned",
    head: str | None = None,
) -> Learner:
    """MAML with the task gradients as constants (Finn et al., 2017, 5.2). Arguments as `maml`."""
    links = [stop_gradient(), *_first(sharing, model, head), *_inner(inner, model, head), scale(_rate(inner_lr))]
    adapted = _chosen(model, adapt_norm, adapt)
    return _learner("first_order_maml", model, adapted, links, steps, loss, inner_loss, head_start, head)


def meta_sgd(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    adapt_norm: bool = False,
    *,
    inner_loss: Loss | None = None,
    adapt: Adapt = None,
    inner: Inner = None,
    head_start: HeadStart = "learned",
    head: str | None = None,
) -> Learner:
    """Meta-SGD (Li et al., 2017): a learned rate per weight, all starting at `inner_lr`. Arguments as `maml`."""
    links = [*_first(sharing, model, head), *_inner(inner, model, head), rate_per_element(_rate(inner_lr))]
    adapted = _chosen(model, adapt_norm, adapt)
    return _learner("meta_sgd", model, adapted, links, steps, loss, inner_loss, head_start, head)


def anil(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    head: str | None = None,
    *,
    inner_loss: Loss | None = None,
    inner: Inner = None,
    head_start: HeadStart = "learned",
) -> Learner:
    """ANIL (Raghu et al., 2020): MAML that adapts the head alone. Arguments as `maml`, and:

    Args:
        head: name of the submodule to adapt; None is the module that owns the last parameter.
    """
    links = [*_first(sharing, model, head), *_inner(inner, model, head), scale(_rate(inner_lr))]
    return _learner("anil", model, _under(model, head), links, steps, loss, inner_loss, head_start, head)


def boil(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    adapt_norm: bool = False,
    head: str | None = None,
    *,
    inner_loss: Loss | None = None,
    inner: Inner = None,
    head_start: HeadStart = "learned",
) -> Learner:
    """BOIL (Oh et al., 2021): MAML that adapts all but the head. Arguments as `maml`, and:

    Args:
        head: name of the submodule that is not adapted; None is the module that owns the last parameter.

    Example:
        >>> import gradshare as gs
        >>> gs.boil(gs.Conv4(), sharing=gs.GradientSharing()).adapted[-2:]
        ('convs.3.weight', 'convs.3.bias')
    """
    links, kept = (
        [*_first(sharing, model, head), *_inner(inner, model, head), scale(_rate(inner_lr))],
        _under(model, head),
    )
    adapted = tuple(name for name in _chosen(model, adapt_norm, None) if name not in kept)
    if not adapted:
        raise UserError(f"boil adapts all but the head, and the model has only {', '.join(kept)}")
    return _learner("boil", model, adapted, links, steps, loss, inner_loss, head_start, head)


def proto_maml(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    adapt_norm: bool = False,
    head: str | None = None,
    *,
    inner_loss: Loss | None = None,
    adapt: Adapt = None,
    inner: Inner = None,
) -> Learner:
    """Proto-MAML (Triantafillou et al., 2020): MAML whose head starts as that of a prototypical network.

    With p_c the mean of the support features of class c, the head of a task starts at W_c = 2 p_c, b_c = -|p_c|^2, and
    the outer gradient goes through it. Tasks at test may have any number of ways. `steps=0` is a prototypical network.
    Sharing acts on the gradients of the body; the head takes its own. Arguments as `maml`, and:

    Args:
        head: name of the head, an `nn.Linear` with a bias, whose outputs are those of the model; None is the module
            that owns the last parameter. Its own weights are not used. In training its size is the number of ways.
        adapt: as in `maml`; the head is always adapted.

    Example:
        >>> import gradshare as gs
        >>> learner = gs.proto_maml(gs.Conv4(ways=5, filters=8, image=(1, 28, 28)), steps=2)
        >>> episodes = gs.load_dataset("glyphs").sample("test", gs.Shape(7, 1, 15), tasks=3, key=(0,))
        >>> learner.logits(learner.init(seed=0), episodes).shape
        torch.Size([3, 105, 7])
    """
    names = _under(model, head)
    owner = model.get_submodule(names[0].rpartition(".")[0])
    if not isinstance(owner, nn.Linear) or len(names) != 2:
        own = "an nn.Linear with a trained weight and bias of its own"
        raise UserError(f"proto_maml needs a head that is {own}, not {short_repr(owner)}")
    chosen = {*_chosen(model, adapt_norm, adapt), *names}
    adapted = tuple(name for name in _trainable(model, lambda name: True) if name in chosen)
    first = _first(sharing, model, head)
    if first and (steps == 0 or len(adapted) == len(names)):
        raise UserError(
            "no gradient of the body is there to share: give no sharing (arm original), or adapt the body in steps"
        )
    links = [
        *(BodyOnly(link, names) for link in chain(*first).links),
        *_inner(inner, model, head),
        scale(_rate(inner_lr)),
    ]
    learner = _learner("proto_maml", model, adapted, links, steps, loss, inner_loss, "learned", least_steps=0)
    return replace(learner, head_start="prototypes", head=names)


def reptile(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    adapt_norm: bool = True,
    *,
    inner_loss: Loss | None = None,
    adapt: Adapt = None,
    inner: Inner = None,
    head_start: HeadStart = "learned",
    head: str | None = None,
) -> Learner:
    """Reptile (Nichol et al., 2018): the outer gradient is the mean over tasks of w - w[t]. Arguments as `maml`.

    w[t] are the weights after the inner steps on the support set. With `torch.optim.SGD(lr=eps)` as the outer optimiser
    this is w <- w + eps (mean of w[t] - w). The query set gives the loss and the accuracy, and no gradient. A weight
    that is not adapted stays as it is, so batch norm is adapted here by default. A rule that learns (gates, rates) is
    an error, since nothing would learn it.

    Example:
        >>> import gradshare as gs, torch
        >>> learner = gs.reptile(gs.Conv4(filters=8, image=(1, 28, 28)), steps=2)
        >>> state = learner.init(seed=0)
        >>> sgd = torch.optim.SGD(state.trainable().values(), lr=0.1)
        >>> episodes = gs.load_dataset("glyphs").sample("train", gs.Shape(5, 5, 5), tasks=3, key=(0,))
        >>> bool(gs.meta_step(learner, state, sgd, episodes).taken)
        True
    """
    links = [*_first(sharing, model, head), *_inner(inner, model, head), scale(_rate(inner_lr))]
    adapted = _chosen(model, adapt_norm, adapt)
    learner = _learner("reptile", model, adapted, links, steps, loss, inner_loss, head_start, head, outer="reptile")
    if learned := flatten(learner.init().learned, "learned"):
        raise UserError(
            f"reptile learns no gates or rates, so give no sharing (its arm is original): nothing would learn"
            f" {', '.join(learned)}"
        )
    if head_start == "zero" and set(adapted) <= set(learner.head):
        raise UserError("reptile learns what it adapts, and that is a head which is zero for every task")
    return learner


def maml_plus_plus(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    adapt_norm: bool = False,
    recipe: Literal["reference", "paper"] = "reference",
    multi_step_epochs: int | None = None,
    first_order_epochs: int | None = None,
    final_outer_rate: float | None = None,
    per_step_norm: bool | None = None,
    *,
    inner_loss: Loss | None = None,
    adapt: Adapt = None,
    inner: Inner = None,
    head_start: HeadStart = "learned",
    head: str | None = None,
) -> Learner:
    """MAML++ (Antoniou et al., 2018). Arguments as `maml`, and:

    A learned rate per weight tensor and step; a query loss after every step, fading into the last; a batch-norm gain
    and bias per step; first order before second; a cosine on the outer rate.

    Args:
        recipe: values of the three below: `"reference"`, the authors' code as it ships for MiniImagenet (15, 0, 1.0),
            or `"paper"`, their text (15, 50, 0.01).
        multi_step_epochs: epochs until the last step's loss is the only one.
        first_order_epochs: epochs of first-order gradients at the start.
        final_outer_rate: end of the cosine on the outer rate, as a share of its start; 1 keeps it constant.
        per_step_norm: batch-norm gain and bias for each step; default unless `adapt_norm`, which excludes it.
    """
    if recipe not in RECIPES:
        _unknown("recipe", recipe, RECIPES)
    given: dict[str, Any] = {
        "multi_step_epochs": multi_step_epochs,
        "first_order_epochs": first_order_epochs,
        "final_outer_rate": final_outer_rate,
    }
    plan = RECIPES[recipe]._replace(**{name: value for name, value in given.items() if value is not None})
    for name, value in plan._asdict().items():
        check_range(name, value, 0)
    if per_step_norm and adapt_norm:
        raise UserError("batch norm is either adapted (adapt_norm) or has a value per step (per_step_norm), not both")
    adapted = _chosen(model, adapt_norm, adapt)
    names = _norm_names(model) if per_step_norm or (per_step_norm is None and not adapt_norm) else ()
    names = tuple(name for name in names if name not in adapted)
    links = [*_first(sharing, model, head), *_inner(inner, model, head), rate_per_tensor_and_step(_rate(inner_lr))]
    schedule = Schedule(plan, steps, chain(stop_gradient(), *links), chain(*links))
    more: dict[str, Any] = {"per_step": names, "schedule": schedule, "final_outer_rate": plan.final_outer_rate}
    return _learner("maml_plus_plus", model, adapted, links, steps, loss, inner_loss, head_start, head, **more).at(0)


def meta_curvature(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    adapt_norm: bool = False,
    *,
    inner_loss: Loss | None = None,
    adapt: Adapt = None,
    inner: Inner = None,
    head_start: HeadStart = "learned",
    head: str | None = None,
) -> Learner:
    """Meta-Curvature (Park and Oliva, 2019): MAML with learned matrices on the direction D. Arguments as `maml`.

    w <- w - inner_lr * (D x1 M_o x2 M_i x3 M_f) for filters, and M_o D M_i^T for matrices, with all M starting at the
    identity. Biases move as in MAML. The matrix M_i of a layer with n inputs has n * n elements.
    """
    links = [*_first(sharing, model, head), *_inner(inner, model, head), Curvature(), scale(_rate(inner_lr))]
    adapted = _chosen(model, adapt_norm, adapt)
    return _learner("meta_curvature", model, adapted, links, steps, loss, inner_loss, head_start, head)


def sparse_maml(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    adapt_norm: bool = False,
    *,
    inner_loss: Loss | None = None,
    adapt: Adapt = None,
    inner: Inner = None,
    head_start: HeadStart = "learned",
    head: str | None = None,
) -> Learner:
    """Sparse-MAML (von Oswald et al., 2021), its form with ReLU: MAML that learns which weights to adapt, and how fast.

    w <- w - inner_lr * relu(M) * D, with an element of M, starting at 1, for each weight. Where M falls to 0 or below,
    the weight is not adapted any more. Arguments as `maml`.
    """
    links = [*_first(sharing, model, head), *_inner(inner, model, head), Mask(), scale(_rate(inner_lr))]
    adapted = _chosen(model, adapt_norm, adapt)
    return _learner("sparse_maml", model, adapted, links, steps, loss, inner_loss, head_start, head)


def alfa(
    model: nn.Module,
    inner_lr: float = 0.1,
    steps: int = 5,
    sharing: Sharing = None,
    loss: Loss = "cross_entropy",
    adapt_norm: bool = False,
    *,
    inner_loss: Loss | None = None,
    adapt: Adapt = None,
    inner: Inner = None,
    head_start: HeadStart = "learned",
    head: str | None = None,
) -> Learner:
    """ALFA (Baik et al., 2020): w <- (1 - beta) w - alpha D, where a small network chooses alpha and beta.

    It sees the means of w and D over each weight tensor, and gives alpha and beta for each task, tensor and step. They
    start at alpha = inner_lr and beta = 0. Arguments as `maml`.
    """
    links = [*_first(sharing, model, head), *_inner(inner, model, head), Alfa(_rate(inner_lr))]
    adapted = _chosen(model, adapt_norm, adapt)
    return _learner("alfa", model, adapted, links, steps, loss, inner_loss, head_start, head)


@dataclass(frozen=True)
class Schedule:
    """What changes from epoch to epoch in MAML++: the rule, and the weights of the query losses."""

    plan: Recipe
    steps: int
    first_order: Rule
    second_order: Rule

    def __call__(self, epoch: int) -> dict[str, object]:
        return {
            "rule": self.first_order if epoch < self.plan.first_order_epochs else self.second_order,
            "step_weights": multi_step_weights(epoch, self.steps, self.plan.multi_step_epochs),
        }


def multi_step_weights(epoch: int, steps: int, epochs: int) -> tuple[float, ...]:
    """Weights of the query loss after each step: equal at epoch 0, the last step alone from `epochs` on.

    Each weight but the last falls from 1/steps by epoch/(steps*epochs), to no less than 0.03/steps; the last takes the
    rest.

    Example:
        >>> [round(w, 4) for w in multi_step_weights(7, steps=5, epochs=15)]
        [0.1067, 0.1067, 0.1067, 0.1067, 0.5733]
    """
    if epoch >= epochs:
        return (0.0,) * (steps - 1) + (1.0,)
    early = max(1 / steps - epoch / (steps * epochs), 0.03 / steps)
    return (early,) * (steps - 1) + (1 - early * (steps - 1),)


def _rate(inner_lr: float) -> float:
    try:
        rate = math.nan if isinstance(inner_lr, str) else float(inner_lr)
    except (TypeError, ValueError, RuntimeError):  # the last: a tensor of several numbers
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise UserError(f"inner_lr is {short_repr(inner_lr)}; it must be a finite number, and not below 0")
    return rate


def _first(sharing: Sharing, model: nn.Module, head: str | None) -> list[Rule]:
    """The first link of the chain, if there is one."""
    if isinstance(sharing, str):
        row = variant(sharing)
        if row.rate != 1:
            raise UserError(f"{sharing} is the original at {row.rate} times the inner rate: give that inner_lr instead")
        sharing = first_link(sharing, allowed=(sharing,))
    if sharing is None:
        return []
    rule = sharing.rule() if not isinstance(sharing, type) and hasattr(sharing, "rule") else sharing
    if not _is_rule(rule):
        raise UserError(
            "sharing is gs.GradientSharing(), a control such as gs.GateOnly(), its name, a rule of your own, or None,"
            f" not {short_repr(sharing)}"
        )
    return [with_head(cast(Rule, rule), lambda: _under(model, head))]


def _inner(inner: Inner, model: nn.Module, head: str | None) -> list[Rule]:
    """The links between sharing and the learning rate."""
    if inner is None:
        return []
    given = inner if isinstance(inner, list | tuple) else [inner]
    rules = [inner_rule(one) if isinstance(one, str) else one for one in given]
    if not all(map(_is_rule, rules)):
        raise UserError(
            "inner is gs.momentum(0.9), gs.adam(), gs.head_rate(4), their name, your own rule, a list, or None,"
            f" not {short_repr(inner)}"
        )
    return [with_head(cast(Rule, rule), lambda: _under(model, head)) for rule in rules]


def _is_rule(value: Any) -> bool:
    return not isinstance(value, type) and all(hasattr(value, part) for part in ("name", "init", "update"))


def _learner(
    algorithm: str,
    model: nn.Module,
    adapted: tuple[str, ...],
    links: list[Rule],
    steps: int,
    loss: Loss,
    inner_loss: Loss | None,
    head_start: HeadStart,
    head: str | None = None,
    least_steps: int = 1,
    **more: Any,  # further fields of the learner
) -> Learner:
    """What all algorithms have in common: checks of the common options, and the learner."""
    check_whole("steps", steps, least_steps)
    for name, value in {"loss": loss, "inner_loss": inner_loss}.items():
        if not callable(value) and value not in LOSSES and not (name == "inner_loss" and value is None):
            _unknown(name, value, LOSSES)
    if head_start not in get_args(HeadStart):
        _unknown("head_start", head_start, get_args(HeadStart))
    if not adapted:
        raise UserError("the model has no weight to adapt: none requires a gradient")
    named = () if head is None and head_start == "learned" else _under(model, head)  # a wrong name is always an error
    head_names = () if head_start == "learned" else named
    if head_start == "zero" and (still := [name for name in head_names if name not in adapted]):
        raise UserError(
            "head_start='zero' is never learned, so the inner loop has to adapt all of the head: it does not adapt"
            f" {', '.join(still)}"
        )
    owner = head_names[-1].rpartition(".")[0] if head_names else None
    all_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if kept := [name for name in all_names if name.rpartition(".")[0] == owner and name not in head_names]:
        why = "requires no gradient, or is the weight of another layer too"
        raise UserError(f"head_start={head_start!r} sets the whole head, and {', '.join(kept)} {why}")
    prepared = vmapped.prepare(model)
    if any(not layer.training for layer in vmapped.norms(model).values()):
        warnings.warn(
            "model.eval() has no effect on batch norm, which normalises with the statistics of the batch at hand: use"
            " norm_statistics='support' at test to normalise with those of the support set",
            stacklevel=3,
        )
    more = {"inner_loss": inner_loss, "head_start": head_start, "head": head_names, **more}
    return Learner(prepared, chain(*links), int(steps), loss, adapted, algorithm=algorithm, **more)


def _unknown(what: str, value: Any, known: Any) -> NoReturn:
    raise UserError(f"{what} {value!r} is not one of {', '.join(known)}")


def _trainable(model: nn.Module, keep: Callable[[str], bool]) -> tuple[str, ...]:
    if not isinstance(model, nn.Module):
        raise UserError(f"the model is a torch.nn.Module, not {short_repr(model)}")
    return tuple(name for name, p in model.named_parameters() if p.requires_grad and keep(name))


def _norm_names(model: nn.Module) -> tuple[str, ...]:
    names = _trainable(model, lambda name: True)
    norms = [name for name, layer in model.named_modules() if isinstance(layer, vmapped.BATCH_NORMS)]
    return tuple(name for name in names if name.rpartition(".")[0] in norms)


def _chosen(model: nn.Module, adapt_norm: bool, adapt: Adapt) -> tuple[str, ...]:
    """Names of the weights to adapt."""
    names = _trainable(model, lambda name: True)
    norms = () if adapt_norm else _norm_names(model)
    if adapt is None:
        chosen = tuple(name for name in names if name not in norms)
        if norms and not chosen:
            raise UserError("the model has no weight to adapt but batch norm's: adapt_norm=True adapts those")
        return chosen
    asked = [adapt] if isinstance(adapt, str) or callable(adapt) or not isinstance(adapt, Iterable) else list(adapt)
    if wrong := [one for one in asked if not (isinstance(one, str) or callable(one))]:
        raise UserError(f"adapt is names of weights or submodules, or a function of a name, not {short_repr(wrong[0])}")
    if not asked:
        raise UserError("adapt is empty, so that no weight would be adapted: leave it out to adapt all")
    found = [[name for name in names if _is_asked(name, one, norms)] for one in asked]
    for one, some in zip(asked, found, strict=True):
        if not some:
            if any(_is_asked(name, one, ()) for name in norms):
                raise UserError(f"adapt={short_repr(one)} is batch norm: name its weights in full, or adapt_norm=True")
            raise UserError(f"adapt={short_repr(one)} chooses no weight to adapt: the model has {_some(names)}")
    return tuple(name for name in names if any(name in some for some in found))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(names[:12]) + more


def _is_asked(name: str, asked: str | Callable[[str], bool], norms: tuple[str, ...]) -> bool:
    """Whether a weight is asked for by its name; or, if it is not of batch norm, by a submodule or by a function."""
    if callable(asked):
        return name not in norms and bool(asked(name))
    return name == asked or (name.startswith(f"{asked}.") and name not in norms)


def _under(model: nn.Module, head: str | None) -> tuple[str, ...]:
    """Names of the head's weights."""
    names = _trainable(model, lambda name: True)
    if head is None and names:
        head = names[-1].rpartition(".")[0]
    chosen = tuple(name for name in names if not head or name.startswith(f"{head}."))
    if not chosen:
        raise UserError(
            f"no weights under '{head}': the model has {_some(names)}" if names else "the model has no weight"
        )
    return chosen
