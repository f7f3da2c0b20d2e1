"""The studies at the papers' own scale: every model has its shape, every method is counted and trains for one step."""

from __future__ import annotations

import gc
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

import deltune
import tiny
from deltune.anatomy.tracing import meta_model
from deltune.cli.train import launch
from deltune.methods.counting import count
from deltune.studies.jobs.job import Job, config_of, execute, topological_order
from deltune.studies.jobs.pool import LocalPool
from deltune.studies.papers.paper_scale import (
    SHAPES,
    TRAIN_ROWS,
    backbone_config,
    describe_needs,
    parameters,
    training,
)
from deltune.studies.papers.registry import STUDIES
from deltune.studies.scales import StudySetup
from deltune.train.config import RunConfig
from deltune.train.run_folder import RunFolder
from deltune.train.setup import ModelCache
from deltune.train.tasks.registry import TASKS

SIZES = {
    "google-bert/bert-base-uncased": 109_482_240, "google-bert/bert-large-uncased": 335_141_888,
    "prajjwal1/bert-small": 28_763_648, "FacebookAI/roberta-base": 124_645_632,
    "openai-community/gpt2-medium": 354_823_168, "facebook/bart-large": 406_291_456,
    "facebook/mbart-large-cc25": 610_851_840, "google/t5-v1_1-small": 60_511_616,
    "google/t5-v1_1-base": 222_903_552, "google/t5-v1_1-xxl": 11_003_736_064,
}  # fmt: skip
"""Parameters of each model without its head: as published, those of T5 less the output embeddings."""
QUICK = ("prajjwal1/bert-small", "google/t5-v1_1-small")
CUT = "google/t5-v1_1-xxl"
"""The model of which one layer of either side is stepped, at its full width: the whole takes 44 GB."""
WORDS = 512
SEVERAL = Path(__file__).parents[1] / "whole" / "several.py"


@pytest.fixture(scope="module")
def methods() -> dict[str, list[str]]:
    """Every method of every study on each model; one of the masks that differ in their seeds alone."""
    methods_on: dict[str, set[str]] = {}
    for job in topological_order(job for name in STUDIES for job in STUDIES[name](StudySetup("paper")).jobs({})):
        if job.kind in ("untuned", "probe"):
            continue
        spec = job.spec.get("run", job.spec)
        methods = spec["methods"].values() if job.kind == "time" else [spec["method"]]
        of_job = spec.get("search", {}).get("method", methods)
        methods_on.setdefault(str(spec["model"]), set()).update(re.sub(r"seed=\d+", "seed=0", one) for one in of_job)
    return {model: sorted(of_model) for model, of_model in methods_on.items()}


def test_every_model_has_its_shape(methods: dict[str, list[str]]) -> None:
    assert set(methods) == set(SHAPES) == set(SIZES)
    assert {model: parameters(model) for model in SHAPES} == SIZES


def test_every_task_has_its_rows() -> None:
    jobs = [job for name in STUDIES for job in topological_order(STUDIES[name](StudySetup("paper")).jobs({}))]
    assert {job.spec["task"] for job in jobs if job.kind == "run"} == set(TRAIN_ROWS) <= set(TASKS)


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.sample(5)
def test_what_a_study_asks_for(name: str) -> None:
    lines = "\n".join(describe_needs(STUDIES[name](StudySetup("paper"))))
    parts = ("models from the hub: ", "memory: ", "GB")
    if name != "ln/time":
        parts += ("data from the hub: ", "training runs", "on one H100 in bf16", "on one A100 in fp32", "disk: ")
    assert [part for part in parts if part not in lines] == []


def test_a_folder_with_data_is_not_asked_of_the_hub(tmp_path: Any) -> None:
    (tmp_path / "sst2").mkdir()
    (line,) = (
        one for one in describe_needs(STUDIES["ln/ablation"](StudySetup("paper", str(tmp_path)))) if "data from" in one
    )
    assert "glue:sst2" not in line and "snli" in line


def test_a_machine_has_its_models_and_device_and_a_run_its_precision(tmp_path: Path) -> None:
    """Models by their hub ids below --model-root; what fits a device is no part of a job, and the precision is."""
    (tmp_path / "bert-base-uncased").mkdir()
    (tmp_path / "bert-base-uncased" / "config.json").write_text("{}")
    study = STUDIES["ln/ablation"]
    plain, here, half = (
        study(StudySetup("paper", **more)).jobs({})
        for more in ({}, {"model_root": str(tmp_path), "device_batch_size": 8}, {"precision": "bf16"})
    )
    assert [job.name for job in plain] == [job.name for job in here] != [job.name for job in half]
    assert {job.spec.get("run", job.spec)["precision"] for job in half} == {"bf16"}
    configs = {job.spec["model"]: config_of(job) for job in here if job.kind == "run"}
    base, large = (configs[f"google-bert/bert-{size}-uncased"] for size in ("base", "large"))
    assert (base.model.name, large.model.name) == (
        str(tmp_path / "bert-base-uncased"),
        "google-bert/bert-large-uncased",
    )
    assert base.optim.device_batch_size == 8


def test_each_worker_sees_its_own_accelerators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pool, pairs = LocalPool(2, tmp_path, devices=1), LocalPool(2, tmp_path, devices=2)
    assert [pool.environment(worker)["CUDA_VISIBLE_DEVICES"] for worker in (0, 1)] == ["0", "1"]
    assert pairs.environment(1)["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert pool.environment(1)["CUDA_VISIBLE_DEVICES"] == "6"
    assert LocalPool(2, tmp_path).environment(1)["CUDA_VISIBLE_DEVICES"] == "4,6"
    with pytest.raises(deltune.DeltuneError, match=r"4 accelerators .* CUDA_VISIBLE_DEVICES names '4,6'"):
        LocalPool(2, tmp_path, devices=2)  # the second worker would see none, and train on the processor


def test_a_run_by_hand() -> None:
    """SST-2 by the protocol of LN-tuning on BERT-base: 67,349 rows in batches of 392, 30 times; 128 tokens a row."""
    spec = {"model": "google-bert/bert-base-uncased", "task": "sst2", "method": "layernorm", "protocol": "ln_nlu"}
    one = training(RunConfig.from_flat(**spec, lr=1e-2).canonical())
    assert (one.steps, one.tokens, one.trained) == (30 * 172, 392 * 128, 38_400)
    inner = 109_482_240 - 30_522 * 768
    assert one.operations == one.steps * one.tokens * (4 * inner + 2 * 38_400)
    assert one.fixed_memory == 4 * 109_482_240 + 12 * 38_400
    assert one.memory == one.fixed_memory + one.tokens * 68 * 768 * 12


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model in QUICK else pytest.mark.slow) for model in SHAPES]
)
def test_every_method_is_counted_and_trains_for_a_step(
    model: str, methods: dict[str, list[str]], subtests: pytest.Subtests
) -> None:
    """Counted on the whole shape; stepped on random weights at full width and, but for T5-xxl, at full depth."""
    whole = meta_model(backbone_config(model))
    live = built(model)
    before = {name: tensor.clone() for name, tensor in list(live.state_dict().items())[:4]}
    for method in methods[model]:
        with subtests.test(method=method):
            size = count(whole, method).method
            drawn = re.search(r"parameters=(\d+)", method)
            assert size == int(drawn[1]) if drawn else size > 0 or method == "head"  # the head is counted apart
            step(live, cut(method) if model == CUT else method)
            gc.collect()
    assert all(torch.equal(tensor, live.state_dict()[name]) for name, tensor in before.items())


def built(model: str) -> PreTrainedModel:
    """Build a model with random weights at full width; its vocabulary, which no method depends on, is cut."""
    config = backbone_config(model)
    config.vocab_size = WORDS
    config.eos_token_id, config.pad_token_id, config.bos_token_id = 2, 0, 1
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 0
    if model == CUT:
        config.num_layers = config.num_decoder_layers = 1
    torch.manual_seed(0)
    live: PreTrainedModel = head_of(config).from_config(config)
    return live


def head_of(config: PreTrainedConfig) -> Any:
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    return AutoModelForCausalLM if config.model_type == "gpt2" else AutoModelForSequenceClassification


def cut(method: str) -> str:
    """Return a mask of 24 layers with as many scalars fewer as one layer has fewer."""
    return re.sub(r"parameters=(\d+)", lambda match: f"parameters={int(match[1]) // 24}", method)


def step(model: PreTrainedModel, method: str) -> None:
    """Attach a method, train it for one step, and detach it; full tuning is undone by hand."""
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()} if method == "full" else None
    tuned = deltune.attach(model, method)
    try:
        trained = list(tuned.trainable_parameters())
        ids = torch.randint(3, WORDS, (1, 8))
        labels = ids if model.config.is_encoder_decoder or model.config.model_type == "gpt2" else torch.tensor([1])
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()
        assert torch.isfinite(loss) and any(p.grad is not None and bool(p.grad.any()) for p in trained)
        earlier = [parameter.detach().clone() for parameter in trained if method != "full"]
        torch.optim.SGD(trained, lr=1.0).step()
        assert method == "full" or any(not torch.equal(old, new) for old, new in zip(earlier, trained, strict=True))
    finally:
        tuned.detach()
        model.zero_grad(set_to_none=True)
        if stored is not None:
            model.load_state_dict(stored)


NARROW: dict[str, dict[str, int]] = {
    "bert": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128},
    "gpt2": {"n_embd": 64, "n_head": 4},
    "bart": {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "t5": {"d_model": 64, "d_ff": 128, "num_heads": 4, "d_kv": 16},
}  # fmt: skip
"""Type of a model -> its reduced width; the depth is the whole one."""
NARROW |= {"roberta": NARROW["bert"], "mbart": NARROW["bart"]}
OF_LENGTH = ("search", "epochs", "batch_tokens", "min_tokens", "warmup", "validate_every")
TWO_STEPS = {
    "steps": 2, "batch_size": 4, "max_train_rows": 8, "validation_rows": 4, "test_rows": 4, "max_tokens": 4,
}  # fmt: skip


def narrow_jobs(root: Path, data: Path) -> dict[str, Job]:
    """Make a job of each study that trains, of two steps, with its model in a folder at reduced width."""
    jobs: dict[str, Job] = {}
    for name in STUDIES:
        planned = STUDIES[name](StudySetup("paper", str(data), str(root))).jobs({})
        runs = [
            job
            for job in topological_order(planned)
            if job.kind == "run" and (data / TASKS[job.spec["task"]].folder).is_dir()
        ]
        if runs:
            spec = {**runs[0].spec, **{key: values[0] for key, values in runs[0].spec.get("search", {}).items()}}
            spec = {key: value for key, value in spec.items() if key not in OF_LENGTH} | TWO_STEPS
            if spec.get("answer") == "words":  # those of SST-2, which the tokenizer does not know
                names = spec.get("relabel", {"negative": "negative", "positive": "positive"}).values()
                spec["words"] = dict(zip(names, ("apple", "saw"), strict=True))
            spec["method"] = re.sub(r"parameters=\d+", "parameters=200", spec["method"])
            jobs[name] = Job("run", spec, roots=replace(runs[0].roots, launch=2, sharding="fsdp"))
            model = root / spec["model"]
            if not model.exists():
                tiny.model(model)  # for its tokenizer
                config = backbone_config(spec["model"])
                config.update(NARROW[config.model_type] | {"vocab_size": WORDS})
                config.update({"eos_token_id": 3, "pad_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2})
                torch.manual_seed(0)
                head_of(config).from_config(config).save_pretrained(model)
    return jobs


@pytest.mark.slow
def test_one_job_of_each_study_trains_in_two_processes(shared: Path, tmp_path: Path) -> None:
    """For two steps by FSDP, from random weights; one of them also as a worker of `study run --launch 2` does it."""
    jobs = narrow_jobs(tmp_path / "models", shared / "data")
    assert {*STUDIES} - {*jobs} == {"ln/time"}, "which trains nothing"
    several = [
        {"spec": config_of(job).flat(mode="json"), "output": str(tmp_path / str(i)), "sharded": job.roots.sharding}
        for i, job in enumerate(jobs.values())
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(several))
    assert launch(2, [sys.executable, str(SEVERAL), str(tmp_path / "jobs.json")]) == 0
    finished = [RunFolder(one["output"]) for one in several]
    assert all(run.metrics.best.step == 2 and run.environment["processes"] == 2 for run in finished)
    result = execute(jobs["ln/ablation"], tmp_path / "runs", ModelCache())
    assert result["environment"]["processes"] == 2 and result["scores"]
