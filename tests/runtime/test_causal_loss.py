"""The loss without logits: the cross-entropy of the logits, whatever is tuned, or computed from them."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer, TrainingArguments

import deltune
from benchmarks.memory import counts, peak
from deltune.runtime import causal_loss as module
from deltune.runtime.attach import find_tuned
from deltune.runtime.causal_loss import causal_loss, language_head, row_losses
from tables.families import FAMILIES
from tables.specimens import batch, build, roles, stir

CASES = [(f, role) for f in FAMILIES for role in ("causal", "seq2seq", "masked") if role in roles(FAMILIES[f])]
CASES = [(f, role) for f, role in CASES if not (role == "masked" and FAMILIES[f].kind == "both")]
PLAIN = {
    ("gemma2", "causal"): "its logits are more than the projection of its hidden states",
    ("blenderbot", "seq2seq"): "it does not say what its decoder reads",
}
"""The cases that are computed from all logits, and what the log says."""
METHODS = ("lora(rank=2)", "layernorm", "full", "prompt(length=3)", "adapter(rank=4)", "dora(rank=2)")


def batch_with_labels(model: PreTrainedModel, role: str) -> dict[str, Any]:
    inputs = batch(model, length=9)
    inputs.pop("decoder_input_ids", None)
    labels = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], -100)
    labels[:, :3] = -100  # a prompt
    if role == "seq2seq":
        labels = torch.randint(5, 99, (2, 6), generator=torch.Generator().manual_seed(0))
        labels[1, 4:] = -100
    cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return {**inputs, **cache, "labels": labels}


def reason_of(model: PreTrainedModel) -> str:
    """Why the loss of a tuned model is computed from all logits with what is in use."""
    handle = find_tuned(model)
    assert handle is not None
    return language_head(model).tried[handle.attached.passes.assignment_of_new_pass()][1]


def from_logits(model: PreTrainedModel, inputs: dict[str, Any], role: str) -> torch.Tensor:
    """The mean cross-entropy of a model's logits, in its dtype."""
    labels = inputs["labels"]
    if role == "seq2seq" and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        inputs = {**inputs, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=labels)}
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if role == "causal" else labels
    return F.cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten())


@pytest.mark.sample(12)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("family", "role"), CASES)
def test_loss_and_gradients_are_those_of_the_logits(family: str, role: str, method: str) -> None:
    model = build(FAMILIES[family], role)
    tuned = stir(deltune.attach(model, method))
    inputs = batch_with_labels(model, role)
    parameters = list(tuned.trainable_parameters())
    of_hidden, of_logits = causal_loss(model, inputs), from_logits(model, inputs, role)
    reason = PLAIN.get((family, role), "")
    assert reason in reason_of(model) and bool(reason) == bool(reason_of(model))
    tolerance = 2e-6 if reason else 1e-12  # transformers' own loss rounds logits to float32
    assert abs(of_hidden - of_logits) <= tolerance * of_logits
    gradients = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (of_hidden, of_logits))
    for one, two in zip(*gradients, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert (one - two).abs().max() <= tolerance * max(1, two.abs().max())
    if language_head(model).shifts:  # some tokens that are the likeliest ones
        inputs["labels"][0, 4:6] = model(**inputs).logits.argmax(-1)[0, 3:5]
    rows, counts, hits = row_losses(model, inputs)
    expected = from_logits(model, inputs, role)
    assert rows.shape == counts.shape == (2,) and abs(rows.sum() / counts.sum() - expected) <= 1e-12 * expected
    best, labels = model(**inputs).logits.argmax(-1), inputs["labels"]
    if language_head(model).shifts:
        best, labels = best[:, :-1], labels[:, 1:]
        assert hits[0] >= 2
    assert hits.tolist() == (best == labels).sum(1).tolist()


def table() -> str:
    """The families that the law holds for, as the guide has them."""
    lines = ["| model | computed without logits | from all logits, and why |", "|---|---|---|"]
    for role in ("causal", "seq2seq", "masked"):
        of_role = [family for family, other in CASES if other == role]
        at_head = ", ".join(f"`{family}`" for family in of_role if (family, role) not in PLAIN)
        others = "; ".join(f"`{f}`: {PLAIN[f, role]}" for f in of_role if (f, role) in PLAIN)
        lines.append(f"| {role} | {at_head} | {others} |")
    return "\n".join(lines)


def test_the_guide_has_the_table_of_the_law() -> None:
    guide = Path(__file__).parents[2] / "docs" / "train" / "memory.md"
    assert table() in guide.read_text(encoding="utf-8"), f"put this into {guide.name}:\n{table()}"


def llama(**changes: Any) -> PreTrainedModel:
    return build(FAMILIES["llama"], "causal", **changes)


def mixtral() -> PreTrainedModel:
    config = transformers.MixtralConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize(
    ("model", "method", "reason"),
    [
        (llama, "lora(rank=2, at='lm_head')", "what is trained acts at its head"),
        (mixtral, "lora(rank=2)", "more than the cross-entropy"),
        (lambda: build(FAMILIES["granite"], "causal", logits_scaling=3.0), "lora(rank=2)", "more than the projection"),
    ],
    ids=["delta at the head", "loss of the router", "scaled logits"],
)
def test_what_stands_between_takes_the_plain_way(
    model: Any, method: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model()
    stir(deltune.attach(model, method))
    inputs = batch_with_labels(model, "causal")
    with caplog.at_level("INFO", "deltune"):
        losses = [causal_loss(model, inputs) for _ in range(2)]
    assert reason in caplog.text and caplog.text.count("computed from all logits") == 1
    torch.testing.assert_close(losses, 2 * [model(**inputs).loss])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "method",
    ["lora(rank=2, at='lm_head')", "dora(rank=2, at='lm_head')", "trainable_tokens(tokens=(5, 7))",
     "lora(rank=2, at=('query', 'lm_head'))", "apet(full, parameters=50)"],
)  # fmt: skip
def test_what_has_not_been_trained_yet_gets_its_gradients(method: str, tied: bool) -> None:
    """A delta that starts at zero changes no logit."""
    model = llama(tie_word_embeddings=tied)
    parameters = list(deltune.attach(model, method).trainable_parameters())
    inputs = batch_with_labels(model, "causal")
    gradients = (
        torch.autograd.grad(loss, parameters, allow_unused=True)
        for loss in (causal_loss(model, inputs), from_logits(model, inputs, "causal"))
    )
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)


def test_a_class_that_does_not_shift_learns_the_next_token_the_plain_way() -> None:
    model = build(FAMILIES["bart"], "causal")
    tuned = deltune.attach(model, "lora(rank=2, at='lm_head')")
    stir(tuned)
    inputs = batch_with_labels(model, "causal")
    torch.testing.assert_close(causal_loss(model, inputs), from_logits(model, inputs, "causal"))
    assert reason_of(model) and not language_head(model).own_loss_shifts


def test_a_batch_without_trained_tokens_has_loss_0() -> None:
    for family in ("llama", "gemma2"):
        model = build(FAMILIES[family], "causal")
        tuned = deltune.attach(model, "lora(rank=2)")
        inputs = batch_with_labels(model, "causal")
        causal_loss(model, inputs)
        loss = causal_loss(model, {**inputs, "labels": torch.full_like(inputs["labels"], -100)})
        loss.backward()
        assert loss == 0 and all(p.grad is None or not p.grad.any() for p in tuned.trainable_parameters())


def test_items_threads_and_what_is_refused() -> None:
    model = llama()
    deltune.attach(model, "lora(rank=2)")
    inputs = batch_with_labels(model, "causal")
    count = int((inputs["labels"][:, 1:] != -100).sum())
    mean = causal_loss(model, inputs)
    torch.testing.assert_close(causal_loss(model, inputs, num_items_in_batch=2 * count), mean / 2)
    outputs: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: outputs.append(causal_loss(model, inputs))) for _ in range(4)]
    for thread in threads:
        thread.start()
    logits = [model(**inputs).logits.shape for _ in range(4)]  # a pass beside them computes all of its own
    for thread in threads:
        thread.join()
    assert outputs == 4 * [mean] and set(logits) == {(2, 9, model.config.vocab_size)}
    inputs.pop("labels")
    with pytest.raises(deltune.DeltuneError, match="no labels"):
        causal_loss(model, inputs)
    with pytest.raises(deltune.DeltuneError, match="no model of transformers"):
        causal_loss(torch.nn.Linear(2, 2), {"labels": torch.zeros(1, 1)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_within_its_own_rounding(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    deltune.attach(model, "lora(rank=2)")
    inputs = batch_with_labels(model, "causal")
    loss, plain = causal_loss(model, inputs), model(**inputs).loss
    assert not language_head(model).reasons
    assert loss.dtype == torch.float32 and abs(loss - plain) <= 1e-3 * plain
    model = model.float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = causal_loss(model, inputs)
        assert loss.dtype == torch.float32 and abs(loss - model(**inputs).loss) <= 1e-3 * plain
    assert not language_head(model).reasons


def test_chunks_give_what_all_tokens_together_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    tuned = stir(deltune.attach(model, "full"))
    inputs = batch_with_labels(model, "causal")
    first = torch.autograd.grad(causal_loss(model, inputs), list(tuned.trainable_parameters()))
    monkeypatch.setattr(module, "CHUNK", 1e-3)
    monkeypatch.setattr(module, "MIN_CHUNK", 3)
    second = torch.autograd.grad(causal_loss(model, inputs), list(tuned.trainable_parameters()))
    torch.testing.assert_close(first, second)


def test_second_derivatives_and_a_second_backward_pass() -> None:
    """torch's own function gives wrong second derivatives."""
    model = llama(attn_implementation="eager")
    parameters = list(stir(deltune.attach(model, "lora(rank=2)")).trainable_parameters())
    inputs = batch_with_labels(model, "causal")

    def second(loss: torch.Tensor) -> list[torch.Tensor]:
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), parameters))

    torch.testing.assert_close(second(causal_loss(model, inputs)), second(from_logits(model, inputs, "causal")))
    loss = causal_loss(model, inputs)
    once = torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(2 * loss, parameters), tuple(2 * gradient for gradient in once))


def test_a_step_does_not_hold_the_logits() -> None:
    vocabulary, tokens = 20_000, 256
    model = llama(vocab_size=vocabulary).float()
    deltune.attach(model, "lora(rank=2)")
    ids = torch.randint(5, vocabulary, (4, tokens // 4))
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    logits = 4 * tokens * vocabulary
    assert peak(lambda: row_losses(model, inputs)) < logits
    assert peak(lambda: causal_loss(model, inputs).backward()) < logits < peak(lambda: model(**inputs).loss.backward())


def test_what_stands_between_is_tried_again_when_it_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every batch; and a cap that is set later is noticed."""
    model = build(FAMILIES["gemma2"], "causal", final_logit_softcapping=None)
    tuned = stir(deltune.attach(model, "lora(rank=2)", name="a"))
    deltune.attach(model, "lora(rank=2)", name="b")
    inputs, trials = batch_with_labels(model, "causal"), []
    compare = module._same_logits
    monkeypatch.setattr(module, "_same_logits", lambda *pair: (trials.append(pair), compare(*pair))[1])
    for change, expected in (
        (model.eval, 1), (lambda: tuned.use("a"), 2), (model.train, 3), (model.train, 3),
        (lambda: setattr(model.config, "final_logit_softcapping", 0.5), 4),
    ):  # fmt: skip
        change()
        torch.testing.assert_close(*(causal_loss(model, inputs) for _ in range(2)))
        assert len(trials) == expected
    assert "more than the projection" in reason_of(model)
    loss, expected = causal_loss(model, inputs), from_logits(model, inputs, "causal")
    assert abs(loss - expected) <= 2e-6 * expected


def test_a_step_takes_no_more_operations_than_pefts() -> None:
    """Of two chunks of tokens, of which the untrained ones are left out."""
    peft = pytest.importorskip("peft")
    vocabulary, width = 1_500, 128
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes["num_hidden_layers"] = 4
    ids = torch.randint(5, vocabulary, (2, 64))
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    ours, theirs = llama(**sizes).float(), llama(**sizes).float()
    deltune.attach(ours, "lora(rank=8)")
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    causal_loss(ours, inputs)
    kernels, flops = counts(lambda: causal_loss(ours, inputs).backward())
    of_peft = counts(lambda: theirs(**inputs).loss.backward())
    assert flops <= of_peft[1] and kernels <= of_peft[0], (kernels, of_peft)
    inputs["labels"] = ids.clone().index_fill_(1, torch.arange(48), -100)
    assert counts(lambda: causal_loss(ours, inputs).backward())[1] < 0.8 * flops


def test_a_trainer_with_the_mixin_has_the_losses_of_the_plain_one(tmp_path: Path) -> None:
    class Mixed(deltune.CausalLossMixin, Trainer):  # type: ignore[type-arg]
        pass

    def losses(kind: type[Trainer]) -> list[float]:
        model = llama().float()
        deltune.attach(model, "lora(rank=2)")
        rows = [{"input_ids": [i, i + 1, i + 2], "labels": [-100, i + 1, i + 2]} for i in range(5, 21)]
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, max_steps=3,
            learning_rate=1e-2, report_to=[], save_strategy="no", eval_strategy="steps", eval_steps=3,
        )  # fmt: skip
        trainer = kind(model, arguments, train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows))
        trainer.train()
        return [line[name] for line in trainer.state.log_history for name in ("loss", "eval_loss") if name in line]

    assert losses(Mixed) == pytest.approx(losses(Trainer), rel=1e-5) and len(losses(Mixed)) == 4


@pytest.mark.parametrize("source", ["smoothed labels", "a function", "a subclass"])
def test_a_trainer_with_another_loss_keeps_it(source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Other(Trainer):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            return 2 * super().compute_loss(*args, **options)

    class Mixed(deltune.CausalLossMixin, Other if source == "a subclass" else Trainer):  # type: ignore[misc]
        pass

    model = llama().float()
    deltune.attach(model, "lora(rank=2)")
    rows = [{"input_ids": [i, i + 1, i + 2], "labels": [-100, i + 1, i + 2]} for i in range(5, 21)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], save_strategy="no", logging_steps=1,
        label_smoothing_factor=0.5 if source == "smoothed labels" else 0.0,
    )  # fmt: skip
    function = (lambda outputs, labels, **options: outputs.logits.square().mean()) if source == "a function" else None
    losses = []
    for kind in (Mixed, Other if source == "a subclass" else Trainer):
        trainer = kind(model, arguments, train_dataset=Dataset.from_list(rows), compute_loss_func=function)
        inputs = {name: tensor[:2] for name, tensor in next(iter(trainer.get_train_dataloader())).items()}
        losses.append(float(trainer.compute_loss(model, inputs)))
    assert losses[0] == pytest.approx(losses[1], rel=0.2) and "computes another loss" in caplog.text


def test_what_is_in_use_decides(caplog: pytest.LogCaptureFixture) -> None:
    """A delta at the head that is gone leaves no trace."""
    model = llama()
    tuned = stir(deltune.attach(model, "lora(rank=2, at='lm_head')", name="head"))
    inputs = batch_with_labels(model, "causal")
    causal_loss(model, inputs)
    assert reason_of(model)
    deltune.attach(model, "lora(rank=2)", name="body")
    tuned.use("body")
    causal_loss(model, inputs)
    assert not language_head(model).reasons


def test_what_is_trained_at_the_head_meanwhile_counts_without_gradients() -> None:
    model = llama().float().eval()
    tuned = deltune.attach(model, "lora(rank=2, at='lm_head')")
    inputs = batch_with_labels(model, "causal")
    with torch.no_grad():
        before = causal_loss(model, inputs)  # a new delta changes nothing
        stir(tuned)
        after, expected = causal_loss(model, inputs), from_logits(model, inputs, "causal")
    torch.testing.assert_close(after, expected)
    assert (after - before).abs() > 1e-3


@pytest.mark.parametrize(
    "change", ["a hook at the head", "a hook at the model", "a loss function", "a forward", "a nested configuration"]
)
def test_what_a_user_sets_on_a_model_later_counts(change: str) -> None:
    model, plus = llama().float().eval(), 0.5
    inputs = batch_with_labels(model, "causal")
    forward, loss_function = model.forward, model.loss_function

    def add_to_loss(outputs: Any) -> Any:
        outputs.loss = outputs.loss + plus if outputs.loss is not None else None
        return outputs

    inner = copy.copy(model.config)
    inner.factor, model.config.outer = 1, copy.copy(model.config)
    model.config.outer.inner = inner
    model.lm_head.register_forward_hook(lambda module, args, output: output * inner.factor)
    causal_loss(model, inputs)
    assert not language_head(model).reasons
    if change == "a nested configuration":
        inner.factor = 3
    elif change == "a hook at the head":
        model.lm_head.register_forward_hook(lambda module, args, output: 3 * output)
    elif change == "a hook at the model":
        model.register_forward_hook(lambda module, args, outputs: add_to_loss(outputs))
    elif change == "a loss function":
        model.loss_function = lambda *args, **options: loss_function(*args, **options) + plus
    else:
        model.forward = lambda *args, **options: add_to_loss(forward(*args, **options))
    torch.testing.assert_close(causal_loss(model, inputs), model(**inputs).loss)


def test_a_compiled_model_takes_the_plain_way() -> None:
    model = llama().float()
    deltune.attach(model, "lora(rank=2)")
    inputs = batch_with_labels(model, "causal")
    expected = causal_loss(model, inputs)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(causal_loss(compiled, inputs), expected)
    assert not reason_of(model), "the model itself is not remembered as one that needs logits"
