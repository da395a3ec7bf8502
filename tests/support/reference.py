"""The method by a plain loop: tasks one at a time, ordinary layers, autograd twice. Slow, and easy to read."""

# The paper's symbols are the names here.

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

Weights = dict[str, Tensor]
Carry = dict[str, tuple[Tensor, Tensor]]  # of one task: the momentum of each tensor, or its two moments


class Method(NamedTuple):
    """What an algorithm is, as the paper and DESIGN.md say it."""

    steps: int  # K
    adapted: tuple[str, ...]  # names of the weights that the inner loop moves
    rate: float = 0.1  # alpha
    rates: str = "constant"  # "constant"; or learned, one per "element" (Meta-SGD) or "tensor and step" (MAML++)
    first: str = "none"  # first link: none, share, agree, gate, batch, memory, add, mean, turn or bank
    left_out: str = ""  # the first or the last step, which takes the task's own gradient
    body_only: bool = False  # whether the head takes its own gradient
    norm: str = "global"  # scope of the norm in eq. 1
    first_order: bool = False
    step_weights: tuple[float, ...] | None = None  # of the query loss after each step; None: the last alone
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    inner: str = "none"  # inner optimiser: none, momentum (0.9), or adam (eps 1e-3)
    special: str = "none"  # learned preconditioning: none, curvature, mask or alfa
    head: tuple[str, ...] = ()  # the weight and the bias of a head that does not start at learned values
    start: str = "learned"  # of the head: learned, zero, or prototypes (then it is not shared)
    outer: str = "gradient"  # or reptile

    @property
    def shared(self) -> tuple[str, ...]:
        own_head = self.body_only or self.start == "prototypes"
        return tuple(n for n in self.adapted if not own_head or n not in self.head)


class Outer(NamedTuple):
    loss: Tensor
    accuracy: Tensor | None  # [T]; None where targets are not classes
    ghat: Weights  # {name: [K, *shape]}
    rounding: set[str]  # names whose summed gradient was nothing but rounding at some step, so that it has no direction


def outer_loss(model: nn.Module, state: Any, episodes: Any, method: Method) -> Outer:
    """Algorithm 1, up to the outer update: mean over tasks t of L_test[t](theta[t, K]), and the new memory."""
    net, T, ghats, total, rounding = copy.deepcopy(model).train(), len(episodes.support_x), [], torch.zeros(()), set()
    theta = [start(net, state, episodes.support_x[t], episodes.support_y[t], method) for t in range(T)]
    weights = method.step_weights or (0.0,) * (method.steps - 1) + (1.0,)
    carries: list[Carry] = [{} for _ in range(T)]
    with double_backward():
        for k in range(method.steps):
            G = [
                gradient(net, state, theta[t], k, episodes.support_x[t], episodes.support_y[t], method)
                for t in range(T)
            ]
            D, ghat = shared_directions(G, k, state, method)
            theta = [moved(theta[t], D[t], k, state, method, carries[t]) for t in range(T)]
            ghats.append(ghat)
            rounding |= nothing_but_rounding(G)
            if weights[k]:
                logits = [forward(net, state, theta[t], k, episodes.query_x[t]) for t in range(T)]
                losses = [method.loss(logits[t], episodes.query_y[t]) for t in range(T)]
                total = total + weights[k] * sum(losses) / T
        if method.steps == 0:
            logits = [forward(net, state, theta[t], 0, episodes.query_x[t]) for t in range(T)]
            total = sum(method.loss(logits[t], episodes.query_y[t]) for t in range(T)) / T
    stored = {n: torch.stack([g[n].detach() for g in ghats]) for n in method.shared if ghats}
    if method.outer == "reptile":
        total = total.detach() + reptile(state, theta)
    return Outer(total, accuracy(logits, episodes.query_y), stored, rounding)


def start(net: nn.Module, state: Any, x: Tensor, y: Tensor, method: Method) -> Weights:
    """A task's weights before the first step."""
    theta = {name: state.params[name] for name in method.adapted if name in state.params}
    if method.start == "zero":
        theta |= {name: torch.zeros_like(theta[name], requires_grad=True) for name in method.head}
    if method.start == "prototypes":
        seen: list[Tensor] = []
        layer = net.get_submodule(method.head[0].rpartition(".")[0])
        hook = layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
        functional_call(net, {**state.params, **theta}, (x,))
        hook.remove()
        p = [seen[0][y == c].mean(0) for c in range(int(y.max()) + 1)]
        weight, bias = torch.stack([2 * own for own in p]), torch.stack([-own @ own for own in p])
        theta = {n: w.clone() for n, w in theta.items()}  # so that gradients of the body are at a fixed head
        theta |= dict(zip(method.head, (weight, bias), strict=True))
    return theta


def reptile(state: Any, theta: list[Weights]) -> Tensor:
    """Zero, with the mean over tasks of theta - theta[t] as its gradient: that of half the squared distance."""
    far = [(state.params[n] - w.detach()).pow(2).sum() / 2 for own in theta for n, w in own.items()]
    half = sum(far) / len(theta)
    return half - half.detach()


def adapt(
    model: nn.Module, state: Any, x: Tensor, y: Tensor, query_x: Tensor, method: Method
) -> tuple[Weights, Tensor]:
    """Algorithm 2 for one task: its weights after K steps, and its logits."""
    net = copy.deepcopy(model).train()
    carry: Carry = {}
    with double_backward():
        theta = start(net, state, x, y, method)
        for k in range(method.steps):
            G = gradient(net, state, theta, k, x, y, method)
            theta = moved(theta, lone_direction(G, k, state, method), k, state, method, carry)
        return theta, forward(net, state, theta, method.steps - 1, query_x)


def accuracy(logits: list[Tensor], targets: Tensor | list[Tensor]) -> Tensor | None:
    if targets[0].is_floating_point():
        return None
    return torch.stack([(row.argmax(-1) == y).double().mean() for row, y in zip(logits, targets, strict=True)])


def nothing_but_rounding(G: list[Weights]) -> set[str]:
    """Such as a convolution's bias under batch norm: its gradient is zero, and in floating point nearly so."""
    lengths = {n: sum(g[n] for g in G).norm().item() for n in G[0]}
    return {n for n, length in lengths.items() if 0 < length < 1e-12 * max(lengths.values())}


@contextmanager
def double_backward() -> Iterator[None]:
    """PyTorch's fused attention has no second derivative, and its fused weight norm a wrong one; plain forms are right.

    (`torch.autograd.gradgradcheck` fails on torch._weight_norm, without any vmap: it takes the norm for a constant.)
    """
    with sdpa_kernel(SDPBackend.MATH), mock.patch.object(torch, "_weight_norm", plain_weight_norm):
        yield


def plain_weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    others = [d for d in range(v.dim()) if d != dim]
    return v * (g / v.pow(2).sum(others, keepdim=True).sqrt())


def forward(net: nn.Module, state: Any, theta: Weights, k: int, x: Tensor) -> Tensor:
    per_step = {name: value[k] for name, value in state.learned.get("per_step", {}).items()}
    return functional_call(net, {**state.params, **per_step, **theta}, (x,))


def gradient(net: nn.Module, state: Any, theta: Weights, k: int, x: Tensor, y: Tensor, method: Method) -> Weights:
    loss = method.loss(forward(net, state, theta, k, x), y)
    grads = torch.autograd.grad(loss, list(theta.values()), create_graph=True, materialize_grads=True)
    return {n: g.detach() if method.first_order else g for n, g in zip(theta, grads, strict=True)}


def shared_directions(G: list[Weights], k: int, state: Any, method: Method) -> tuple[list[Weights], Weights]:
    """Equations 1-4 at step k; DESIGN.md's controls leave one of their parts out."""
    if method.shared != method.adapted:
        D, ghat = shared_directions(
            [{n: own[n] for n in method.shared} for own in G], k, state, method._replace(adapted=method.shared)
        )
        return [{**G[t], **D[t]} for t in range(len(G))], ghat
    if method.left_out:
        D, ghat = shared_directions(G, k, state, method._replace(left_out=""))
        return (G if k == left_out(method) else D), ghat
    names = method.adapted
    s = {n: sum(G[t][n] for t in range(len(G))) for n in names}
    g = {n: unit(s[n], list(s.values()) if method.norm == "global" else [s[n]]) for n in names}  # eq. 1
    if method.first == "none":
        return G, g
    if method.first == "gate":
        return [{n: (1 - gate(state, k, n)) * G[t][n] for n in names} for t in range(len(G))], g
    if method.first == "mean":
        g = {n: s[n] / len(G) for n in names}
    if method.first == "bank":
        return [retrieved(G[t], k, state) for t in range(len(G))], g
    memory = state.memory.get("sharing", {})
    seen = bool(memory.get("seen", False))
    ghat = g  # eq. 2
    if seen and method.first != "batch":
        learns_m = method.first != "memory"
        m = torch.sigmoid(state.learned["sharing"]["m"][k]) if learns_m else 0.5  # no m to learn: m = 0
        ghat = {n: m * g[n] + (1 - m) * memory["ghat"][n][k].detach() for n in names}  # eq. 3
    if method.first == "memory":  # earlier tasks only
        if not seen:
            return G, ghat
        before = memory["ghat"]
        ghat, before = {n: before[n][k] for n in names}, ghat
        return [mixed(G[t], ghat, k, state, method) for t in range(len(G))], before
    return [mixed(G[t], ghat, k, state, method) for t in range(len(G))], ghat


def lone_direction(G: Weights, k: int, state: Any, method: Method) -> Weights:
    """Equation 4 with the stored memory; before any training step the gradient itself."""
    if method.first == "none":
        return G
    if method.shared != method.adapted:
        body = {n: G[n] for n in method.shared}
        return {**G, **lone_direction(body, k, state, method._replace(adapted=method.shared))}
    if method.left_out and k == left_out(method):
        return G
    if method.first == "gate":
        return {n: (1 - gate(state, k, n)) * G[n] for n in G}
    if method.first == "bank":
        return retrieved(G, k, state)
    memory = state.memory.get("sharing", {})
    if not bool(memory["seen"]):
        return G
    return mixed(G, {n: memory["ghat"][n][k] for n in G}, k, state, method)


def left_out(method: Method) -> int:
    return 0 if method.left_out == "first" else method.steps - 1


def gate(state: Any, k: int, n: str) -> Tensor:
    """sig(lambda) of a step, or of a step and a tensor."""
    learned = state.learned["sharing"]
    return torch.sigmoid(learned["gates"][n][k] if "gates" in learned else learned["lam"][k])


def mixed(G: Weights, ghat: Weights, k: int, state: Any, method: Method) -> Weights:
    """Equation 4, or another way to put a task's gradient and the shared vector together."""
    if method.first == "agree":
        lams = {n: own_gate(G, n, k, state, method) for n in G}
        return {n: lams[n] * ghat[n] + (1 - lams[n]) * G[n] for n in G}
    if method.first == "add":
        return {n: G[n] + state.learned["sharing"]["s"][k] * ghat[n] for n in G}
    if method.first == "turn":
        scope = {n: list(G) if method.norm == "global" else [n] for n in G}
        lam, keep = gate(state, k, ""), 1 - torch.sigmoid(state.learned["sharing"]["gate"][k])
        between = {n: (1 - lam) * unit(G[n], [G[o] for o in scope[n]]) + lam * ghat[n] for n in G}
        length = {n: sum((unit(G[o], [G[i] for i in scope[n]]) * G[o]).sum() for o in scope[n]) for n in G}
        return {n: keep * length[n] * unit(between[n], [between[o] for o in scope[n]]) for n in G}
    return {n: gate(state, k, n) * ghat[n] + (1 - gate(state, k, n)) * G[n] for n in G}


def retrieved(G: Weights, k: int, state: Any) -> Weights:
    """The stored sums, weighted by their cosines to the gradient, beside the gradient."""
    learned, memory = state.learned["sharing"], state.memory["sharing"]
    slots = [b for b in range(len(memory["filled"])) if memory["filled"][b]]
    if not slots:
        return G
    own = torch.cat([G[n].flatten() for n in G])
    bank = [torch.cat([memory["bank"][n][k][b].flatten() for n in G]) for b in slots]
    cosines = torch.stack([own @ old / own.norm() if own.norm() > 0 else own.sum() * 0 for old in bank])
    w = torch.softmax(learned["c"][k] * cosines * 10, 0)
    s = learned["s"][k]
    return {n: G[n] + s * sum(w[i] * memory["bank"][n][k][b] for i, b in enumerate(slots)) for n in G}


def next_memory(state: Any, stored: Weights, method: Method) -> dict[str, Any]:
    """The memory of sharing after a meta-iteration that stored these vectors, [K, *shape]."""
    if method.first != "bank":
        return {"ghat": stored, "seen": True}
    bank, filled = state.memory["sharing"]["bank"], state.memory["sharing"]["filled"]
    newest = {n: torch.cat([stored[n].unsqueeze(1), bank[n][:, :-1]], 1) for n in stored}
    return {"bank": newest, "filled": torch.cat([filled.new_ones(1), filled[:-1]])}


def own_gate(G: Weights, n: str, k: int, state: Any, method: Method) -> Tensor:
    """Conditioned sharing: sigmoid(lambda + c a), with a the cosine to the memory in tenths, of tensor n or of all."""
    learned, memory = state.learned["sharing"], state.memory.get("sharing", {})
    a = torch.zeros(())
    if bool(memory.get("seen", False)):
        scope = method.adapted if method.norm == "global" else (n,)
        own = torch.cat([G[name].flatten() for name in scope])
        mean = torch.cat([memory["ghat"][name][k].detach().flatten() for name in scope])
        if own.norm() > 0 and mean.norm() > 0:
            a = 10 * (own @ mean) / (own.norm() * mean.norm())
    return torch.sigmoid(learned["lam"][k] + learned["agreement"][k] * a)


def unit(s: Tensor, scope: list[Tensor]) -> Tensor:
    square = sum(part.pow(2).sum() for part in scope)
    return s / square.sqrt() if square > 0 else s * 0


def moved(theta: Weights, D: Weights, k: int, state: Any, method: Method, carry: Carry) -> Weights:
    D = {name: optimised(name, D[name], k, method, carry) for name in theta}
    if method.special == "alfa":
        return alfa(theta, D, k, state.learned["alfa"])
    D = {name: preconditioned(name, D[name], state, method) for name in theta}

    def rate(name: str) -> Tensor | float:
        if method.rates == "constant":
            return method.rate
        learned = state.learned["rates"][name]
        return learned[k] if method.rates == "tensor and step" else learned

    return {name: theta[name] - rate(name) * D[name] for name in theta}


def optimised(name: str, D: Tensor, k: int, method: Method, carry: Carry) -> Tensor:
    """Momentum or Adam as torch.optim has them, for one tensor of one task."""
    m, v = carry.get(name, (torch.zeros_like(D), torch.zeros_like(D)))
    if method.inner == "none":
        return D
    if method.inner == "momentum":
        carry[name] = 0.9 * m + D, v
        return carry[name][0]
    m, v = 0.9 * m + 0.1 * D, 0.999 * v + 0.001 * D * D
    carry[name] = m, v
    there = v != 0
    root = torch.where(there, v / (1 - 0.999 ** (k + 1)), 1).sqrt()
    return torch.where(there, m / (1 - 0.9 ** (k + 1)) / (root + 1e-3), 0)


def preconditioned(name: str, D: Tensor, state: Any, method: Method) -> Tensor:
    if method.special == "mask":
        return torch.clamp(state.learned["mask"][name], min=0) * D
    if method.special == "none" or D.dim() < 2:
        return D
    M = state.learned["curvature"][name]
    if D.dim() == 2:
        return M["out"] @ D @ M["in"].T
    by_filter = torch.einsum("oip,qp->oiq", D.flatten(2), M["filter"])
    by_input = torch.einsum("oiq,ji->ojq", by_filter, M["in"])
    return torch.einsum("ojq,po->pjq", by_input, M["out"]).view(D.shape)


def alfa(theta: Weights, D: Weights, k: int, learned: Any) -> Weights:
    """w <- (1 - beta) w - alpha D, with alpha and beta from the means of w and D."""
    names, net = sorted(theta), learned["network"]
    tau = torch.stack([theta[n].mean() for n in names] + [D[n].mean() for n in names])
    out = net["W2"] @ torch.clamp(net["W1"] @ tau + net["c1"], min=0) + net["c2"]
    alpha = {n: out[i] * learned["a"][n][k] for i, n in enumerate(names)}
    beta = {n: out[len(names) + i] * learned["b"][n][k] for i, n in enumerate(names)}
    return {n: (1 - beta[n]) * theta[n] - alpha[n] * D[n] for n in theta}
