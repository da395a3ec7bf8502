"""Any module with many tasks: what is replaced, and what raises an error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradshare as gs


def episodes(dim: int = 4) -> gs.Episodes:
    x, y = torch.rand(2, 6, dim), torch.arange(3).repeat(2).expand(2, 6)
    return gs.Episodes(x, y, x, y)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.MultiheadAttention(4, 2, dropout=0.1)])
def test_dropout_layers_are_an_error_that_names_them(layer: nn.Module) -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 4))
    model.add_module("noise", layer)
    with pytest.raises(gs.UserError, match=r"'noise'.*p=0"):
        gs.maml(model)


def test_dropout_that_is_off_is_accepted() -> None:
    gs.maml(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)))
    learner = gs.maml(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval())
    part = episodes()
    assert torch.equal(learner.outer_loss(learner.init(), part).loss, learner.outer_loss(learner.init(), part).loss)


class Noisy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "functional dropout":
            x = F.dropout(x, 0.3)
        elif self.kind == "normal noise":
            x = x + torch.randn_like(x)
        elif self.kind == "new tensor":
            x = x * torch.rand(4)
        elif self.kind == "bernoulli":
            x = x * torch.bernoulli(torch.full_like(x, 0.5))
        return self.head(x)


@pytest.mark.parametrize("kind", ["functional dropout", "normal noise", "new tensor", "bernoulli"])
def test_hidden_randomness_is_an_error(kind: str) -> None:
    learner = gs.maml(Noisy(kind), steps=1)
    with pytest.raises(gs.UserError, match="random"):
        learner.outer_loss(learner.init(), episodes())


def test_alpha_dropout_is_off_by_default() -> None:
    class Alpha(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(F.alpha_dropout(input))

    learner = gs.maml(Alpha(4, 3), steps=1)
    assert learner.outer_loss(learner.init(), episodes()).loss.isfinite()


def test_operations_that_cannot_be_batched_are_named() -> None:
    class Branching(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input if input.sum() > 0 else -input)

    class Padding(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(nn.utils.rnn.pad_sequence(list(input), batch_first=True))

    for model in (Branching(4, 3), Padding(4, 3)):
        learner = gs.maml(model, steps=1)
        with pytest.raises(gs.UserError, match="many tasks at once"):
            learner.outer_loss(learner.init(), episodes())


def test_lazy_modules_are_an_error() -> None:
    with pytest.raises(gs.UserError, match="no shape yet"):
        gs.maml(nn.Sequential(nn.LazyLinear(3)))


def test_frozen_weights_stay_out_of_the_state() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    learner = gs.maml(model)
    assert set(learner.init().params) == set(learner.adapted) == {"1.weight", "1.bias"}
    assert learner.outer_loss(learner.init(), episodes()).loss.isfinite()


def test_episodes_of_the_wrong_shape_are_an_error_with_the_shapes() -> None:
    x, y = torch.rand(2, 6, 4), torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\[tasks, examples\], not \[2, 6, 4\] and \[2, 5\]"):
        gs.Episodes(x, y[:, :5], x, y)
    with pytest.raises(ValueError, match="support has 2 tasks and query 1"):
        gs.Episodes(x, y, x[:1], y[:1])


def test_instance_norm_in_training_mode_normalises_each_image_in_every_copy() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(8, 3))
    learner, x = gs.maml(model, steps=1), 3 * torch.randn(3, 5, 2, 4) + 2
    fast = learner.adapt(learner.init(), x, torch.zeros(3, 5, dtype=torch.long))
    expected = learner.predict(fast, x)
    torch.testing.assert_close(learner.predict(fast, x, norm_statistics="support"), expected)
    adapted = learner.module_for(fast, 1)
    torch.testing.assert_close(adapted(x[1]), expected[1])
    with pytest.raises(RuntimeError, match=r"Missing key.*running_mean"):  # `model` would normalise by these
        model.load_state_dict(adapted.state_dict(), strict=True)


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_in_eval_mode_normalises_by_its_running_statistics(affine: bool) -> None:
    norm = nn.InstanceNorm1d(2, affine=affine, track_running_stats=True)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(8, 3))
    model(3 * torch.randn(9, 2, 4) + 2)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    model.eval()
    learner, x = gs.maml(model, inner_lr=0.0, steps=1), torch.randn(3, 5, 2, 4)
    fast = learner.adapt(learner.init(), x, torch.zeros(3, 5, dtype=torch.long))
    torch.testing.assert_close(learner.predict(fast, x).detach(), model(x.flatten(0, 1)).detach().unflatten(0, (3, 5)))
