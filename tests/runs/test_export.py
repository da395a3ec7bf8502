"""Models to share: the same predictions to the last bit, nothing executed, and nothing accepted that does not fit."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gradshare as gs
from gradshare import files
from gradshare.files import add_checksum, sha256, verify_checksum
from gradshare.runs import export
from gradshare.runs.build import run
from gradshare.runs.config import Method
from gradshare.runs.display import Silent
from tests.support.runs import TINY, Unpickled, flip, learner, rewrite


def trained(folder: Path, blobs: Path, method: Method = "maml", arm: str = "shared") -> Path:
    small = {"filters": 3, "steps": 2, "threads": 1, "device": "cpu", **TINY, "epochs": 2, "iterations": 1}
    run(gs.RunConfig(dataset=str(blobs), method=method, arm=arm, **small), folder, False, Silent())
    return folder


def predictions(learner: gs.Learner, state: gs.MetaState, dataset: gs.Dataset) -> torch.Tensor:
    episodes = dataset.sample("test", gs.Shape(3, 1, 3), 4, (7,))
    with torch.no_grad():
        return learner.predict(learner.adapt(state, episodes.support_x, episodes.support_y), episodes.query_x)


@pytest.fixture(scope="module")
def example(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its model."""
    folder = tmp_path_factory.mktemp("pretrained")
    gs.load_run(trained(folder / "run", blobs)).save_pretrained(folder / "model")
    return folder


@pytest.fixture
def model(example: Path, tmp_path: Path) -> Path:
    return shutil.copytree(example / "model", tmp_path / "model")


@pytest.mark.parametrize(
    ("method", "arm"),
    [
        ("mamlpp", "shared"),
        ("metasgd", "memory-only"),
        ("anil", "original"),
        ("maml", "conditioned"),
        ("alfa", "shared"),
        ("metacurvature", "original"),
        ("protomaml", "shared"),
        ("reptile", "original"),
    ],
)
def test_predictions_are_the_same_to_the_bit(
    blobs: Path, dataset: gs.Dataset, tmp_path: Path, method: Method, arm: str
) -> None:
    saved = gs.load_run(trained(tmp_path / "run", blobs, method, arm))
    for epoch in (1, 2):
        folder = saved.save_pretrained(tmp_path / f"model-{epoch}", epoch)
        found, state = gs.from_pretrained(folder)
        expected = predictions(saved.learner(), saved.state(epoch), dataset)
        assert torch.equal(predictions(found, state, dataset), expected)
        assert all(torch.equal(tensor, saved.state(epoch).tensors()[name]) for name, tensor in state.tensors().items())
    assert not torch.equal(predictions(*gs.from_pretrained(tmp_path / "model-1"), dataset), expected)
    assert gs.meta_step(found, state, gs.optimiser(state, 1e-3), dataset.sample("train", gs.Shape(3, 1, 3), 2, (0,)))


def test_what_is_in_the_folder(example: Path) -> None:
    assert sorted(path.name for path in (example / "model").iterdir()) == [
        "README.md", "config.json", "model.safetensors"
    ]  # fmt: skip
    config = json.loads((example / "model" / "config.json").read_text())
    assert config["library_name"] == "gradshare" and config["version"] == 1 and config["model"]["image"] == [1, 16, 16]
    assert config["model"]["options"]["dataset"] == "blobs" and str(example.parent) not in json.dumps(config)
    assert "threads" not in config["model"]["options"] and "device" not in config["model"]["options"]
    assert config["model_sha256"] == sha256((example / "model" / "model.safetensors").read_bytes())
    assert set(load_file(example / "model" / "model.safetensors")) == set(
        gs.load_run(example / "run").state().tensors()
    )


def test_the_model_card_has_data_accuracy_and_interval(example: Path) -> None:
    yaml = pytest.importorskip("yaml")
    card = (example / "model" / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert (
        fields["library_name"] == "gradshare" and fields["license"] == "unknown" and "meta-learning" in fields["tags"]
    )
    assert fields["datasets"] == ["blobs"] and fields["metrics"] == ["accuracy"]
    summary = json.loads((example / "run" / "summary.json").read_text())
    best, line = summary["test"]["best"], gs.load_run(example / "run").metrics[summary["best_epoch"] - 1]
    validation, test = fields["model-index"][0]["results"]
    assert test["metrics"][0]["value"] == best["accuracy"] and f"± {best['interval']:.4f}" in test["metrics"][0]["name"]
    assert validation["metrics"][0]["value"] == line["val_accuracy"] and test["dataset"]["split"] == "test"
    assert f"| test | accuracy | {best['accuracy']:.2%} ± {best['interval']:.2%} | 6 |" in body
    assert f"| validation | accuracy | {line['val_accuracy']:.2%} ± {line['val_interval']:.2%} | 6 |" in body
    assert "Data: `blobs`." in body and str(example.parent) not in card
    assert 'gs.from_pretrained("FOLDER")' in body and "3-way 1-shot" in body and "| inner\\_lr | `0.1` |" in body


def test_a_model_of_your_own(dataset: gs.Dataset, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 3))
    own = gs.meta_sgd(module, steps=2, sharing=gs.GradientSharing())
    saved = gs.train(own, dataset, tmp_path / "run", **TINY | {"epochs": 1})
    result = gs.evaluate(own, saved.state, dataset, shape=gs.Shape(3, 1, 3), tasks=5)
    gs.save_pretrained(tmp_path / "model", own, saved.state, "my | `data`\n# x", result, "mit")
    with pytest.raises(gs.UserError, match="author's own"):
        gs.from_pretrained(tmp_path / "model")
    found, state = gs.from_pretrained(tmp_path / "model", own)
    assert found is own and torch.equal(predictions(own, state, dataset), predictions(own, saved.state, dataset))
    card = (tmp_path / "model" / "README.md").read_text()
    assert 'license: "mit"' in card and f"{result.accuracy:.2%} ± {result.interval:.2%} | 5 |" in card
    assert 'gs.from_pretrained("FOLDER", learner)' in card and "Data: `my ¦ 'data' # x`." in card
    other = gs.meta_sgd(module, steps=3, sharing=gs.GradientSharing())
    with pytest.raises(gs.UserError, match="was trained with another learner: algorithm meta_sgd, not maml"):
        gs.from_pretrained(tmp_path / "model", gs.maml(gs.Conv4(3, 48, (1, 16, 16))))
    with pytest.raises(gs.UserError, match="was trained with another learner: steps 2, not 3"):
        gs.from_pretrained(tmp_path / "model", other)
    with pytest.raises(gs.UserError, match=r"does not fit the learner: learned/sharing/lam is float32 \[2\], and the"):
        gs.save_pretrained(tmp_path / "again", other, saved.state)
    assert not (tmp_path / "again").exists()
    exported = gs.load_run(tmp_path / "run").save_pretrained(tmp_path / "by-run")
    assert torch.equal(predictions(*gs.from_pretrained(exported, own), dataset), predictions(own, saved.state, dataset))


def test_regression_has_a_loss(tmp_path: Path) -> None:
    own = gs.maml(nn.Linear(1, 1), steps=1, loss="mse")
    result = gs.Evaluation(torch.tensor([0.5, 1.5]), None)
    gs.save_pretrained(tmp_path / "model", own, own.init(), "lines", result)
    assert re.search(r"\| test \| loss \| 1 ± 0\.98 \| 2 \|", (tmp_path / "model" / "README.md").read_text())


def test_code_in_the_folder_is_never_run(model: Path, dataset: gs.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = predictions(*gs.from_pretrained(model), dataset)
    monkeypatch.chdir(model)
    for name in ("modeling.py", "__init__.py", "gradshare.py", "torch.py", "config.py", "hubconf.py"):
        (model / name).write_text("import os; os.mkdir('code-ran')")
    for name in ("pytorch_model.bin", "model.pkl", "model.pt", "optimizer.pt"):
        (model / name).write_bytes(pickle.dumps(Unpickled()))
    assert torch.equal(predictions(*gs.from_pretrained(model), dataset), expected)
    (model / "model.safetensors").unlink()
    with pytest.raises(gs.UserError, match=r"holds no model: it has no model\.safetensors"):
        gs.from_pretrained(model)
    assert not list(model.glob("*-ran"))


def redescribe(model: Path, /, **different: Any) -> None:
    """config.json with another description of the model, and the checksum that belongs to it."""
    config = verify_checksum(json.loads((model / "config.json").read_text()))
    for name, value in different.items():
        (config["model"] if name == "image" else config["model"]["options"])[name] = value
    (model / "config.json").write_text(json.dumps(add_checksum(config)))


def reweigh(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """model.safetensors with other tensors, and the checksum that belongs to it."""
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")
    rewrite(model / "config.json", model_sha256=sha256((model / "model.safetensors").read_bytes()))


def replaced(model: Path, content: bytes) -> None:
    size = (model / "model.safetensors").stat().st_size
    content = content.ljust(size, b"\0")
    (model / "model.safetensors").write_bytes(content)
    rewrite(model / "config.json", model_sha256=sha256(content))


def huge() -> bytes:
    """A safetensors file that declares far more than it has."""
    header = json.dumps({"params/w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    return len(header).to_bytes(8, "little") + header


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a weight": (lambda m: flip(m / "model.safetensors", -3), "does not match its checksum"),
    "weights cut": (lambda m: os.truncate(m / "model.safetensors", 500), "does not match its checksum"),
    "no file": (lambda m: ((m / "model.safetensors").unlink(), (m / "model.safetensors").mkdir()), "is not a file"),
    "a pickle for weights": (lambda m: replaced(m, pickle.dumps(Unpickled())), "model.safetensors is damaged: "),
    "declared sizes": (lambda m: replaced(m, huge()), "model.safetensors is damaged: "),
    "a tensor less": (lambda m: reweigh(m, lambda t: t.pop("params/head.bias")), "params/head.bias is nothing"),
    "a tensor more": (lambda m: reweigh(m, lambda t: t.update(x=torch.ones(1))), "x is float32"),
    "another type": (
        lambda m: reweigh(m, lambda t: t.update({"params/head.bias": torch.zeros(3, dtype=torch.int32)})),
        "params/head.bias is int32",
    ),
    "no config": (lambda m: (m / "config.json").unlink(), "has no config.json"),
    "a pipe": (lambda m: ((m / "config.json").unlink(), os.mkfifo(m / "config.json")), "is not a file"),
    "no JSON": (lambda m: (m / "config.json").write_text("import os"), "config.json is damaged"),
    "another library": (lambda m: (m / "config.json").write_text('{"model_type": "bert"}'), "a model of gradshare"),
    "a changed rate": (
        lambda m: (m / "config.json").write_text((m / "config.json").read_text().replace('lr": 0.1', 'lr": 0.2')),
        "does not match its checksum",
    ),
    "no checksum": (lambda m: (m / "config.json").write_text('{"library_name": "gradshare"}'), "damaged: 'sha256'"),
    "a newer one": (lambda m: rewrite(m / "config.json", version=7), "model version 7, this one reads 1"),
    "no description": (lambda m: rewrite(m / "config.json", model=3), "can build"),
    "half a description": (lambda m: rewrite(m / "config.json", model={"image": [1, 16, 16]}), "can build: 'options'"),
    "a million steps": (lambda m: redescribe(m, steps=10**6), "does not fit the learner"),
    "ten thousand filters": (lambda m: redescribe(m, filters=10_000), "does not fit the learner"),
    "an image of any size": (lambda m: redescribe(m, image=[1, 10**9, 16]), "does not fit the learner"),
    "an image of words": (lambda m: redescribe(m, image=["a", "b", "c"]), "can build"),
    "a strange method": (lambda m: redescribe(m, method="os.system"), "method is 'os.system', not one of maml"),
    "an arm with code": (lambda m: redescribe(m, arm="os:system"), "hand over the learner"),
    "an unknown option": (lambda m: redescribe(m, auto_map="x"), "auto_map"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_was_changed_raises_an_error(model: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    change, message = BAD[kind]
    change(model)
    with pytest.raises(gs.UserError, match=message):
        gs.from_pretrained(model)
    assert not (model / "pickles-ran").exists()


def test_nothing_is_written_over(example: Path, tmp_path: Path) -> None:
    saved = gs.load_run(example / "run")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").touch()
    for name in ("thesis", "file"):
        with pytest.raises(gs.UserError, match=f"{name} exists already"):
            saved.save_pretrained(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    saved.save_pretrained(tmp_path / "link")
    assert len(list((tmp_path / "empty").iterdir())) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "link", "thesis"]


def test_a_folder_is_whole_or_not_there(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(gs.UserError, match=r"cannot write .*model: No space left on device"):
        gs.load_run(example / "run").save_pretrained(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_leave_one_whole_model(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, write, begun = gs.load_run(example / "run"), files.write_synced, []

    def slow(path: Path, content: bytes) -> None:
        write(path, content)
        if not begun:  # the first has written a part: the second is written as a whole meanwhile
            begun.append(path)
            saved.save_pretrained(tmp_path / "model")

    monkeypatch.setattr(files, "write_synced", slow)
    (tmp_path / ".model.new").mkdir()  # of one that was killed, by an earlier version
    with pytest.raises(gs.UserError, match=r"cannot write .*model: Directory not empty"):
        saved.save_pretrained(tmp_path / "model")
    assert gs.from_pretrained(tmp_path / "model")[0].steps == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.new", "model"]


def test_a_state_is_saved_wherever_its_tensors_lie(dataset: gs.Dataset, tmp_path: Path) -> None:
    """Views and transposed weights, which safetensors does not take as they are."""
    own = learner()
    state = own.init(seed=1)
    names = list(state.params)
    state.params["head.weight"] = state.params["head.weight"].detach().t().contiguous().t().requires_grad_()
    both = torch.zeros(6)
    state.params["convs.0.bias"], state.params["convs.1.bias"] = both[:3], both[:3]
    assert names == list(state.params)
    gs.save_pretrained(tmp_path / "model", own, state)
    again = gs.from_pretrained(tmp_path / "model", own)[1]
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in state.tensors().items())


def test_a_model_is_found_by_its_name(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: gs.Dataset
) -> None:
    monkeypatch.setattr(export, "CHECKOUT", tmp_path / "checkout")
    monkeypatch.setenv("GRADSHARE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    expected = predictions(*gs.from_pretrained(example / "model"), dataset)
    for shelf in ("data/models", "checkout"):
        shutil.copytree(example / "model", tmp_path / shelf / f"in-{shelf[:4]}")
        assert torch.equal(predictions(*gs.from_pretrained(f"in-{shelf[:4]}"), dataset), expected)
    with pytest.raises(gs.UserError, match=r"there is no model 'in-dat': .* did you mean in-data"):
        gs.from_pretrained("in-dat")
    (tmp_path / "in-data").mkdir()  # a path comes first
    with pytest.raises(gs.UserError, match="in-data holds no model"):
        gs.from_pretrained("in-data")


def test_the_memory_in_half_the_bytes(example: Path, tmp_path: Path, dataset: gs.Dataset) -> None:
    saved = gs.load_run(example / "run")
    saved.save_pretrained(tmp_path / "half", half_memory=True)
    learner, state = gs.from_pretrained(tmp_path / "half")
    plain = saved.best.tensors()
    for name, tensor in state.tensors().items():
        assert tensor.dtype == plain[name].dtype
        assert torch.equal(
            tensor, plain[name].bfloat16().to(tensor.dtype) if name.startswith("memory/") else plain[name]
        )
    full, half = (path.stat().st_size for path in (example / "model" / "model.safetensors",
                                                   tmp_path / "half" / "model.safetensors"))  # fmt: skip
    memory = sum(tensor.numel() for name, tensor in plain.items() if name.startswith("memory/"))
    assert 0.9 * 2 * memory < full - half < 1.1 * 2 * memory
    close = predictions(learner, state, dataset), predictions(saved.learner(), saved.best, dataset)
    assert torch.allclose(*close, atol=0.02) and not torch.equal(*close)


def test_the_card_says_the_terms_of_the_data() -> None:
    card = export.Card("mit", "cub-resize", [], []).text("name", own=False)
    assert "Data: `cub-resize`. CUB-200-2011 is for non-commercial research" in card
    assert "Data: `mine`.\n" in export.Card("mit", "mine", [], []).text("name", own=False)
