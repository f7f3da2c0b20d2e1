"""Laws of what is kept: merged checkpoints, heads with other labels, tied tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import deltune
from tables.families import FAMILIES, Family
from tables.specimens import (
    HEADS,
    batch,
    build,
    config,
    differences,
    distance,
    equal,
    facts,
    main_role,
    roles,
    run,
    stir,
)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
@pytest.mark.sample(15)
def test_a_merged_model_is_a_plain_checkpoint(family: Family, tmp_path: Path) -> None:
    model = build(family, main_role(family))
    tuned = stir(deltune.attach(model, "lora(rank=2, at=('output', 'ffn')) + layernorm"))
    inputs = batch(model)
    outputs = run(tuned.merge(), inputs)
    model.save_pretrained(tmp_path)
    read = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())
    assert distance(run(read, inputs), outputs) < (1e-12 if family.exact else 1e-5)  # its memory is aligned otherwise


HEADED = [
    (f, role) for f in FAMILIES.values() for role in roles(f) if role in HEADS and role not in ("choice", "question")
]


@pytest.mark.parametrize(("family", "role"), HEADED, ids=[f"{f.name} as {role}" for f, role in HEADED])
@pytest.mark.sample(8)
def test_heads_with_other_labels(family: Family, role: str, tmp_path: Path) -> None:
    """Deltas for 2 and 5 labels on a model built for 3: head, num_labels and names switch with the delta."""
    names = {2: ("no", "yes"), 5: tuple("abcde")}
    expected: dict[int | None, tuple[dict[str, torch.Tensor], float]] = {}
    plain = build(family, role, num_labels=3)
    inputs = batch(plain)

    def answer(model: PreTrainedModel, count: int) -> tuple[dict[str, torch.Tensor], float]:
        shape = (2,) if role == "sequence" else inputs["input_ids"].shape
        labels = torch.full(shape, count - 1)
        outputs = run(model, inputs, labels=labels)
        return {"logits": outputs["logits"]}, float(outputs["loss"])

    expected[None] = answer(plain, 3)
    for count, labels in names.items():
        model = build(family, role, num_labels=count)
        model.config.id2label = dict(enumerate(labels))
        parameters = {n: p for n, p in plain.named_parameters()}
        with torch.no_grad():
            for n, p in model.named_parameters():
                if p.shape == parameters[n].shape:
                    p.copy_(parameters[n])
        tuned = stir(deltune.attach(model, "layernorm"), seed=count)
        expected[count] = answer(model, count)
        tuned.save(tmp_path / str(count))
    known = facts(plain)
    for count in names:
        handle = deltune.load(plain, tmp_path / str(count), name=f"of{count}")
    for count in (2, 5, None, 5, 2, None, 2):
        handle.use(count and f"of{count}")
        outputs, value = answer(plain, count or 3)
        assert outputs["logits"].shape[-1] == plain.config.num_labels == (count or 3)
        assert getattr(plain, "num_labels", count or 3) == (count or 3)  # the encoder-decoders keep none
        assert equal(outputs, expected[count][0]) and value == expected[count][1]
        if count:
            assert tuple(plain.config.id2label.values()) == names[count]
            assert plain.config.label2id == {label: i for i, label in enumerate(names[count])}
            assert handle.count().head == sum(
                t.numel() for n, t in plain.named_parameters() if n in handle.delta().head
            )
    handle.detach()
    assert differences(known, facts(plain)) == []


TIED = [f for f in FAMILIES.values() if f.kind != "encoder" and config(f).tie_word_embeddings]


@pytest.mark.parametrize("family", TIED, ids=lambda f: f.name)
@pytest.mark.parametrize("text", ["full", "layernorm"])
def test_tied_tensors_stay_tied(family: Family, text: str, tmp_path: Path) -> None:
    """Full tuning of a model whose vocabulary projection is its embedding: one tensor, trained and stored once."""
    model = build(family, main_role(family))
    inputs = batch(model)
    before = run(model, inputs)
    tuned = stir(deltune.attach(model, text))
    slots = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert slots[0] is slots[1]
    assert tuned.count().method == sum(p.numel() for p in tuned.trainable_parameters())
    outputs = run(model, inputs)
    tuned.save(tmp_path / "delta")
    tuned.detach()
    assert equal(run(model, inputs), before)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    loaded = deltune.load(model, tmp_path / "delta")
    assert equal(run(model, inputs), outputs)
    loaded.merge()
    assert equal(run(model, inputs), outputs)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_model_that_is_there_is_not_made_another_one(tmp_path: Path) -> None:
    """A delta alone is no model; a stale delta is not left beside the base."""
    base = build(FAMILIES["bert"], "sequence")
    base.save_pretrained(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tuned = stir(deltune.attach(base, "prefix(length=2)"))
    with pytest.raises(deltune.DeltuneError, match=r"holds a model.*give another folder.*tuned\.save"):
        base.save_pretrained(tmp_path)
    with pytest.raises(deltune.DeltuneError, match=r"tuned\.push_to_hub"):
        base.save_pretrained(tmp_path / "new", push_to_hub=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    with pytest.warns(UserWarning, match="holds the delta alone"):
        base.save_pretrained(tmp_path / "alone")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["delta"]
    tuned.use(None)
    with pytest.raises(deltune.DeltuneError, match=r"holds a delta .* none is in use"):
        base.save_pretrained(tmp_path / "alone")


def test_another_state_of_the_delta_is_not_dropped(tmp_path: Path) -> None:
    """As an average of the weights of several steps is given to save_pretrained."""
    model = build(FAMILIES["bert"], "sequence")
    tuned = stir(deltune.attach(model, "lora(rank=2)"))
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "same", state_dict=average)
    stir(tuned, seed=3)
    with pytest.raises(deltune.DeltuneError, match=r"other values of the delta.*load_state_dict"):
        model.save_pretrained(tmp_path / "other", state_dict=average)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("method", ["lora(rank=2)", "layernorm"])
def test_a_checkpoint_keeps_what_trains_beside_the_delta(method: str, tmp_path: Path) -> None:
    model = build(FAMILIES["gpt2"], "causal")
    stir(deltune.attach(model, method))
    model.transformer.wpe.weight.requires_grad_(True)
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(2)
    inputs = batch(model)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path / "checkpoint-3")
    again = build(FAMILIES["gpt2"], "causal")
    deltune.attach(again, method)
    again.load_state_dict(load_file(tmp_path / "checkpoint-3" / "model.safetensors"), strict=False)
    assert distance(run(again, inputs), expected) < 1e-12
