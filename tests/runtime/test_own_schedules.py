"""A schedule of the user's own: its penalty and projection are what a loop would do by hand."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import deltune
from deltune.train.distributed import shard_model
from tables.families import FAMILIES
from tables.specimens import batch, build, forward, loss


@dataclass(frozen=True)
class UnitRows(deltune.Schedule):
    """Rows of unit length, and a penalty on the other factor."""

    def penalty(self, tensors):  # type: ignore[no-untyped-def]
        return 0.3 * tensors["up"].square().sum()

    def project(self, tensors):  # type: ignore[no-untyped-def]
        tensors["down"].div_(tensors["down"].norm(dim=1, keepdim=True))


@dataclass(frozen=True, repr=False)
class UnitLora(deltune.FactorForm):
    rank: int = 2
    schedule = UnitRows()

    def tensors(self, widths):  # type: ignore[no-untyped-def]
        down, up = (self.rank, widths.in_width), (widths.out_width, self.rank)
        return {"down": deltune.TensorSpec(down), "up": deltune.TensorSpec(up)}

    def initialize(self, tensors, at):  # type: ignore[no-untyped-def]
        tensors["down"].normal_(), tensors["up"].zero_()

    def factors(self, tensors):  # type: ignore[no-untyped-def]
        return tensors["down"], tensors["up"]


def test_a_penalty_and_a_projection_are_what_a_loop_does_by_hand() -> None:
    """Over two passes in each step, with checkpointing, in a copy of the model, and after another delta was in use."""
    method = deltune.Modification("query", UnitLora()) + deltune.Modification("value", UnitLora())
    tuned = deltune.attach(build(FAMILIES["bert"], "base"), method)
    by_hand = copy.deepcopy(tuned.delta())
    plain = deltune.attach(build(FAMILIES["bert"], "base"), "lora(rank=2)")
    for ours, other in zip(plain.delta().all_edits(), by_hand.all_edits(), strict=True):
        ours.load_state_dict(other.state_dict())
    deltune.attach(tuned.model, "layernorm", name="other")
    tuned = deltune.tuned(copy.deepcopy(tuned.use("default").model))
    tuned.model.gradient_checkpointing_enable()
    tuned.model.train(), plain.model.train()
    for model in (tuned, plain):
        optimizer = torch.optim.SGD(model.trainable_parameters(), lr=0.02)
        for step in range(4):
            for part in range(2):
                loss(forward(model.model, batch(model.model, seed=2 * step + part))).backward()
            if model is plain:
                edits = [*plain.delta().all_edits()]  # two terms, each with its mean
                sum(0.3 * edit.up.square().sum() for edit in edits).div(len(edits) / 2).backward()
            optimizer.step()
            if model is plain:
                with torch.no_grad():
                    for edit in plain.delta().all_edits():
                        edit.down.div_(edit.down.norm(dim=1, keepdim=True))
            else:
                model.advance((step + 1) / 4)
            optimizer.zero_grad()
    for ours, other in zip(plain.delta().all_edits(), tuned.delta().all_edits(), strict=True):
        assert torch.allclose(ours.down, other.down, rtol=1e-10) and torch.allclose(
            ours.up, other.up, rtol=1e-9, atol=1e-13
        )


def test_rows_advance_their_own_deltas_and_what_was_advanced_is_not_warned_of() -> None:
    model = build(FAMILIES["bert"], "base")
    for name in "ab":
        tuned = deltune.attach(model, deltune.Modification("query", UnitLora()), name=name)
    with tuned.rows(["a", "a"]):
        for share in (0.5, 1.0):
            loss(forward(model, batch(model, rows=2))).backward()
            tuned.advance(share)
        loss(forward(model, batch(model, rows=2))).backward()
    assert [int(state.steps) for name in "ab" for state in tuned.delta(name).schedule_states()] == [2, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned.delta("a").warn_if_never_advanced()


@pytest.mark.parametrize("method", ["adalora", "diff_pruning"])
@pytest.mark.parametrize("advanced", [False, True])
def test_what_is_never_advanced_is_warned_of_in_the_second_step(method: str, advanced: bool) -> None:
    tuned = deltune.attach(build(FAMILIES["bert"], "base").train(), method)
    optimizer = torch.optim.SGD(tuned.trainable_parameters(), lr=0.01)
    texts = []
    for step in range(3):
        for _ in range(2):  # as gradients are accumulated
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss(forward(tuned.model, batch(tuned.model))).backward()
            texts += [(step, str(warning.message)) for warning in caught if "never called" in str(warning.message)]
        optimizer.step()
        if advanced:
            tuned.advance((step + 1) / 3)
        optimizer.zero_grad()
    assert [step for step, _ in texts] == ([] if advanced else [1])


def test_sharding_refuses_schedules() -> None:
    tuned = deltune.attach(build(FAMILIES["bert"], "base"), "adalora")
    with pytest.raises(deltune.DeltuneError, match=r"fsdp cannot divide adalora.*sharding=none"):
        shard_model(tuned, torch.device("cpu"))


@pytest.mark.parametrize(
    ("method", "refused"),
    [("adalora", True), ("adalora(orthogonality=0)", False), ("diff_pruning", True), ("lora", False)],
)
def test_a_trainer_that_scales_the_loss_refuses_penalties(method: str, refused: bool) -> None:
    model = deltune.attach(build(FAMILIES["bert"], "base"), method).model
    arguments = SimpleNamespace(fp16=True)
    with pytest.raises(deltune.DeltuneError, match="bf16=True") if refused else nullcontext():
        deltune.ScheduleCallback().on_train_begin(arguments, None, None, model=model)  # type: ignore[arg-type]
