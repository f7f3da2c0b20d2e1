"""Every study of the papers at both scales: it builds, its cells decide its claims, its views can be drawn."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

import tiny
from deltune.errors import DeltuneError
from deltune.studies.claims.decisions import decidable_effects
from deltune.studies.claims.selectors import EDGE
from deltune.studies.jobs.job import Job, Outcome, run_job
from deltune.studies.jobs.pool import Scheduler
from deltune.studies.jobs.store import ErrorKind, JobRecord, ResultStore, read_results
from deltune.studies.papers.apet import PAPER_FAMILIES, SMALL_FAMILIES
from deltune.studies.papers.questions import QUESTIONS
from deltune.studies.papers.registry import CLAIMS, STUDIES, paper_statements
from deltune.studies.papers.thresholds import (
    ThresholdGrid,
    find_thresholds,
    plan_thresholds,
    powers_of_two,
    threshold_outcome,
)
from deltune.studies.report.figure_spec import TableSpec
from deltune.studies.report.page import build_section, power_lines
from deltune.studies.scales import (
    LEARNING_RATES,
    StudySetup,
    choose_rates,
    cross_product,
    grid_of_rates,
    join_plans,
    method_variants,
    small_scale_rate,
    widened,
)
from deltune.studies.study import PlannedCell, Records, Study
from deltune.train.config import RunConfig
from deltune.train.progress import ProgressDisplay
from deltune.train.tasks.registry import TASKS
from studies.test_engine import Here

MANY_CELLS = ("ap/thresholds", "ap/transfer", "ln/nlu")
"""Studies that take seconds to build at the scale of the paper."""
BOTH = [
    pytest.param(name, scale, marks=pytest.mark.slow if scale == "paper" and name in MANY_CELLS else ())
    for name in STUDIES
    for scale in ("small", "paper")
]
RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> StudySetup:
    """Folders by their names alone: to build a study nothing in them is read."""
    root = tmp_path_factory.mktemp("shared")
    for task in TASKS.values():
        (root / "data" / task.folder).mkdir(parents=True)
    for name in ("minilm-d128", "minilm-d192", "minilm-d256", "g2p-en-us-bart", "stories260k-llama"):
        (root / "models" / name).mkdir(parents=True)
        (root / "models" / name / "config.json").write_text("{}")
    return StudySetup("small", str(root / "data"))


def built(name: str, scale: str, place: StudySetup) -> Study:
    return STUDIES[name](place if scale == "small" else StudySetup())


# -- made-up results


def result(job: Job) -> dict[str, Any]:
    """What a work of each kind would answer."""
    chance = random.Random(job.name)
    if job.kind == "time":
        turns = {
            label: {
                "turns": {
                    what: [0.1 * (1 + chance.random()) for _ in range(9)] for what in ("step", "forward", "inference")
                },
                "percent": 1.0, "kept": 1000, "parameters": len(job.spec["model"]) * 1_000_000,
            }
            for label in job.spec["methods"]
        }  # fmt: skip
        return {"turns": turns, "seconds": 0.0}
    run = job.spec.get("run", job.spec)
    if job.kind == "terms":
        changes = [
            {"layer": layer, "module": module, "term": term, "value": (1 + layer) * (1 + chance.random())}
            for layer in range(4) for module in ("attention", "ffn") for term in ("gain", "bias")
        ]  # fmt: skip
        return {"changes": changes, "seconds": 0.0}
    task = job.spec.get("other", run)["task"]
    drawn = re.search(r"parameters=(\d+)", run["method"])
    value = (0.5 if job.kind in ("probe", "untuned") or run["method"] == "head" else 0.8) + 0.03 * chance.random()
    if drawn and job.kind == "run":
        value = 0.5 + 0.4 / (1 + math.exp(-2.5 * (math.log10(int(drawn[1])) - 2.5)))
    scores = {
        metric: value * (1 if metric in ("accuracy", "entity_f1", "exact") else 50)
        for metric in (*TASKS[task].metrics, *(run.get("metrics") or ()))
    }
    right = [float(i < value * 400) for i in range(400)]
    curve = [{"step": step, "eval_loss": 1 / step, "eval_accuracy": value - 1 / step} for step in (10, 20, 30, 40)]
    size = {"d128": 4e6, "d192": 7e6, "d256": 1e7, "small": 3e7, "base": 1e8, "large": 3e8, "xxl": 1e10}
    whole = next((n for key, n in size.items() if key in run["model"]), 2e7)
    count = {"method": 100, "trained": 200, "percent": 0.1, "denominator_size": int(whole)}
    examples = {"accuracy": right} if "accuracy" in scores else {}
    best = {field: values[0] for field, values in run.get("search", {}).items()}
    if "accuracy" in scores:
        scores["accuracy"] = sum(right) / 400
    return {"scores": scores, "examples": examples, "count": count, "seconds": 1.0, "curve": curve, "best": best}


def driven(made: Study) -> dict[str, JobRecord]:
    """All that a study asks for, answered, until it asks for nothing more."""
    rows: dict[str, JobRecord] = {}
    while left := [job for job in made.jobs(rows) for job in job.with_requirements() if job.name not in rows]:
        for job in left:
            rows[job.name] = JobRecord(job.name, job.kind, dict(job.spec), result(job), None, 1.0)
    return rows


@pytest.mark.parametrize(("name", "scale"), BOTH)
@pytest.mark.sample(20)
def test_a_study_is_whole(name: str, scale: str, place: StudySetup) -> None:
    """Specs are valid, cells are one of a kind, claims find their axes and labels, views can be drawn."""
    made = built(name, scale, place)
    assert made.name == name and made.question and made.views
    assert scale == "paper" or made.notes, "what is other than in the paper"
    rows = driven(made)
    outcomes = made.outcomes(rows)
    assert not [outcome for outcome in outcomes if outcome.error]
    cells = [json.dumps(dict(outcome.cell), sort_keys=True) for outcome in outcomes]
    assert len(set(cells)) == len(cells) > 1
    for row in rows.values():
        run = row.spec.get("run", row.spec)
        if row.kind != "time":
            assert RunConfig.from_canonical(run).canonical() == run, "a spec and what it says are one"
            assert "?" not in run["method"]
    if name == "ap/thresholds":
        for outcome in outcomes:
            assert "N" in outcome.cell or set(outcome.extra) >= {"low", "high"}
    section = build_section(made, rows, paper_statements(name), paper=True, small=scale == "small")
    assert len(section.findings) == len(CLAIMS[name])
    for finding in section.findings:
        assert finding.effect is not None, f"{finding.claim.text}: {finding.note}"
        for compared in finding.comparisons:
            assert not re.search(r"\w=\w|None|_", compared.text), f"not in words: {compared.text}"
    tables = [view for view in made.views if isinstance(view, TableSpec)]
    of_floors = section.tables[len(tables) :]
    assert len(of_floors) == ("floor" in made.axes()) and len(tables) + len(section.figures) == len(made.views)
    assert all(any(cell.mean is not None for cell in row.cells) for grid in of_floors for row in grid.rows)
    assert not [note for grid in of_floors for note in grid.notes if "not run" in note], "a probe has no seeds"
    for view, grid in zip(tables, section.tables, strict=False):
        assert grid.rows and not grid.excluded, grid.excluded
        assert scale == "small" or not view.published or grid.has_published
        entries = {key for key in view.published if not any(part in ("percent", "average", "rank") for part in key)}
        shown = [entry.published for row in grid.rows for entry in row.cells if entry.published is not None]
        assert scale == "small" or len(shown) >= 0.7 * len(entries)
    for figure in section.figures:
        assert figure.text
        assert not figure.notes or name == "ap/thresholds", figure.notes
        plt.close(figure.figure)


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_not_run_yet(name: str, place: StudySetup) -> None:
    made = built(name, "small", place)
    assert all(outcome.error == "not run yet" for outcome in made.outcomes({}))
    assert made.jobs({})


def test_small_says_what_to_give(tmp_path: Path) -> None:
    for name in STUDIES:
        message = "--model-root" if name == "ln/time" else "(?s)--data-root.*--model-root"
        with pytest.raises(DeltuneError, match=message):
            STUDIES[name](StudySetup("small"))
    (tmp_path / "data" / "sick").mkdir(parents=True)
    with pytest.raises(DeltuneError, match=r"(?s)no folder sst2.*has no model minilm-d128: give --model-root"):
        STUDIES["ln/unified"](StudySetup("small", str(tmp_path / "data")))


def test_the_hub_is_asked_only_for_what_a_folder_lacks(tmp_path: Path) -> None:
    (tmp_path / "sick").mkdir()
    place = StudySetup("paper", str(tmp_path))
    located = {task: place.roots.locate(place.task(task)) for task in ("sick", "sst2")}
    assert located == {"sick": {"task": "sick", "data_root": str(tmp_path)}, "sst2": {"task": "sst2"}}


def test_jobs_are_the_same_wherever_models_and_data_are(place: StudySetup, tmp_path: Path) -> None:
    """Nothing in the spec of a job is of this machine, and no folder need be there to say what is stored."""
    anywhere = StudySetup("small", runs=False)
    for name in STUDIES:
        here, there = (STUDIES[name](setup).jobs({}) for setup in (place, anywhere))
        assert [job.name for job in here] == [job.name for job in there]
        assert str(place.data_root) not in json.dumps([job.spec for job in here])
        if name != "ln/time":
            located = here[0].roots.locate(here[0].spec)
            run = located.get("run", located)
            assert run["data_root"] == place.data_root and Path(run["model"]).is_dir()


def test_models_in_the_working_folder_keep_their_names(place: StudySetup, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [job.name for job in STUDIES["ln/unified"](place).jobs({})]
    monkeypatch.chdir(str(place.models))
    assert [job.name for job in STUDIES["ln/unified"](place).jobs({})] == expected


@pytest.mark.parametrize(("method", "rate"), [
    ("full", LEARNING_RATES["full"]), ("prefix(length=4) + lora", LEARNING_RATES["lora"]),
    ("apet(bitfit, parameters=9)", LEARNING_RATES["bitfit"]), ("Modification('ffn', Vector())", 1e-2),
])  # fmt: skip
def test_a_sum_learns_at_the_lowest_rate(method: str, rate: float) -> None:
    assert small_scale_rate(method) == rate


def test_sizes_of_the_groups() -> None:
    """The N of every group is what its method trains; of BitFit on T5 it cannot be the paper's number."""
    from transformers import BertConfig, T5Config

    from deltune.anatomy.tracing import meta_model
    from deltune.methods.counting import count

    bert = {"minilm-d128": (128, 2), "minilm-d192": (192, 3), "minilm-d256": (256, 4), "bert-small": (512, 4),
            "bert-base": (768, 12)}  # fmt: skip
    for family in (SMALL_FAMILIES["MiniLM"], PAPER_FAMILIES["BERT"]):
        for model, (width, layers) in bert.items():
            if model in family.models:
                config = BertConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
                                    intermediate_size=4 * width)  # fmt: skip
                base = meta_model(config)
                sizes = [count(base, method).method for method in family.methods_of(model).values()]
                assert tuple(sizes) == family.models[model].sizes
                assert count(base, family.everything).method >= max(sizes)
    family = PAPER_FAMILIES["T5"]
    small = meta_model(T5Config(d_model=512, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu"))
    prompt, bitfit, lora, adapter = (count(small, m).method for m in family.methods_of("t5-small").values())
    assert (prompt, 121_216, lora, adapter) == family.models["t5-small"].sizes
    assert bitfit == family.models["t5-small"].bitfit == 101_376
    assert f"parameters={bitfit}," in repr([variant.values for variant in family.variants_of_equal_size("t5-small")])
    assert count(small, family.everything).method >= max(family.models["t5-small"].sizes)


# -- thresholds


def pooled(values: list[float]) -> list[float]:
    """The isotonic fit by its max-min formula (Robertson, Wright and Dykstra 1988, theorem 1.4.4)."""
    means = {(i, j): sum(values[i : j + 1]) / (j + 1 - i) for i in range(len(values)) for j in range(i, len(values))}
    ends = range(len(values))
    return [max(min(means[i, j] for j in ends[at:]) for i in ends[: at + 1]) for at in ends]


@pytest.mark.parametrize("seed", range(20))
def test_a_threshold_is_where_the_monotone_fit_reaches_its_level(seed: int) -> None:
    """Of each seed's curve, and of the mean curve with all resamples of three seeds counted one by one."""
    chance, sizes = random.Random(seed), powers_of_two(4096)
    curves = [[at / 10 + chance.uniform(-0.3, 0.3) for at in range(len(sizes))] for _ in range(3)]

    def threshold(values: list[float]) -> float:
        return next((n for n, value in zip(sizes, pooled(values), strict=True) if value >= 0.4), math.inf)

    brackets, (low, high) = find_thresholds(sizes, tuple(map(tuple, curves)), 0.4)
    assert [end or math.inf for _, end in brackets] == [threshold(curve) for curve in curves]
    assert all(begin == (0 if end == 64 else (end or 2 * sizes[-1]) // 2) for begin, end in brackets)
    resampled = sorted(
        threshold([(a[i] + b[i] + c[i]) / 3 for i in range(len(sizes))])
        for a in curves for b in curves for c in curves
    )  # fmt: skip
    assert (low, high or math.inf) == (min(sizes[-1], resampled[0]), resampled[-1]), "2.5 % of 27 is less than one"


def test_one_bad_run_in_the_middle_moves_no_threshold_far() -> None:
    """Bisection went where that run was: 32,768 at .72 and 65,536 at .53 gave no threshold at all."""
    sizes = powers_of_two(2**12)
    rising = [0.0, 0.0, 0.1, 0.6, 0.7, 0.1, 0.7]
    ((begin, end),), _ = find_thresholds(sizes, (tuple(rising),), 0.4)
    assert (begin, end) == (256, 512)


def grid_of(seeds: tuple[int, ...] = (0, 1, 2), most: int = 2**12) -> ThresholdGrid:
    def job(n: int, seed: int) -> Job:
        return Job("score", {"n": n, "seed": seed})

    return ThresholdGrid({"model": "m", "method": "lora"}, powers_of_two(most), seeds, job, lambda s: job(-1, s), 0.5)


DIVERGED = "at every rate the loss is nan"
"""A message that does not have the words of the usual one."""


def answered(value: Callable[[int, int], float | str]) -> list[Outcome]:
    """The outcomes when every run has ended: an accuracy for N (full tuning: -1) and seed, or an error."""
    made = Study("t", "?", plan_thresholds([grid_of()]), read_outcome=threshold_outcome)
    rows: dict[str, JobRecord] = {}
    for job in made.jobs({}):
        score = value(job.spec["n"], job.spec["seed"])
        failed = isinstance(score, str)
        held = {"scores": {"accuracy": score, "matthews": 0.0 if failed else 2 * score - 1},
                "examples": {"accuracy": [1.0] * 500}, "count": {"denominator_size": 9}}  # fmt: skip
        kind: ErrorKind | None = None if not failed else "diverged" if score == DIVERGED else "error"
        rows[job.name] = JobRecord(
            job.name, "score", dict(job.spec), None if failed else held, str(score) if failed else None, 1.0, kind
        )
    return [outcome for outcome in made.outcomes(rows) if "N" not in outcome.cell]


def test_both_thresholds() -> None:
    """Above chance from about 100 on, at full tuning's 0.9 from 1,000 on; seeds differ in where."""
    of_seeds = answered(
        lambda n, seed: 0.9 if n < 0 or n >= 1000 * (1 + seed) else 0.895 if n >= 1000 else 0.5 if n < 100 else 0.7
    )
    mean = {"low of the mean": [128, 128], "high of the mean": [1024, 1024]}
    after = {"after low": pytest.approx(100 * 0.7 / 0.9)}
    assert [outcome.extra for outcome in of_seeds] == 3 * [{"low": [64, 128], "high": [512, 1024], **mean, **after}]
    assert [outcome.cell["seed"] for outcome in of_seeds] == [0, 1, 2]
    late = answered(lambda n, seed: 0.9 if n < 0 or n >= 1000 * (1 + seed) else 0.5)
    assert [outcome.extra["low"][1] for outcome in late] == [1024, 2048, 4096]
    assert late[0].extra["high of the mean"] == [1024, 4096]


def test_a_guess_and_what_is_never_reached() -> None:
    """A correlation of .05 on 500 rows is what a guess may have; .2 is not."""
    (one, *_) = answered(lambda n, seed: 0.9 if n < 0 else 0.6)
    assert one.extra == {"low": [0, 64], "high": [4096, None], "low of the mean": [64, 64],
                         "high of the mean": [4096, None], "after low": pytest.approx(100 * 0.6 / 0.9)}  # fmt: skip
    (one, *_) = answered(lambda n, seed: 0.9 if n < 0 else 0.525)
    assert one.extra["low"] == [4096, None] and "after low" not in one.extra


def test_a_run_that_diverged_counts_as_a_guess() -> None:
    """Its record tells so, not its message."""
    (one, *_) = answered(lambda n, seed: 0.9 if n < 0 or n > 2000 else DIVERGED if n > 1000 else 0.8)
    assert one.error is None and (one.extra["low"], one.extra["high"]) == ([0, 64], [1024, 2048])
    (one, *_) = answered(lambda n, seed: 0.9 if n < 0 else DIVERGED)
    assert one.error is None and one.extra["low"] == one.extra["high"] == [4096, None]


@pytest.mark.parametrize("where", [256, -1])
def test_a_failed_run_is_told(where: int) -> None:
    """Of the grid, or full tuning, which measures nothing if it diverges."""
    for message in ("it broke", "read after training diverged: no such file", *([DIVERGED] if where < 0 else [])):
        of_seeds = answered(lambda n, seed, message=message: message if n == where else 0.9)  # type: ignore[misc]
        assert {outcome.error for outcome in of_seeds} == {message}


# -- for real


def test_a_study_from_end_to_end(tmp_path: Path) -> None:
    """Tiny models in folders, methods, thresholds: planned, run, told, drawn, and nothing left to do."""
    tiny.model(tmp_path / "a")
    tiny.data(tmp_path / "data", train=64, others=48)

    def spec(method: str, seed: int) -> RunConfig:
        return RunConfig.from_flat(
            model=str(tmp_path / "a"), data=str(tmp_path / "data"), method=method, head="freeze", seed=seed,
            epochs=1, batch_size=8, max_length=16, lr=1e-2,
        )  # fmt: skip

    grid = ThresholdGrid(
        {"model": "a", "task": "words", "method": "lora"}, powers_of_two(64, 16), (0, 1),
        lambda n, seed: run_job(spec(f"apet(lora(rank=4), parameters={n})", seed)),
        lambda seed: run_job(spec("full", seed)), 1 / 3,
    )  # fmt: skip
    climbing = Study("tiny/thresholds", "?", plan_thresholds([grid]), read_outcome=threshold_outcome)
    with ResultStore(tmp_path / "r.jsonl") as file, ProgressDisplay(False) as bar:
        drive = Scheduler(climbing.jobs, file, Here(file.runs))
        drive.run(bar)
        assert not drive.failed and drive.done == 2 * (1 + 3)
        outcomes = climbing.outcomes(drive.records)
    assert not [outcome.error for outcome in outcomes if outcome.error]
    assert {outcome.cell["N"] for outcome in outcomes if outcome.cell["method"] == "full"} == {outcomes[0].cell["N"]}
    with pytest.raises(DeltuneError, match="give --data-root"):
        cross_product(StudySetup("small"), "x", {"a": "a"}, ("sst2",), method_variants({"full": "full"}))
    assert not join_plans()({})


def test_more_seeds_decide_smaller_effects() -> None:
    """Judged by the committed results; a run as large as they are decides what a report says of an undecided claim."""
    name = "uv/insertion"
    made, claims = STUDIES[name](StudySetup("small", runs=False)), CLAIMS[name]
    outcomes = made.outcomes(_read(name))
    metric = {"g2p_us_to_gb": "exact", "conll04": "entity_f1"}
    by_seeds = [decidable_effects(claims, outcomes, metric, seeds) for seeds in (8, 12, 100)]
    for of_claim in zip(*by_seeds, strict=True):
        sizes = [effect[0] for effect in of_claim if effect is not None]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    ((largest, unit), *_) = (effect for effect in by_seeds[0] if effect is not None)
    assert f"    {largest:.2g} {unit}: {claims[0].text}" in power_lines(made, _read(name), claims)
    first = [outcome for outcome in outcomes if outcome.cell.get("seed") == 0]
    assert decidable_effects(claims, first, metric, 8) == [None] * len(claims)


def _read(name: str) -> dict[str, JobRecord]:
    return {record.name: record for record in read_results(RESULTS, [name])}


@pytest.mark.parametrize("name", STUDIES)
def test_a_job_is_called_by_the_labels_of_its_cell(name: str, place: StudySetup) -> None:
    """A reader of the progress sees labels that `--only` takes, and no expression; tries of a rate are numbered."""
    made = built(name, "small", place)
    axes = made.axes()
    for job in made.jobs({}):
        assert job.cell is not None and "(" not in job.label.replace(" (", ""), job.label
        others = {"try", "method", "N"} if "try" in job.cell else set()
        assert all(str(label) in axes[axis] for axis, label in job.cell.items() if axis not in others)


def test_every_study_of_scores_has_floors(place: StudySetup) -> None:
    """And full tuning; the same jobs wherever another study has them, and none where a study has no scores of tasks."""
    without = {"ln/time", "ln/terms", "ap/thresholds", "ap/transfer"}
    floors = {name: built(name, "small", place).axes().get("floor", []) for name in STUDIES}
    assert {name for name, rows in floors.items() if not rows} == without
    assert floors["ln/nlu"] == ["head", "probe"] and floors["uv/integration"] == ["untuned", "head", "probe"]
    assert floors["uv/full"] == ["full", "untuned", "head", "probe"] and floors["ln/nlg"] == ["untuned"]
    (full,) = {
        frozenset(job.name for job in built(name, "small", place).jobs({}) if job.spec.get("method") == "full")
        for name in ("uv/full", "uv/integration", "uv/insertion")
    }
    assert len(full) == 8, "four rates on two tasks under the first seed"


def test_the_list_of_studies_has_the_questions_of_the_studies(place: StudySetup) -> None:
    assert list(QUESTIONS) == list(STUDIES)
    assert {name: built(name, "small", place).question for name in STUDIES} == QUESTIONS


@pytest.mark.parametrize(
    ("quality", "tried"),
    [
        ({}, range(2, 5)),
        ({2: 0.1, 3: 0.2, 4: 0.1}, range(2, 5)),
        ({2: 0.1, 3: 0.2, 4: 0.3}, range(2, 6)),
        ({2: 0.1, 3: 0.2, 4: 0.3, 5: 0.4}, range(2, 7)),
        ({2: 0.1, 3: 0.2, 4: 0.3, 5: 0.4, 6: 0.5}, range(2, 7)),  # the ladder ends
        ({1: 0.1, 2: 0.3, 3: 0.2, 4: 0.1}, range(1, 5)),
        ({2: 0.2, 3: 0.2, 4: 0.2}, range(2, 5)),  # of equal ones the middle
        ({2: -math.inf, 3: -math.inf, 4: -math.inf}, range(1, 5)),  # where all diverge, lower ones
        ({i: -math.inf for i in range(7)}, range(5)),
    ],
)
def test_rates_are_widened_until_the_best_is_inside(quality: dict[int, float], tried: range) -> None:
    assert widened(range(2, 5), 7, quality.get) == tried


def test_a_grid_has_a_cell_for_each_rate_and_seed() -> None:
    def plan(rate: float) -> Callable[[Records], list[PlannedCell]]:
        label = f"{rate:g}"
        cells = [PlannedCell({"rate": label, "seed": s}, Job("run", {"lr": rate, "seed": s})) for s in (0, 1)]
        return lambda records: cells

    grid = grid_of_rates([plan(rate) for rate in (1.0, 2.0, 3.0, 4.0, 5.0)], range(1, 4))
    assert [(cell.cell["rate"], cell.cell["seed"]) for cell in grid({})] == [(r, s) for r in "234" for s in (0, 1)]
    values = {2.0: 0.1, 3.0: 0.2, 4.0: 0.3}
    ended = [Job("run", {"lr": rate, "seed": 0}) for rate in values]
    records = {
        job.name: JobRecord(job.name, "run", dict(job.spec), {"best": {"metric": "f1", "value": value}}, None, 1.0)
        for job, value in zip(ended, values.values(), strict=True)
    }
    assert [cell.cell["rate"] for cell in grid(records)] == [r for r in "2345" for _ in (0, 1)]


def test_rates_are_chosen_on_validation_under_two_seeds() -> None:
    """Every rate is tried once, and the two best again; a diverged try is worse than any, a failed one is an error."""
    rates = (1e-2, 3e-3, 3e-2)
    Tries = dict[tuple[int, float], float | None]

    def plan(rate: float) -> Callable[[Records], list[PlannedCell]]:
        cells = [PlannedCell({"method": "lora", "seed": s}, Job("run", {"lr": rate, "seed": s})) for s in (0, 1, 2)]
        return lambda records: cells

    def record(seed: int, rate: float, value: float | None, error_kind: Any) -> JobRecord:
        job = Job("run", {"lr": rate, "seed": seed})
        result = None if value is None else {"best": {"metric": "accuracy", "value": value}}
        error = "no" if value is None else None
        return JobRecord(job.name, "run", dict(job.spec), result, error, 1.0, error_kind if error else None)

    study = Study("s", "?", choose_rates([plan(rate) for rate in rates]))

    def planned(tries: Tries, error_kind: str = "diverged") -> tuple[set[float], list[PlannedCell], set[Any]]:
        records = {one.name: one for one in (record(*at, value, error_kind) for at, value in tries.items())}
        cells = list(study.plan_cells(records))
        missing = {(j.spec["seed"], j.spec["lr"]) for j in study.jobs(records) if j.name not in records}
        return {cell.job.spec["lr"] for cell in cells if cell.job is not None}, cells, missing

    def first(*values: float | None) -> Tries:
        return {(0, rate): value for rate, value in zip(rates, values, strict=False)}

    assert [(job.spec["lr"], job.cell) for job in study.jobs({})] == [
        (rate, {"method": "lora", "seed": 0, "try": i}) for i, rate in enumerate(rates, 1)
    ]
    assert planned(first(0.7, 0.8))[::2] == (set(), {(0, 3e-2)}), "one try is missing"
    assert planned(first(0.7, 0.8, 0.6))[::2] == (set(), {(1, 1e-2), (1, 3e-3)}), "the two best are tried again"
    assert planned(first(0.7, 0.7, 0.7))[2] == {(1, 1e-2), (1, 3e-3)}, "of equal ones the first"
    second = {(1, 1e-2): 0.75, (1, 3e-3): 0.6}
    assert planned(first(0.7, 0.8, 0.6) | second)[::2] == ({1e-2}, {(2, 1e-2)}), "1.45 against 1.4"
    assert planned(first(0.7, 0.8, 0.6) | second | {(1, 3e-3): 0.66})[0] == {3e-3}
    assert planned(first(0.7, 0.8, 0.6) | {(1, 1e-2): 0.2, (1, 3e-3): None})[0] == {1e-2}, (
        "it diverges under the second"
    )
    assert planned(first(None, 0.2, None) | {(1, 3e-3): 0.2, (1, 1e-2): 0.9})[0] == {3e-3}
    for tries in (first(None, None, None), first(0.7, 0.8, 0.6) | {(1, 1e-2): None, (1, 3e-3): None}):
        chosen, cells, _ = planned(tries)
        assert not chosen and all(cell.lost and "at every learning rate" in cell.why for cell in cells)
    for tries in (first(0.7, None, 0.8), first(0.7, 0.8, 0.6) | {(1, 1e-2): 0.7, (1, 3e-3): None}):
        chosen, cells, _ = planned(tries, error_kind="exception")
        assert not chosen and all(cell.lost and "failed: no" in cell.why for cell in cells)


@pytest.mark.parametrize("waits", [True, False])
def test_a_search_goes_on_while_the_best_rate_is_at_an_edge(waits: bool) -> None:
    """Under the first seed, or in the mean; what was stored before keeps its best rate, and says that it is at an edge.

    Rates 2, 3 and 1 are tried first. The best is at 4, or at 3 with a second seed that prefers it.
    """
    run: list[tuple[float, int]] = []

    def search(
        value: Callable[[float, int], float], stored: tuple[float, ...] = (), but: tuple[float, int] | None = None
    ) -> PlannedCell:
        """The first seed's cell when all has ended, or when the `stored` rates have under each seed `but` for one."""
        cells = {
            rate: [PlannedCell({"seed": s}, Job("run", {"lr": float(rate), "seed": s})) for s in (0, 1, 2)]
            for rate in range(6)
        }
        study = Study(
            "s", "?", choose_rates([lambda _, one=one: one for one in cells.values()], (2, 3, 1), waits=waits)
        )
        rows: dict[str, JobRecord] = {}
        run.clear()
        left = [one.job for rate in stored for one in cells[int(rate)]] or study.jobs({})
        while left:
            for job in left:
                assert job is not None
                rate, seed = job.spec["lr"], job.spec["seed"]
                if (rate, seed) == but:
                    continue
                best = {"best": {"metric": "f1", "value": value(rate, seed)}}
                rows[job.name] = JobRecord(job.name, "run", dict(job.spec), best, None, 1.0)
                run.append((rate, seed))
            left = [] if stored else [job for job in study.jobs(rows) if job.name not in rows]
        return study.plan_cells(rows)[0]

    def rate_of(planned: PlannedCell) -> float | None:
        return None if planned.job is None else planned.job.spec["lr"]

    inside = search(lambda rate, seed: -abs(rate - 2))
    assert rate_of(inside) == 2 and inside.extra == {EDGE: False} and {rate for rate, _ in run} == {1, 2, 3}
    further = search(lambda rate, seed: -abs(rate - 4))
    assert rate_of(further) == 4 and further.extra == {EDGE: False} and max(run)[0] == 5
    by_the_mean = search(lambda rate, seed: -abs(rate - (2 if seed == 0 else 3.4)) * (1 + seed))
    assert rate_of(by_the_mean) == 3 and by_the_mean.extra == {EDGE: False} and max(run)[0] == 4
    at_the_end = search(lambda rate, seed: rate)
    assert rate_of(at_the_end) == 5 and at_the_end.extra == {EDGE: True}, "the ladder ends here"
    stored = search(lambda rate, seed: -abs(rate - 4), (1, 2, 3))
    assert rate_of(stored) == (None if waits else 3) and stored.extra == ({} if waits else {EDGE: True})
    assert 4.0 in {one.job.spec["lr"] for one in stored.tries if one.job is not None}, "it is still to be tried"
    first, second = {1: 0.0, 2: 1.0, 3: 0.5, 4: 0.6}, {3: 5.0}
    half_stored = search(lambda rate, seed: (second if seed else first).get(int(rate), 0.0), (1, 2, 3, 4), but=(4, 1))
    assert rate_of(half_stored) == (None if waits else 3), "the rate at the edge has ended under the first seed alone"
    assert rate_of(search(lambda rate, seed: -abs(rate - 4), (1, 2))) is None, "one of the first rates has not ended"
