"""The benchmarks' arithmetic, what is kept of an interrupted run, and a tiny run of every part; nothing is timed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import tiny as parts
from benchmarks import (
    adapterhub,
    field,
    gpu,
    gpu_laws,
    inference,
    life,
    memory,
    methods,
    mixed,
    report,
    serving,
    steps,
    study,
    trunk,
    whole,
)
from benchmarks.frame import Piece, Report, carry_out
from benchmarks.peers import FIELD, PAIRS
from benchmarks.ratios import median_interval, paired_ratio
from benchmarks.rows import NOT_SLOWER, Row, Target
from benchmarks.shapes import batch, build, tiny


def measured(rows: Iterable[Row]) -> list[Row]:
    """All of them, each with a figure or a reason."""
    listed = list(rows)
    assert listed and all(row.figure is not None or row.note.startswith("not measured: ") for row in listed)
    assert len({row.name for row in listed}) == len(listed)
    return listed


# -- arithmetic


@pytest.mark.parametrize(("n", "k"), [(6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8), (30, 10)])
def test_the_interval_of_a_median_is_the_sign_test_s(n: int, k: int) -> None:
    """From the k-th smallest to the k-th greatest, k of the usual tables of the sign test at 95 %."""
    assert median_interval(range(1, n + 1)) == (k, n + 1 - k)


def test_few_rounds_give_their_whole_range() -> None:
    assert median_interval([3.0]) == (3.0, 3.0) and median_interval([5.0, 1.0, 2.0]) == (1.0, 5.0)


def test_ratios_are_of_the_same_round() -> None:
    """A round that was slow for both is no noise."""
    noise = [1.0, 4.0, 0.25, 1.0, 2.0, 8.0, 0.5]
    ratio = paired_ratio([0.75 * x for x in noise], noise)
    assert ratio.figure == ratio.low == ratio.high == 0.75 and ratio.rounds == 7


@pytest.mark.parametrize(
    ("target", "figure", "interval", "passed"),
    [
        (Target(1.15), 1.15, (1.1, 1.3), True),
        (Target(1.15), 1.16, (1.0, 1.3), False),
        (Target(10, "at least"), 9.0, (8.0, 11.0), False),
        (NOT_SLOWER, 1.04, (0.99, 1.1), True),
        (NOT_SLOWER, 1.04, (1.01, 1.1), False),
        (NOT_SLOWER, 1.04, None, False),
        (Target(0.85, "at least", "interval"), 0.8, (0.7, 0.9), True),
        (None, 1.0, None, None),
        (NOT_SLOWER, None, None, None),
    ],
)
def test_what_passes(
    target: Target | None, figure: float | None, interval: tuple[float, float] | None, passed: bool | None
) -> None:
    row = Row("x", figure, target, interval)
    assert row.passed is passed
    assert Row.of_json(json.loads(json.dumps(row.json()))) == row


def test_a_peak_is_what_was_in_use_at_once() -> None:
    def work() -> None:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(400)
        del second, third

    assert 6000 <= memory.peak(work) < 6400  # the allocator rounds up


# -- keeping


def test_what_was_interrupted_goes_on(tmp_path: Path) -> None:
    done: list[str] = []

    def measure(name: str, breaks: bool = False) -> list[Row]:
        if breaks:
            raise KeyboardInterrupt
        done.append(name)
        return [Row(name, 1.0)]

    def pieces(breaks: bool) -> list[Piece]:
        return [Piece(n, partial(measure, n, breaks and n == "b"), 1.0) for n in ("a", "b", "c")]

    path, here = tmp_path / "bench.json", {"cpu": "x"}
    with pytest.raises(KeyboardInterrupt):
        carry_out(pieces(True), Report.begin(path, here, pieces(True)), lambda piece: None)
    begun: list[str] = []
    report = Report.begin(path, here, pieces(False))
    carry_out(pieces(False), report, lambda piece: begun.append(piece.name))
    assert done == ["a", "b", "c"] and begun == ["b", "c"] and not report.left
    assert [row.name for row in Report.read(path).all_rows()] == ["a", "b", "c"]
    assert set(Report.read(path).commits) == {"a", "b", "c"}  # each piece may be of another one
    one = pieces(False)[:1]
    again = Report.begin(path, here, one, known=pieces(False))  # a finished one is measured anew, the others stay
    assert again.left == ["a"] and set(again.rows) == {"a", "b", "c"}
    few = Report.begin(path, here, one, known=pieces(False)[1:2])
    assert set(few.rows) == set(few.commits) == {"a", "b"}  # there is no piece c any more
    assert not Report.begin(path, {"cpu": "y"}, one).rows  # numbers of another machine are no company


def test_committed_results_can_be_read() -> None:
    for path in sorted(report.RESULTS.glob("*.json")):
        read = Report.read(path)
        assert read.machine["cpu"] and all(read.commits.values()) and read.all_rows(), path


# -- tiny runs


@pytest.mark.peers
@pytest.mark.parametrize("shape", [tiny("encoder"), tiny("decoder", padded=True, dropout=0.0)], ids=str)
def test_steps(shape: steps.Shape) -> None:
    rows = measured(steps.measure(shape, rounds=1))
    assert sum(row.figure is None for row in rows) == (shape.kind == "decoder")  # BEFT takes no transposed linears
    assert all(row.target is not None for row in rows if row.figure is not None)


@pytest.mark.peers
def test_steps_of_the_field() -> None:
    pair = next(pair for pair in FIELD if pair.ours == "hira(rank=8)")
    rows = measured(field.counts(tiny("encoder"), pair))
    assert len(rows) == 3 and rows == field.counts(tiny("encoder"), pair)
    assert measured(field.times(tiny("encoder"), pair, 1))[0].target is not None


@pytest.mark.parametrize("shape", [tiny("encoder"), tiny("decoder", padded=True, dropout=0.0)], ids=str)
def test_inference(shape: inference.Shape) -> None:
    rows = measured(inference.measure(shape, rounds=1))
    assert len(rows) == 4 and all(row.target is not None for row in rows)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_sides_share_their_frozen_weights(kind: str) -> None:
    shape = tiny(kind)
    like = build(shape)
    other = build(shape, like)
    addresses = {name: tensor.data_ptr() for name, tensor in like.named_parameters()}
    assert {name: tensor.data_ptr() for name, tensor in other.named_parameters()} == addresses
    padded, _ = batch(replace(shape, padded=True))
    assert padded["attention_mask"].sum() < padded["attention_mask"].numel()


@pytest.mark.slow
@pytest.mark.peers
def test_memory() -> None:
    beside = measured(memory.beside(tiny("encoder")))
    assert all("MiB" in row.note for row in beside)
    drawn = measured(memory.drawn(tiny("encoder"), 1, counts=(50, 200)))
    assert drawn[-1].figure == pytest.approx(12.0, abs=0.5)
    heads = measured(memory.language(16, 4_000, ("lora(rank=8)", "full"), tokens=256))
    assert all(row.figure >= 1 for row in heads if "without a head" in row.name)
    assert {row.name.partition(": ")[2].partition(";")[0] for row in heads} >= {"ours", "PEFT", "TRL + PEFT"}
    assert all(row.passed for row in heads if row.name.startswith("flops / PEFT's: ours"))


def test_life() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    measured(life.attached(LlamaConfig(**sizes, vocab_size=32), ("lora(rank=2)",), 1))
    measured(life.switched(tiny("encoder"), ("layernorm",), 3))
    measured(life.crowded(tiny("encoder"), 12, few=6, rounds=6))


@pytest.mark.peers
def test_loading() -> None:
    measured(life.loaded(tiny("encoder"), PAIRS[:1], 12))


@pytest.mark.slow  # it starts two processes
def test_start() -> None:
    measured(life.started(1))


def test_mixed() -> None:
    rows = measured(mixed.measure(replace(tiny("encoder"), rows=8), 1, ("layernorm", "lora(rank=2)")))
    assert all("the bare model" in row.note for row in rows)


@pytest.mark.slow  # tests/serve has the laws; here the benchmark's own lines are run
def test_serving() -> None:
    encoder, decoder = tiny("encoder", padded=True, dropout=0.0), tiny("decoder", padded=True, dropout=0.0)
    measured(serving.classified(encoder, 40, rounds=1))
    measured(serving.generated(decoder, 20, new=3, rounds=1))
    measured(serving.shared(encoder, seconds=0.5))
    hits, *_ = measured(serving.stored(encoder, deltas=12, loaded=4, number=60))
    assert hits.figure is not None and 0 < hits.figure < 1


def test_methods(tmp_path: Path) -> None:
    rows = measured(methods.measure(str(parts.model(tmp_path / "model")), ("lora(rank=2)", "head"), 2, 8, 1))
    assert {row.unit for row in rows} == {"×", "MiB"}


@pytest.mark.slow
def test_a_study_reads_its_backbone_once_a_worker_and_tokenises_once_a_task(tmp_path: Path) -> None:
    rows = measured(study.measure(str(parts.model(tmp_path / "model"))))
    assert [row.figure for row in rows] == [1, 1] and all("24 runs" in row.note for row in rows)


def test_trunk(tmp_path: Path) -> None:
    results = trunk.measure(str(parts.model(tmp_path / "model")), 40, 1, {"head": 10.0}, max_length=32)
    assert measured(results)[0].note == "40 rows; 2 rounds"


def test_adapterhub_where_it_is_not(tmp_path: Path) -> None:
    (row,) = measured(adapterhub.measure(tiny("encoder"), 1, tmp_path))
    assert row.note == "not measured: make bench-adapterhub-env"


def test_whole_where_there_is_no_data() -> None:
    rows = measured([*whole.measure(whole.JOBS[0], None, 1, (0,)), *whole.chats(None, "stories260k-llama", {})])
    assert all("--data-root" in row.note for row in rows)


@pytest.mark.slow
@pytest.mark.peers
def test_whole(shared: Path) -> None:
    few = {"train": 32, "validation": 8, "test": 8}
    rows = measured(whole.measure(whole.JOBS[1], shared / "data", 1, (0,), few))
    rows += measured(whole.chats(shared / "data", "stories260k-llama", few))
    assert all(row.figure is not None for row in rows)


@pytest.mark.peers
@pytest.mark.slow
def test_gpu_s_code_on_a_cpu() -> None:
    size = gpu.SIZES["tiny"]
    with_peft = measured(gpu.measure(size, "cpu", "eager", "lora(rank=8)", 1))
    assert sum(row.target is not None for row in with_peft) == 2
    measured(gpu.measure(size, "cpu", "eager, checkpointed", "layernorm", 1))
    alone = measured(gpu.measure(size, "cpu", "eager", "mam(length=16, rank=16)", 1))
    assert alone[-1].figure is None
    assert len(measured(gpu.mixed(size, "cpu", 3, 1))) == 2 * (len(gpu.MIXED) + 1)
    (row,) = measured(gpu.largest("cpu", "layernorm", ((32, 2, 8, 48),)))
    assert row.figure


@pytest.mark.slow
def test_gpu_s_compiled_code_on_a_cpu() -> None:
    measured(gpu.measure(gpu.SIZES["tiny"], "cpu", "compiled", "layernorm", 1))


@pytest.mark.parametrize(
    "precision", [p if p == "float32" else pytest.param(p, marks=pytest.mark.slow) for p in gpu_laws.ROUNDING]
)
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, id=f.name, marks=[] if f.name == "llama" else pytest.mark.slow) for f in gpu_laws.FAMILIES],
)
@pytest.mark.slow
def test_gpu_s_laws_hold_on_a_cpu(family: gpu_laws.Family, precision: str) -> None:
    """Every check runs and holds here, where the device is compared with itself."""
    rows = gpu_laws.measure(family, "cpu", precision, 32, compiled=False)
    assert not [f"{row.name}: {row.figure} {row.note}" for row in rows if row.passed is False or row.figure is None]
    beside = [row for row in rows if row.name.endswith("beside cpu")]
    assert len(beside) >= len(gpu_laws.METHODS) - 2 and all(row.figure == 0 for row in beside)
