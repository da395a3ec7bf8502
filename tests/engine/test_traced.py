"""Any module as traced programs: exact in float64, for every kind of layer and algorithm; bf16; memory.

What was traced runs operation by operation, without the compiler; tests/stress/test_traced.py has the slower cases.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import gradshare as gs
from gradshare.engine import convolution, traced
from gradshare.engine.convolution import TaskMaps, laid_out, operators
from gradshare.engine.forms import _whole_eights, normalised
from gradshare.engine.operations import conv
from tests.learners.test_parts import assert_same_as_whole
from tests.support.cases import (
    ALGORITHMS,
    FURTHER,
    MATRIX,
    Case,
    assert_equal_to_reference,
    build,
    classifiers,
    randomised,
)
from tests.support.learners import tasks
from tests.support.models import CONV4, EXTRAS, RELU_NORM

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """Programs run without a compiler. Returns the lists of operations that would be compiled, as they come."""
    lists: list[GraphModule] = []

    def noted(module: GraphModule, what: str) -> traced.Program:
        lists.append(module)
        return traced.interpreted(module, what)

    monkeypatch.setattr(traced, "compiled", noted)
    return lists


def on_programs(case: Case) -> Case:
    return case._replace(learner=case.learner.to("cpu", compiled=True))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("net", EXTRAS)
def test_any_module_equals_a_loop_over_tasks(net: str) -> None:
    assert_equal_to_reference(on_programs(build(EXTRAS[net], "maml", "global", steps=2)), EXTRAS[net], tasks=3)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("algorithm", "net"), classifiers({**ALGORITHMS, **FURTHER}, MATRIX))
def test_algorithms_equal_a_loop_over_tasks(algorithm: str, net: str) -> None:
    entry, adapt_norm = MATRIX[net]
    # ALFA sees the mean of a direction, and a norm per tensor makes a direction of rounding errors
    sharing = "global" if algorithm in FURTHER else "tensor"
    assert_equal_to_reference(on_programs(build(entry, algorithm, sharing, 2, adapt_norm)), entry, tasks=2)


@pytest.mark.usefixtures("interpreted")
def test_conv4_with_adapted_norms_is_pooled_as_pytorch_does() -> None:
    case = on_programs(build(CONV4, "maml", "global", 2, adapt_norm=True))
    assert_equal_to_reference(case, CONV4, tasks=2)


@pytest.mark.usefixtures("interpreted")
def test_masks_are_as_in_general() -> None:
    entry, episodes = RELU_NORM, RELU_NORM.tasks(3)
    support, query = (torch.ones(y.shape, dtype=torch.bool) for y in (episodes.support_y, episodes.query_y))
    support[0, 4:], query[1, :3] = False, False
    episodes = gs.Episodes(*episodes.tensors(), support, query)
    usual = build(entry, "maml", "global").learner
    state = randomised(usual.init())
    found, expected = (one.outer_loss(state, episodes) for one in (usual.to("cpu", compiled=True), usual))
    leaves = list(state.trainable().values())
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-12, atol=0)
    ours, theirs = (
        torch.cat([g.flatten() for g in torch.autograd.grad(out.loss, leaves)]) for out in (found, expected)
    )
    assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max()


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(self.left(one)) * self.right(other)


@pytest.mark.usefixtures("interpreted")
def test_several_inputs_are_as_in_general() -> None:
    draw = torch.Generator().manual_seed(0)
    x = tuple(torch.randn(2, 5, size, generator=draw) for size in (3, 2))
    y = torch.randint(4, (2, 5), generator=draw)
    episodes, usual = gs.Episodes(x, y, x, y), gs.maml(Summed(), steps=2)
    state = usual.init()
    losses = [one.outer_loss(state, episodes).losses for one in (usual, usual.to("cpu", compiled=True))]
    torch.testing.assert_close(*losses)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("algorithm", ["maml", "first_order_maml", "maml_plus_plus", "anil"])
def test_parts_of_the_tasks_are_the_same_step(algorithm: str) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.SiLU(), nn.AvgPool2d(4), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(12, 3)).double()
    learner = getattr(gs, algorithm)(model, steps=2, sharing=gs.GradientSharing()).to("cpu", compiled=True)
    assert_same_as_whole(learner, tasks(), 1, 2)


@pytest.mark.usefixtures("interpreted")
def test_reptile_and_evaluation_are_as_in_general() -> None:
    usual = gs.reptile(RELU_NORM.make(), steps=2)
    programs, state, episodes = usual.to("cpu", compiled=True), usual.init(), RELU_NORM.tasks(2)
    found, expected = programs.outer_loss(state, episodes), usual.outer_loss(state, episodes)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(programs.logits(state, episodes), usual.logits(state, episodes), rtol=1e-12, atol=0)


GEOMETRIES: dict[str, tuple[TaskMaps, tuple[int, ...], tuple[int, ...]]] = {
    "1d": (TaskMaps([2], [1], [1], False, [0], 1), (2, 3, 2, 7), (2, 4, 2, 3)),
    "2d": (TaskMaps([1, 2], [1, 0], [1, 2], False, [0, 0], 2), (2, 2, 4, 6, 7), (2, 4, 2, 3, 2)),
    "1x1": (TaskMaps([1, 1], [0, 0], [1, 1], False, [0, 0], 1), (2, 2, 3, 2, 3), (2, 4, 3, 1, 1)),
    "3d": (TaskMaps([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1), (2, 2, 1, 3, 3, 3), (2, 2, 1, 2, 2, 2)),
    "transposed": (TaskMaps([2, 2], [1, 0], [1, 2], True, [1, 0], 2), (2, 2, 4, 4, 3), (2, 4, 2, 3, 2)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolutions_and_their_derivatives(name: str) -> None:
    maps, *shapes = GEOMETRIES[name]
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes)
    expected = [torch.ops.aten.convolution(one, filters, None, *maps) for one, filters in zip(x, w, strict=True)]
    torch.testing.assert_close(conv(x, w, None, maps), torch.stack(expected))
    assert torch.autograd.gradcheck(lambda x, w: conv(x, w, None, maps), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: conv(x, w, None, maps), (x, w))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_stand_ins_of_the_operators(name: str) -> None:
    maps, *shapes = GEOMETRIES[name]
    x, w = (torch.randn(shape) for shape in shapes)
    y = torch.ops.gradshare.conv(x, w, *maps)
    for operator, tensors in (("conv", (x, w)), ("images_gradient", (y, x, w)), ("filters_gradient", (y, x, w))):
        function = getattr(torch.ops.gradshare, operator).default
        torch.library.opcheck(function, (*tensors, *maps), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dims", [[1, 3, 4], [2], [3, 4]])
def test_normalisation_and_its_derivatives(dims: list[int], affine: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 2, 2, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    size = [1 if dim in dims else length for dim, length in enumerate(x.shape)] if affine else []
    scale, shift = (torch.randn(size, generator=draw, dtype=torch.float64, requires_grad=affine) for _ in range(2))
    y = (x - x.mean(dims, keepdim=True)) / (x.var(dims, correction=0, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(normalised(x, scale, shift, dims, 0.1), y * scale + shift)
    assert torch.autograd.gradcheck(lambda *values: normalised(*values, dims, 0.1), (x, scale, shift))
    assert torch.autograd.gradgradcheck(lambda *values: normalised(*values, dims, 0.1), (x, scale, shift))


def deep(channels: int = 8) -> nn.Module:
    """Four convolutions with batch norm, as a user writes them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, pool in ((1, True), (channels, True), (channels, False), (channels, False)):
        layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.GELU()]
        layers += [nn.AvgPool2d(2)] if pool else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 16, 5))


def images(seed: int, tasks: int = 3) -> gs.Episodes:
    draw = torch.Generator().manual_seed(seed)
    x, query = (torch.randn(tasks, n, 1, 16, 16, generator=draw) for n in (10, 20))
    return gs.Episodes(x, torch.arange(5).repeat(tasks, 2), query, torch.arange(5).repeat(tasks, 4))


def flat(learner: gs.Learner, state: gs.MetaState, episodes: gs.Episodes) -> Tensor:
    loss = learner.outer_loss(state, episodes).loss
    gradients = torch.autograd.grad(loss, list(state.trainable().values()), materialize_grads=True)
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def test_bf16_keeps_weights_and_losses_in_float32(interpreted: list[GraphModule]) -> None:
    learner = gs.maml(deep(), steps=2, sharing=gs.GradientSharing()).to("cpu", "bf16")
    state, episodes = learner.init(), images(0)
    out = learner.outer_loss(state, episodes)
    assert out.loss.dtype == out.losses.dtype == torch.float32
    assert all(
        tensor.dtype in (torch.float32, torch.bool)
        for tensor in dataclasses.replace(state, memory=out.memory).tensors().values()
    )
    logits, usual = (one.logits(state, episodes).detach() for one in (learner, learner.to("cpu")))
    assert logits.dtype == torch.float32 and 1e-4 < (logits - usual).norm() / usual.norm() < 0.1  # evaluated in bf16
    out.loss.backward()
    kinds = {node.meta["val"].dtype for graph in interpreted for node in convolutions_of(graph)}
    assert kinds == {torch.bfloat16}


def convolutions_of(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if "gradshare" in str(node.target)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", [name for name in EXTRAS if name not in ("embedding", "embedding with padding")])
def test_bf16_runs_every_layer(name: str) -> None:
    """Also those without a form, which get their arguments in one type."""
    entry = EXTRAS[name]
    loss = entry.loss if entry.loss == "cross_entropy" else "mse"
    learner = gs.maml(entry.make().float(), steps=1, loss=loss).to("cpu", "bf16")
    state, episodes = learner.init(), entry.tasks(2).to("cpu", torch.float32)
    exact = gs.maml(entry.make(), steps=1, loss=loss)
    expected = exact.outer_loss(exact.init(), entry.tasks(2)).losses
    torch.testing.assert_close(learner.outer_loss(state, episodes).losses.double(), expected, rtol=0.1, atol=0.1)
    assert flat(learner, state, episodes).isfinite().all()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_what_an_inner_step_keeps(interpreted: list[GraphModule], precision: Any) -> None:
    """Results of convolutions, in their own precision, and small things; with `checkpoint` its weights alone.

    What is kept is computed once: of nine units of convolution, the first derivative has three, the second six. Alone,
    the second derivative computes two of the three again.
    """
    learner = gs.maml(deep(), steps=1).to("cpu", precision, compiled=True)
    state, episodes = learner.init(), images(0)
    learner.outer_loss(state, episodes).loss.backward()
    gs.meta_step(learner, state, gs.optimiser(state, 1e-3), episodes, checkpoint=True)
    first, second, _, _, _, alone = interpreted
    layers = sum(isinstance(layer, nn.Conv2d) for layer in deep())
    units = [len(convolutions_of(one)) for one in (first, second, alone)]
    assert units == [3 * layers - 1, 6 * layers - 4, 8 * layers - 5]  # less in the first layer: images are constants
    kept = [node for node in first.graph.output_node().args[0][1:] if node.op != "placeholder"]
    sizes = {node: node.meta["val"].numel() * node.meta["val"].element_size() for node in kept}
    results = [node.meta["val"] for node in convolutions_of(first)]
    assert sum(sizes.values()) < 2 * sum(each.numel() * each.element_size() for each in results)


@pytest.mark.usefixtures("interpreted")
def test_a_loss_that_looks_at_values_is_an_error() -> None:
    learner = gs.maml(deep(), steps=1, loss=lambda logits, y: logits.sum() if bool(y[0] > 3) else logits.mean())
    with pytest.raises(gs.UserError):
        learner.to("cpu", compiled=True).outer_loss(learner.init(), images(0))


@pytest.mark.usefixtures("interpreted")
def test_a_program_serves_all_epochs_and_weights() -> None:
    learner = gs.maml_plus_plus(deep(), steps=2).to("cpu", compiled=True)
    state = learner.init()
    for epoch in (0, 1, 3):
        learner.at(epoch).outer_loss(state, images(epoch)).loss.backward()
    assert len(traced.PROGRAMS[learner.module]) == 2


def test_operands_of_convolutions_are_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler plans for images and filters that a convolution and its gradients take: one copy of each."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import ComputedBuffer

    planned: list[Any] = []

    def plan(self: GraphLowering) -> None:
        planned.extend(buffer for buffer in self.buffers if isinstance(buffer, ComputedBuffer))
        raise KeyboardInterrupt  # before anything is compiled

    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        x, w = laid_out(F.leaky_relu(x).bfloat16()), laid_out(w.bfloat16())
        y = operators.conv(x, w, *maps)
        return [y, operators.images_gradient(y, x, w, *maps), operators.filters_gradient(y, x, w, *maps)]

    maps = TaskMaps([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    module = traced.traced(step, [torch.rand(2, 3, 4, 8, 8), torch.rand(2, 4, 4, 3, 3)])
    monkeypatch.setattr(GraphLowering, "codegen", plan)
    with pytest.raises(KeyboardInterrupt):
        traced.compiled(module, "a trial")
    assert len(planned) == 2, planned


def test_channels_of_zeros_change_nothing() -> None:
    x, w = torch.rand(2, 3, 3, 6, 6), torch.rand(2, 4, 3, 3, 3)
    maps = TaskMaps([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    padded = _whole_eights(x), _whole_eights(w)
    assert [value.shape[2] for value in padded] == [8, 8] and _whole_eights(padded[0]) is padded[0]
    torch.testing.assert_close(conv(*padded, None, maps), conv(x, w, None, maps))


@pytest.mark.parametrize("sharing", [gs.GradientSharing(), gs.GradientSharing("tensor")])
def test_a_rule_sees_one_vector_where_it_may(sharing: gs.GradientSharing) -> None:
    learner = gs.meta_sgd(deep(), steps=2, sharing=sharing).to("cpu", compiled=True)
    network, state = learner.network, learner.init()
    names = {"weights"} if sharing.any_layout else set(learner.adapted)
    assert set(network.start(state.params)) == names
    ghat = network.pack(state.memory)["sharing"]["ghat"]
    assert set(ghat) == names
    values = {name: torch.rand(2, *state.params[name].shape) for name in learner.adapted}
    torch.testing.assert_close(network.unpack(network.pack({"ghat": values}))["ghat"], values, rtol=0, atol=0)


@pytest.mark.usefixtures("interpreted")
def test_fused_programs_of_a_rule_give_the_same() -> None:
    pytest.importorskip("triton", reason="the programs are written in Triton, which is not installed")
    episodes, found = images(0), []
    for fused in (False, True):
        learner = gs.maml(deep().float(), steps=2, sharing=gs.GradientSharing()).to("cpu", compiled=True)
        if fused:
            vars(learner.network)["_kinds"] = {(torch.float32, "cuda")}
        state = randomised(learner.init())
        for _ in range(2):  # the rule is looked at in the first
            gradient = flat(learner, state, episodes.to("cpu", torch.float32))
        found.append(gradient)
    assert (type(learner._rule().links[0]).__name__, len(found)) == ("Fused", 2)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_each_number_of_streams_has_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    convolution._streams.cache_clear()
    assert [len(convolution._streams(torch.device("cuda", 0), count)) for count in (2, 4)] == [2, 4]
    convolution._streams.cache_clear()


def test_tf32_needs_a_gpu() -> None:
    with pytest.raises(gs.UserError, match="NVIDIA"):
        gs.maml(deep()).to("cpu", "tf32")


@pytest.mark.usefixtures("interpreted")
def test_the_share_of_operations_in_programs() -> None:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(16, 16), nn.Linear(9, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.fft.rfft(self.body(x.flatten(1)[:, :16])).real)

    episodes = images(0)
    assert isinstance(episodes.support_x, Tensor)
    found = [
        gs.maml(model, steps=1).to("cpu", compiled=True).programs_share(episodes.support_x, episodes.support_y)
        for model in (deep(), Fourier())
    ]
    assert found[0] == "100% of its operations"
    assert found[1] is not None and "all but" in found[1] and "fft" in found[1] and not found[1].startswith("100%")
    assert gs.maml(deep()).programs_share(episodes.support_x, episodes.support_y) is None
