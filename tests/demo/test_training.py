"""Training: its schedule, its objective, and one short run from nothing to files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epd.demo.objective import AttributeHeads, contrastive_loss
from epd.demo.pictures import TrainingPairs
from epd.demo.schedule import Schedule
from epd.demo.train import train
from epd.models.checkpoint import Checkpoint


def test_one_run_writes_a_changed_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run saves other weights than a run that is one step shorter, and reports as it goes."""
    digests = []
    for num_steps in (1, 2):
        train(tmp_path / str(num_steps), num_steps, seed=0)
        digests.append(Checkpoint.open(tmp_path / str(num_steps)).weights_digest("model."))
    assert digests[0] != digests[1]
    assert "step    0  loss 4." in capsys.readouterr().out


def test_a_run_can_be_repeated(tmp_path: Path) -> None:
    """Two runs with one seed save the same bytes."""
    first, second = tmp_path / "first", tmp_path / "second"
    train(first, num_steps=1, seed=0)
    train(second, num_steps=1, seed=0)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_loss_is_low_only_when_rows_match() -> None:
    """Matching unit vectors give a small loss, shuffled ones a large one."""
    vectors = torch.eye(8)
    assert contrastive_loss(vectors, vectors) < 1e-4
    assert contrastive_loss(vectors, vectors.roll(1, dims=0)) > 10


def test_heads_reach_every_input() -> None:
    """The attribute heads' loss sends gradients to pictures, captions and rows."""
    classes = [pair.what for pair in TrainingPairs(seed=0).next_batch()[:4]]
    heads = AttributeHeads(dim=8, row_dim=16)
    pictures, captions, rows = (torch.randn(4, size, requires_grad=True) for size in (8, 8, 16))
    torch.autograd.backward(heads.loss(pictures, captions, rows, classes))
    for tensor in (pictures, captions, rows):
        assert tensor.grad is not None
        assert tensor.grad.abs().sum() > 0


def test_learning_rate_rises_then_falls() -> None:
    """The rate climbs to its peak over the warm-up and ends near its floor."""
    schedule = Schedule(num_steps=800)
    rates = [schedule.learning_rate(step) for step in range(800)]
    assert rates[0] == pytest.approx(4e-3 / 60, rel=1e-3)
    assert max(rates) == pytest.approx(4e-3, rel=0.02)
    assert rates[60:] == sorted(rates[60:], reverse=True)
    assert rates[-1] == pytest.approx(0.03 * 4e-3, rel=0.01)


def test_heads_are_gone_before_the_end() -> None:
    """The attribute heads count fully at first and not at all in the last 30 % of the steps."""
    schedule = Schedule(num_steps=100)
    assert schedule.heads_weight(0) == 1
    assert schedule.heads_weight(35) == pytest.approx(0.5)
    assert {schedule.heads_weight(step) for step in range(70, 100)} == {0}
