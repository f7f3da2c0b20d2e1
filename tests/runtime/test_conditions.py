"""Facts of the rows of a batch, which forms read: `tuned.condition(task_ids=…)`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import deltune
from tables.families import FAMILIES
from tables.specimens import build, stir

IDS = torch.tensor([[3, 7, 8, 4, 5], [3, 4, 5, 6, 9], [7, 8, 3, 4, 5]])
TASKS = [2, 0, 2]
POLY = "poly(rank=2, tasks=3, skills=2)"


def tuned_llama() -> tuple[Any, deltune.Tuned]:
    model = build(FAMILIES["llama"], "causal")
    tuned = stir(deltune.attach(model, POLY), size=0.5)
    for edit in tuned.delta().all_edits():  # tasks that differ
        with torch.no_grad():
            edit.get_parameter("logits").normal_(generator=torch.Generator().manual_seed(1)).mul_(3)
    return model, tuned


def test_every_row_has_the_parameters_of_its_task() -> None:
    """Alone, in a batch, beside rows of another delta, as beams, and in generation with a cache and without one."""
    model, tuned = tuned_llama()
    stir(deltune.attach(model, "lora(rank=2)", name="other"), seed=3)
    tuned.use("default")
    with torch.no_grad():
        alone = []
        for row, task in zip(IDS, TASKS, strict=True):
            with tuned.condition(task_ids=[task]):
                alone.append(model(row[None]).logits)
        with tuned.condition(task_ids=torch.tensor(TASKS)):
            joint = model(IDS).logits
            options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
            cached = [model.generate(IDS, **options, num_beams=beams) for beams in (1, 3)]
            whole = [model.generate(IDS, **options, num_beams=beams, use_cache=False) for beams in (1, 3)]
            with tuned.rows(["default", "other", "default"]):
                mixed = model(IDS).logits
        with tuned.condition(task_ids=[0, 0, 0]):
            assert not torch.allclose(joint[0], model(IDS).logits[0])
    assert torch.allclose(joint, torch.cat(alone), rtol=1e-10)
    assert torch.allclose(mixed[[0, 2]], joint[[0, 2]], rtol=1e-10) and not torch.allclose(mixed[1], joint[1])
    assert all(torch.equal(one, two) for one, two in zip(cached, whole, strict=True))


@pytest.mark.parametrize("ups", [1, 3])
def test_mtl_lora_is_the_papers_formula(ups: int) -> None:
    """h_t = W x_t + Σ_i exp(w_t^i / τ) B^i / Σ_j exp(w_t^j / τ) Λ_t A x_t (Yang et al. 2024, equation 5)."""
    model = build(FAMILIES["llama"], "causal")
    tuned = stir(deltune.attach(model, f"mtl_lora(rank=3, tasks=3, ups={ups}, temperature=0.5, scale=2)"), size=0.5)
    tensors = {edit.place.target.path: edit.full_tensors() for edit in tuned.delta().all_edits()}
    with torch.no_grad(), tuned.condition(task_ids=TASKS):
        routed = model(IDS).logits
    tuned.use(None)

    def hook(path: str) -> Any:
        a, transform, b, w = (tensors[path][name] for name in ("down", "transform", "up", "logits"))

        def change(module: Any, inputs: Any, h: torch.Tensor) -> torch.Tensor:
            rows = []
            for x, task in zip(inputs[0], TASKS, strict=True):
                shares = (w[task] / 0.5).exp()
                mixed = sum(share / shares.sum() * one for share, one in zip(shares, b, strict=True))
                rows.append(torch.stack([mixed @ (transform[task] @ (a @ token)) for token in x]))
            return h + 2 * torch.stack(rows)

        return change

    hooks = [model.get_submodule(path).register_forward_hook(hook(path)) for path in tensors]
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, routed, rtol=1e-12, atol=1e-12)
    assert len(hooks) == 4


def test_a_checkpointed_layer_knows_the_tasks_of_its_forward_pass() -> None:
    model, tuned = tuned_llama()
    gradients = []
    for checkpoints in (False, True):
        if checkpoints:
            model.train()
            for module in tuned.modules():  # without the draws of training
                module.eval()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        with tuned.condition(task_ids=TASKS):
            loss = model(IDS).logits.square().sum()
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in tuned.trainable_parameters()])
    assert all(torch.allclose(one, two, rtol=1e-10) for one, two in zip(*gradients, strict=True))


def test_training_draws_which_skills_are_used() -> None:
    model, tuned = tuned_llama()
    model.train()
    with tuned.condition(task_ids=TASKS):
        assert not torch.allclose(model(IDS).logits, model(IDS).logits)
        model(IDS).logits.sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in tuned.trainable_parameters())


def test_a_pass_that_does_not_know_the_tasks_is_refused() -> None:
    model, tuned = tuned_llama()
    for tasks, message in (
        (None, r"with tuned\.condition\(task_ids="),
        ([0, 3, 1], "tasks up to 3, and here are 3 rows and 3 tasks"),
        ([0, 1], "task_ids has 2 rows"),
        ([0.5], "give the number of a task"),
        ([], "give the number of a task"),
    ):
        with pytest.raises(deltune.DeltuneError, match=message):
            if tasks is None:
                model(IDS)
            else:
                with tuned.condition(task_ids=tasks):
                    model(IDS)
    with tuned.condition(task_ids=TASKS):
        reasons: list[BaseException] = []

        def other() -> None:
            try:
                model(IDS)
            except deltune.DeltuneError as error:
                reasons.append(error)

        thread = threading.Thread(target=other)  # which Python gives no context
        thread.start()
        thread.join()
        assert len(reasons) == 1
        with tuned.disable():
            model(IDS)
    with pytest.raises(deltune.DeltuneError, match="cannot be merged"):
        tuned.merge()
