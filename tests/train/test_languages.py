"""Languages of multilingual models: codes found, targets and answers that begin in the right one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets.fingerprint import Hasher
from transformers import (
    AutoTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
)

import tiny
from deltune.errors import DeltuneError
from deltune.models import forced_bos_options, language_code, language_codes, set_languages
from deltune.train.inference import load_run, predict
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.setup import ModelCache, load_task_tokenizer
from deltune.train.tasks.base import TaskOptions
from deltune.train.tasks.registry import TASKS

ROWS = [{"source": f"the cat {i}", "targets": [f"pisica {i}"]} for i in range(12)]


def pieces() -> list[tuple[str, float]]:
    """The words of a SentencePiece model trained here, as its file has them."""
    import io

    import sentencepiece

    proto = io.BytesIO()
    texts = [f"{row['source']} {row['targets'][0]}" for row in ROWS]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=proto, vocab_size=40, model_type="unigram", minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "code first": (MBart50Tokenizer, MBartConfig, MBartForConditionalGeneration),
    "code last": (MBartTokenizer, MBartConfig, MBartForConditionalGeneration),
    "three letters": (NllbTokenizer, M2M100Config, M2M100ForConditionalGeneration),
}
OWN = {"code first": ("en_XX", "ro_RO"), "code last": ("en_XX", "ro_RO"), "three letters": ("eng_Latn", "ron_Latn")}
SIZES = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2, "scale_embedding": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of every kind with a real tokenizer, and a folder of data."""
    root = tmp_path_factory.mktemp("languages")
    for name, (tokenizing, configured, modelled) in KINDS.items():
        letters = {letter: 4 + i for i, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz0123456789")}
        model_data = {"vocab": {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **letters}, "merges": []}
        tokenizer = tokenizing(**(model_data if name == "three letters" else {"vocab": pieces()}))
        tokenizer.save_pretrained(root / name)
        torch.manual_seed(0)
        modelled(configured(**SIZES, vocab_size=len(tokenizer) + 1)).save_pretrained(root / name)
    for split in ("train", "validation", "test"):
        tiny.lines(root / "wmt16_en_ro" / f"{split}.jsonl", ROWS)
    (root / "wmt16_en_ro" / "meta.json").write_text(json.dumps({"fields": ["source", "targets"]}))
    tiny.model(root / "plain")
    return root


def spec(places: Path, name: str, **values: Any) -> Any:
    data = {"data": None, "task": "wmt16_en_ro", "data_root": str(places)} if "data" not in values else {}
    return tiny.spec(
        places, **{"model": str(places / name), "method": "lora(rank=2)", "max_length": 16, "target_length": 6,
                   "epochs": 1, "metrics": ("exact",), **data, **values},
    )  # fmt: skip


def tokenizer_of(config: Any, load: Any = load_task_tokenizer) -> Any:
    return load(config.model.name, config.data)


@pytest.mark.parametrize("name", KINDS)
def test_a_task_tells_the_tokenizer_its_languages(name: str, places: Path) -> None:
    tokenizer: Any = tokenizer_of(spec(places, name))
    source, target = OWN[name]
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == OWN[name]
    ids = tokenizer.convert_tokens_to_ids
    assert ids(source) in tokenizer("the cat")["input_ids"]
    assert ids(target) in tokenizer(text_target="pisica")["input_ids"]


@pytest.mark.parametrize("name", KINDS)
def test_an_answer_begins_as_targets_do(name: str, places: Path) -> None:
    """What the decoder is given first in generation is what the model makes of a target's labels in training."""
    tokenizer: Any = tokenizer_of(spec(places, name))
    model = KINDS[name][2].from_pretrained(places / name).eval()
    labels = torch.tensor([tokenizer(text_target="pisica")["input_ids"]])
    options = forced_bos_options(tokenizer, model)
    target = tokenizer.convert_tokens_to_ids(OWN[name][1])
    prompt = torch.tensor([[5, 2]])
    generated = model.generate(prompt, max_new_tokens=3, do_sample=False, num_beams=1, **options)[0].tolist()
    if name == "code last":
        assert options == {"forced_bos_token_id": None, "decoder_start_token_id": target} and generated[0] == target
    else:
        assert options["forced_bos_token_id"] == target and generated[:2] == [2, target]
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        shifted = model.prepare_decoder_input_ids_from_labels(labels)[0].tolist()
        assert shifted[: 1 if name == "code last" else 2] == generated[: 1 if name == "code last" else 2]


@pytest.mark.parametrize("name", KINDS)
def test_kept_rows_know_their_languages(name: str, places: Path) -> None:
    """A language is set after a tokenizer was made, and stands in none of its files."""
    tokenizer: Any = tokenizer_of(spec(places, name))
    before = Hasher.hash(tokenizer)
    tokenizer.tgt_lang = tokenizer.src_lang
    assert Hasher.hash(tokenizer) != before


@pytest.mark.parametrize("name", KINDS)
def test_a_whole_run(name: str, places: Path, tmp_path: Path) -> None:
    """Trained, generated, and the same answers from the delta on the disk."""
    train(spec(places, name), tmp_path / "run", progress=False)
    lines = (RunFolder(tmp_path / "run").predictions / "test.jsonl").read_text().splitlines()
    predictions = [json.loads(line)["prediction"] for line in lines]
    assert [one["prediction"] for one in predict(tmp_path / "run", [row["source"] for row in ROWS])] == predictions


def test_runs_of_other_languages_are_not_mixed(places: Path, tmp_path: Path) -> None:
    at = {}
    for target in ("ro", "de"):
        at[target] = tmp_path / target
        train(spec(places, "code first", source_language="en", target_language=target), at[target], progress=False)
    with pytest.raises(DeltuneError, match=r"other languages \(ro: .* to .*; de: "):
        load_run(at)


def test_languages_of_a_spec(places: Path) -> None:
    other = {"data": str(places / "wmt16_en_ro"), "task": "generation"}
    tokenizer: Any = tokenizer_of(spec(places, "code first", **other))
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("en_XX", None)
    tokenizer = tokenizer_of(spec(places, "code first", source_language="de", target_language="fr_XX", **other))
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("de_DE", "fr_XX")
    tokenizer = tokenizer_of(spec(places, "code first", target_language="cs"))  # over the task's
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("en_XX", "cs_CZ")
    assert tokenizer_of(spec(places, "plain")) is not None  # the task's are for who can be told
    with pytest.raises(DeltuneError, match="has no languages to choose from; leave target_language=ro out"):
        tokenizer_of(spec(places, "plain", target_language="ro"))


def test_shared_parts_keep_languages_apart(places: Path) -> None:
    parts, other = ModelCache(), {"data": str(places / "wmt16_en_ro"), "task": "generation"}
    first = tokenizer_of(spec(places, "code first"), parts.tokenizer)
    assert tokenizer_of(spec(places, "code first", seed=3), parts.tokenizer) is first and first.tgt_lang == "ro_RO"
    assert tokenizer_of(spec(places, "code first", **other), parts.tokenizer).tgt_lang is None


@pytest.mark.parametrize("name", KINDS)
def test_every_task_s_languages_are_found(name: str, places: Path) -> None:
    codes = language_codes(AutoTokenizer.from_pretrained(places / name))
    for task in TASKS.values():
        assert all(language_code(language, codes) for language in task.languages if language)


def test_codes() -> None:
    assert language_code("ro", ["en", "ro"]) == "ro"
    with pytest.raises(DeltuneError, match="'zh' is zho_Hans or zho_Hant to this tokenizer; give one of these"):
        language_code("zh", ["eng_Latn", "zho_Hans", "zho_Hant"])
    with pytest.raises(DeltuneError, match=r"unknown language 'rp'. .*Known: en_XX, ro_RO"):
        language_code("rp", ["en_XX", "ro_RO"])


def test_a_tokenizer_without_languages_is_left_alone(places: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(places / "plain")
    set_languages(tokenizer, None, None)
    assert language_codes(tokenizer) == [] and forced_bos_options(tokenizer, None) == {}
    assert TaskOptions().generate_kwargs == {}
