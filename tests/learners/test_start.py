"""Pretrained weights to begin with: files of two kinds, what must fit, the head that may differ, and runs from them."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.learners.start import started
from tests.support.runs import TINY

ONE: dict[str, Any] = TINY | {"epochs": 1, "iterations": 1, "display": False}


def conv4(ways: int = 3) -> gs.Conv4:
    return gs.Conv4(ways, 3, (1, 16, 16))


@pytest.fixture
def weights() -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {name: torch.randn_like(weight) for name, weight in conv4().state_dict().items()}


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def saved(path: Path, weights: dict[str, Tensor]) -> Path:
    safetensors.torch.save_file(weights, path)
    return path


@pytest.mark.parametrize("kind", ["safetensors", "torch", "torch, older", "dict", "with running statistics"])
@pytest.mark.parametrize("algorithm", [gs.maml, gs.maml_plus_plus], ids=["maml", "maml_plus_plus"])
def test_a_state_begins_with_the_weights(
    kind: str, algorithm: Callable[..., gs.Learner], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    start: Any = tmp_path / "weights"
    if kind == "safetensors":
        saved(start, weights)
    elif kind == "dict":
        start = weights
    elif kind == "with running statistics":
        model = conv4()
        model.norms[0] = nn.BatchNorm2d(3)
        start = dict(model.state_dict()) | weights
        assert "norms.0.num_batches_tracked" in start
    else:
        torch.save(weights, start, _use_new_zipfile_serialization=kind == "torch")
    model = conv4()
    state = started(algorithm(model, steps=2), start, seed=0).init()
    for name, weight in weights.items():
        if name in state.params:
            assert torch.equal(state.params[name], weight), name
        else:
            assert torch.equal(state.learned["per_step"][name], weight.expand(2, *weight.shape)), name
    assert not torch.equal(model.head.weight, weights["head.weight"])  # the user's model is as it was


@pytest.mark.parametrize("case", ["other ways", "no head", "no bias in the file"])
def test_a_head_that_differs_begins_as_the_seed_says(case: str, weights: dict[str, Tensor]) -> None:
    learner = gs.maml(conv4(5 if case == "other ways" else 3))
    if case == "no head":
        weights = {name: weight for name, weight in weights.items() if "head" not in name}
    if case == "no bias in the file":
        del weights["head.bias"]
    said = {"other ways": r"where head.weight is \[3, 3\], not \[5, 3\]", "no head": "no head"}
    with pytest.warns(UserWarning, match=rf"^head.weight, head.bias begin as without start.*{said.get(case, '')}"):
        state = started(learner, weights, seed=4).init()
    as_usual = learner.init(4)
    for name, weight in state.params.items():
        assert torch.equal(weight, (as_usual.params if "head" in name else weights)[name]), name
    started(learner, weights, seed=4, quiet=True)


def test_the_weights_of_a_model_of_ours(tmp_path: Path) -> None:
    learner = gs.maml(conv4(), sharing=gs.GradientSharing())
    state = learner.init(3)
    folder = gs.save_pretrained(tmp_path / "model", learner, state)
    begun = started(gs.meta_sgd(conv4()), folder / "model.safetensors", seed=0).init()
    assert all(torch.equal(begun.params[name], weight) for name, weight in state.params.items())


class Runs:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("convs.1.bias"), r"start does not fit Conv4: Missing key.*\"convs.1.bias\"\.$"),
        (lambda w: w.update(fc=torch.ones(1)), r"Unexpected key.*\"fc\"\.$"),
        (
            lambda w: w.update({"convs.0.weight": torch.ones(2)}),
            r"size mismatch for convs.0.weight.*\[2\].*\[3, 1, 3, 3\]\)\.$",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: Any, message: str, weights: dict[str, Tensor]) -> None:
    change(weights)
    with pytest.raises(gs.UserError, match=message):
        started(gs.maml(conv4()), weights)


def test_files_that_are_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    contents: list[tuple[Any, str]] = [
        (pickle.dumps(Runs(), 2), "is not a file of weights"),
        (b"12345678{not json", "is not a file of weights"),
        (b"", "is not a file of weights"),
        ({"state_dict": conv4().state_dict(), "epoch": 3}, "holds state_dict, epoch instead of weights"),
        ({"convs.0.weight": 3}, "holds convs.0.weight instead of weights"),
        ([torch.ones(1)], "holds a list instead of weights"),
        (Runs(), "FILE\\): it is damaged, or holds more than tensors$"),  # not PyTorch's advice to run its code
        (conv4(), "holds more than tensors$"),
    ]
    for content, message in contents:
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        with pytest.raises(gs.UserError, match=message):
            started(gs.maml(conv4()), path)
    with pytest.raises(gs.UserError, match="start holds a instead of weights"):
        started(gs.maml(conv4()), {"a": 1})  # type: ignore[dict-item]
    os.mkfifo(tmp_path / "pipe")
    for missing in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(gs.UserError, match="cannot be read"):
            started(gs.maml(conv4()), missing)
    assert not Path("executed").exists()


class Constants(nn.Module):
    """A weight that is not trained, and a buffer: a run does not record them."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.first, self.head = nn.Linear(256, 2), nn.Linear(2, 3)
        self.first.bias.requires_grad_(False).zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x.flatten(1)) * self.scale)


def test_what_is_not_trained_must_be_the_models_own() -> None:
    learner = gs.maml(Constants())
    begun = Constants()
    assert torch.equal(started(learner, begun.state_dict()).init().params["first.weight"], begun.first.weight)
    with pytest.raises(gs.UserError, match="start has other values of scale than Constants"):
        started(learner, Constants(3.0).state_dict())
    begun.first.bias += 1
    with pytest.raises(gs.UserError, match=r"first\.bias"):
        started(learner, begun.state_dict())


def test_a_weight_with_two_names() -> None:
    class Tied(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
            self[1].weight = self[0].weight

    begun = Tied()
    assert torch.equal(started(gs.maml(Tied()), begun.state_dict()).init().params["0.weight"], begun[0].weight)


def test_a_run_begins_there_and_is_resumed_without_the_file(
    weights: dict[str, Tensor], dataset: gs.Dataset, tmp_path: Path
) -> None:
    path, learner = saved(tmp_path / "weights", weights), gs.maml(conv4(), steps=1)
    still: Any = {"optimiser": lambda leaves: torch.optim.SGD(leaves.values(), lr=0.0)}
    run = gs.train(learner, dataset, tmp_path / "run", start=path, **ONE, **still)
    assert all(torch.equal(run.state.params[name], weight) for name, weight in weights.items())
    twice = gs.train(learner, dataset, tmp_path / "twice", start=path, **ONE | {"epochs": 2})
    gs.train(learner, dataset, tmp_path / "halves", start=path, **ONE)
    path.unlink()
    resumed = gs.train(learner, dataset, tmp_path / "halves", resume=True, start=path, **ONE | {"epochs": 2})
    assert all(torch.equal(resumed.state.params[name], weight) for name, weight in twice.state.params.items())
    with pytest.raises(gs.UserError, match="cannot be read"):
        gs.train(learner, dataset, tmp_path / "new", start=path, **ONE)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.fill_(torch.nan),
        lambda weight: weight.to_sparse(),
        lambda weight: weight.to("meta"),
        lambda weight: weight * 1j,
    ],
    ids=["not a number", "sparse", "meta", "complex"],
)
def test_weights_that_are_no_plain_numbers_are_refused(
    change: Callable[[Tensor], Tensor], weights: dict[str, Tensor]
) -> None:
    weights["head.bias"] = change(weights["head.bias"])
    with pytest.raises(gs.UserError, match=r"not real, dense, finite tensors: head\.bias"):
        started(gs.maml(conv4()), weights)
