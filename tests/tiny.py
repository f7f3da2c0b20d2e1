"""Tiny real parts for tests: random models of width 32, a tokenizer trained on the spot, a task a child can do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from deltune.files import read_jsonl
from deltune.train.config import RunConfig

WORDS = {
    "fruit": ("apple", "pear", "plum", "fig", "melon", "peach"),
    "tool": ("hammer", "saw", "drill", "file", "chisel", "wrench"),
    "beast": ("otter", "badger", "heron", "lynx", "mole", "stoat"),
}
FILLERS = ("the", "a", "my", "is", "was", "near", "old", "very", "table", "and", "small", "here")
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "roberta": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": {**SIZES, "num_key_value_heads": 2},
}


def sentences(rows: int, seed: int) -> list[dict[str, Any]]:
    """Sentences of 3 to 12 words, one of which gives the label away."""
    chance = random.Random(seed)
    examples = []
    for i in range(rows):
        label = sorted(WORDS)[i % len(WORDS)]
        words = chance.choices(FILLERS, k=chance.randint(2, 11))
        words.insert(chance.randrange(len(words) + 1), chance.choice(WORDS[label]))
        examples.append({"text": " ".join(words), "label": label})
    return examples


def objects(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file."""
    return [value for _, value in read_jsonl(path)]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data(folder: Path, train: int = 48, others: int = 24) -> Path:
    """The task as a folder of JSON lines."""
    for seed, (split, rows) in enumerate({"train": train, "validation": others, "test": others}.items()):
        lines(folder / f"{split}.jsonl", sentences(rows, seed))
    return folder


def model(folder: Path, family: str = "bert") -> Path:
    """A folder with a model of random weights and its tokenizer, a word a token."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [" ".join(FILLERS), *(" ".join(names) for names in WORDS.values())]
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special))
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(family, **FAMILIES[family], vocab_size=len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModel.from_config(config).save_pretrained(folder)
    return folder


def still(folder: Path) -> Path:
    """The model of a folder, from now on without dropout: what is left of two runs' differences is rounding."""
    config = json.loads((folder / "config.json").read_text())
    config |= {name: 0.0 for name in config if "drop" in name}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def losses(run: Path) -> list[float]:
    """The training losses of a run's log."""
    lines = objects(run / "log.jsonl")
    return [line["loss"] for line in lines if "loss" in line]


def spec(root: Path, **changes: Any) -> RunConfig:
    """A spec on the tiny parts below `root`, which are made when they are not there."""
    places = {"model": root / "model", "data": root / "data"}
    if "model" not in changes and not places["model"].exists():
        model(places["model"])
    if "data" not in changes and not places["data"].exists():
        data(places["data"])
    values = {name: str(path) for name, path in places.items()}
    values |= {"method": "prefix(length=4) + layernorm", "epochs": 3, "batch_size": 8, "max_length": 16}
    values |= {"probe": "off"}  # which tests of their own look at
    return RunConfig.from_flat(**{**values, **changes})
