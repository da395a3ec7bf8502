"""Why does a head that starts at zero learn fast, and end lower? What the inner loop moves, while it trains.

    python benchmarks/zero_head.py --regime glyphs-mlp --iterations 900

Prints for each arm and look: validation accuracy; the same with the body left as it is (only the head adapts); how far
the inner loop moves the body, |w_K - w_0| / |w_0|; the gradient of the body beside that of the head at the first two
inner steps; and the length of the head's initial weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import regimes
import torch
from explained import Watched
from torch import Tensor

import gradshare as gs

ARMS = ("gate-only", "gate-only/zero-init", "gate-only/zero", "gate-only/zero-init/head4", "tensor-gates/zero-init")


def length(weights: dict[str, Tensor]) -> Tensor:
    return torch.stack([w.flatten(1).square().sum(1) for w in weights.values()]).sum(0).sqrt()


def looked_at(now: regimes.Trained, shape: gs.Shape) -> Iterator[tuple[str, float]]:
    tasks = now.source.sample("val", shape, 100, (1, 0))
    names = now.learner.adapted
    head = regimes.head_of(names)
    body = [name for name in names if name not in head]
    watched = Watched(now.learner.rule)
    learner = replace(now.learner, rule=watched)
    with torch.no_grad():
        fast = learner.adapt(now.state, tasks.support_x, tasks.support_y)
    start = {name: now.state.params[name].detach() for name in names}
    yield "accuracy", regimes.measure(now.learner, now.state, tasks)
    alone = gs.chain(now.learner.rule, regimes.Still(tuple(body)))
    yield "head alone", regimes.measure(replace(now.learner, rule=alone), now.state, tasks)
    moved = length({name: fast[name] - start[name] for name in body})
    yield "body moves", float((moved / length({name: start[name].unsqueeze(0) for name in body})).mean())
    for k in (0, 1):
        parts = [length({name: watched.seen[k][name] for name in some}).mean() for some in (body, head)]
        yield f"|G body|/|G head|, step {k + 1}", float(parts[0] / parts[1])
    if now.learner.head_start != "zero":
        yield "head's length", float(length({name: start[name].unsqueeze(0) for name in head}))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--regime", default="glyphs-mlp")
    options.add_argument("--rules", nargs="+", default=list(ARMS))
    options.add_argument("--rate", type=float, default=1.0)
    options.add_argument("--seeds", nargs="+", type=int, default=[0])
    options.add_argument("--iterations", type=int, default=900)
    options.add_argument("--looks", type=int, default=6)
    given = options.parse_args()
    torch.set_num_threads(1)
    regime = replace(regimes.KNOWN[given.regime], iterations=given.iterations, looks=given.looks)
    for rule in given.rules:
        for seed in given.seeds:
            for now in regimes.looks(regime, regimes.Arm(rule), given.rate, seed):
                found = "  ".join(f"{name} {value:.3g}" for name, value in looked_at(now, regime.shape))
                print(f"{rule}  seed {seed}  iteration {now.iteration}  {found}", flush=True)


if __name__ == "__main__":
    main()
