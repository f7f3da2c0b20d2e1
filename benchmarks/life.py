"""Attaching to a large model, loading many deltas onto a small one, and the start of a run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import deltune

from .frame import Piece
from .peers import PAIRS, Pair
from .rows import Row, Target, compared
from .shapes import Shape, batch, build, minilm

METHODS = ("lora(rank=8)", "prefix(length=16)", "layernorm", "mam(length=16, rank=16)")


def clocked(work: Callable[[], object]) -> float:
    """Seconds of the work."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def attached(config: LlamaConfig, methods: tuple[str, ...] = METHODS, times: int = 3) -> list[Row]:
    """attach on the meta device: what the anatomy, the plan and the modules cost without any weights."""
    rows = []
    for method in methods:
        seconds = []
        for _ in range(times):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
                seconds.append(clocked(partial(deltune.attach, model, method)))
        size = sum(p.numel() for p in model.parameters()) / 1e9
        name = f"attach on the meta device: {method}; Llama shape of {size:.1f} billion"
        rows.append(Row(name, statistics.median(seconds), Target(2.0), (min(seconds), max(seconds)), "s", "all of 3"))
    return rows


def switched(shape: Shape, methods: tuple[str, ...] = METHODS, deltas: int = 100) -> list[Row]:
    """Named deltas loaded from the disk, then used in turn."""
    rows = []
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            saved = deltune.attach(build(shape), method).save(Path(folder) / "delta")
            model = build(shape)
            loading = [clocked(partial(deltune.load, model, saved, name=f"d{i}")) for i in range(deltas)]
        tuned = deltune.tuned(model)
        switching = sorted(clocked(partial(tuned.use, f"d{i}")) for i in range(deltas))
        interval = (1000 * switching[deltas // 40], 1000 * switching[-1 - deltas // 40])
        name = f"a switch among {deltas} deltas: {method}; {shape.name}"
        note = f"interval: of 95 % of the switches; loading one {1000 * statistics.median(loading):.0f} ms"
        rows.append(Row(name, 1000 * statistics.median(switching), Target(10.0), interval, "ms", note))
    return rows


def loaded(shape: Shape, pairs: Sequence[Pair], deltas: int = 64) -> list[Row]:
    """Loading the last of so many deltas, taking turns with PEFT's load_adapter; the first half is not counted."""
    import peft

    rows = []
    for pair in pairs:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = deltune.attach(build(shape), pair.ours).save(Path(folder) / "ours")
            peft.get_peft_model(build(shape), pair.peft(shape)).save_pretrained(f"{folder}/theirs")
            model = build(shape)
            theirs = peft.PeftModel.from_pretrained(build(shape), f"{folder}/theirs", adapter_name="first")
            seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
            for i in range(deltas):
                seconds["ours"].append(clocked(partial(deltune.load, model, saved, name=f"d{i}")))
                seconds["theirs"].append(
                    clocked(partial(theirs.load_adapter, f"{folder}/theirs", adapter_name=f"d{i}"))
                )
        ours, others = (of_side[deltas // 2 :] for of_side in seconds.values())
        what = f"loading the delta after {deltas // 2} to {deltas} others"
        rows.append(compared(f"{what} / PEFT's: {pair.name}; {shape.name}", ours, others, Target(0.05)))
        ordered = sorted(ours)
        interval = (1000 * ordered[len(ours) // 40], 1000 * ordered[-1 - len(ours) // 40])
        name = f"{what}: {pair.name}; {shape.name}"
        rows.append(Row(name, 1000 * statistics.median(ours), Target(5.0), interval, "ms", "of 95 % of the loads"))
    return rows


def crowded(shape: Shape, deltas: int = 1000, few: int = 50, rounds: int = 20) -> list[Row]:
    """What the last of many deltas costs beside what the first few did: loading, a switch, a pass, memory."""
    method = METHODS[0]
    with tempfile.TemporaryDirectory() as folder:
        saved = deltune.attach(build(shape), method).save(Path(folder) / "delta")
        size = sum(file.stat().st_size for file in saved.iterdir())
        model, alone = build(shape).eval(), build(shape).eval()
        deltune.load(alone, saved)
        deltune.load(model, saved, name="first")
        begun = _resident()
        loading = [clocked(partial(deltune.load, model, saved, name=f"d{i}")) for i in range(deltas)]
        grown = _resident() - begun
    inputs, _ = batch(shape)
    with torch.no_grad():
        passes = [(clocked(partial(model, **inputs)), clocked(partial(alone, **inputs))) for _ in range(rounds)]
    ours, others = zip(*passes, strict=True)
    note = f"{method}; {shape.name}"
    rows = [
        compared(f"loading with {deltas} attached / with {few}: {note}", loading[-few:], loading[:few], Target(1.25)),
        compared(f"a pass with {deltas} attached / with one: {note}", ours, others, Target(1.05, by="interval")),
    ]
    if grown:
        name = f"memory of {deltas} deltas / their files: {note}"
        rows.append(Row(name, grown / (deltas * size), Target(1.5), note=f"{grown / 2**20:.0f} MiB"))
    return rows


def _resident() -> int:
    """Bytes of memory that this process has; 0 on systems that do not say so."""
    about = Path("/proc/self/statm")
    return int(about.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if about.is_file() else 0


def started(times: int = 3) -> list[Row]:
    """From the command to the first step of `deltune train`, and to the answer of `deltune predict` for one text."""
    steps, answers = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        lines = [{"text": f"This is text number {i}.", "label": "even" if i % 2 == 0 else "odd"} for i in range(200)]
        for split in ("train", "validation", "test"):
            (data / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        environment = {
            **os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "DELTUNE_CACHE": f"{folder}/cache",
        }  # fmt: skip
        for number in range(times):
            run = Path(folder) / str(number)
            command = [sys.executable, "-m", "deltune", "train", "--model", "minilm", "--method", METHODS[0]]
            command += ["--data", str(data), "--steps", "1", "--output", str(run), "--quiet"]
            began = time.perf_counter()
            training = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            while training.poll() is None and not _has_started(run / "log.jsonl"):
                time.sleep(0.01)
            steps.append(time.perf_counter() - began)
            if training.wait():
                raise RuntimeError(f"{' '.join(command)} failed")
            command = [sys.executable, "-m", "deltune", "predict", str(run), "--text", "A text."]
            answers.append(clocked(partial(subprocess.run, command, env=environment, check=True, capture_output=True)))
    names = ("from `deltune train` to its first step", "`deltune predict` of one text")
    return [
        Row(name, statistics.median(seconds), Target(4.0), (min(seconds), max(seconds)), "s", f"all of {times}")
        for name, seconds in zip(names, (steps, answers), strict=True)
    ]


def _has_started(log: Path) -> bool:
    """Whether the run has logged that its first step begins."""
    return log.is_file() and log.stat().st_size > 0


def pieces() -> list[Piece]:
    return [
        Piece("life: attach", partial(attached, LlamaConfig()), 6.0),  # its defaults are the 7-billion shape
        Piece("life: switch", partial(switched, minilm("encoder")), 10.0),
        Piece("life: load", partial(loaded, minilm("encoder"), PAIRS[:2]), 15.0),
        Piece("life: crowd", partial(crowded, minilm("encoder")), 15.0),
        Piece("life: start", started, 35.0),
    ]
