"""lm-evaluation-harness on a run: the tokens of training, and the numbers of its own command on the merged model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from deltune.errors import DeltuneError
from deltune.models import align_padding_token
from deltune.train.config import RunConfig
from deltune.train.inference import merge_run
from deltune.train.run import train
from test_templates import byte_tokenizer

pytest.importorskip("lm_eval", reason="no lm-evaluation-harness: pip install -e '.[harness]'")

from deltune.train.harness import _harness_model, evaluate_harness

TASK = """task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
def test_both_ways_give_the_same_number(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("<|begin|> $A", eos_token="<|end|>", bos_token="<|begin|>")
    sizes = {**tiny.FAMILIES["llama"], "max_position_embeddings": 128, "pad_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, vocab_size=len(tokenizer)))
    align_padding_token(model, tokenizer)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny.lines(tmp_path / "data.jsonl", [{"prompt": f"Say {c}: ", "completion": c * 3} for c in "abcdefgh"])
    spec = {"model": str(tmp_path / "model"), "data": str(tmp_path / "data.jsonl"), "method": "lora(rank=4)"}
    train(RunConfig.from_flat(**spec, lr=1e-2, steps=8, batch_size=8), tmp_path / "run", progress=False)
    rows = [
        {"question": f"Say {c}: ", "choices": ["aaa", c + "x", "q"], "answer": i % 3} for i, c in enumerate("hgfedcb")
    ]
    tiny.lines(tmp_path / "rows.jsonl", rows)
    file = tmp_path / "letters.yaml"
    file.write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    ours = evaluate_harness(tmp_path / "run", [str(file)])
    merge_run(tmp_path / "run", tmp_path / "merged")
    (tmp_path / "model").rename(tmp_path / "moved")
    assert evaluate_harness(tmp_path / "run" / "delta", [str(file)], base=str(tmp_path / "moved")) == ours
    with pytest.raises(DeltuneError, match="is a model itself: leave it out"):
        evaluate_harness(tmp_path / "moved", [str(file)], base=str(tmp_path / "moved"))
    (tmp_path / "moved").rename(tmp_path / "model")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(tmp_path)], include_defaults=False)
    theirs = simple_evaluate(
        "hf", model_args={"pretrained": str(tmp_path / "merged"), "dtype": "float32"}, tasks=["letters"], device="cpu",
        task_manager=manager, bootstrap_iters=0,
    )  # fmt: skip
    assert ours == {"letters": {"acc": theirs["results"]["letters"]["acc,none"]}}, json.dumps(ours)
    with pytest.raises(DeltuneError, match="has no task nothing"):
        evaluate_harness(tmp_path / "run", [str(file), "nothing"])
    begin = tokenizer.bos_token_id
    for templated, text, count in ((False, "ab", 1), (False, "<|begin|>ab", 1), (True, "<|begin|>ab", 1)):
        harness = _harness_model(model, tokenizer, templated, 2)
        assert (
            harness.tok_encode(text).count(begin) == count and harness.tok_batch_encode([text, "abc"])[0].shape[0] == 2
        )
