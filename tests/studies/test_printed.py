"""The papers' printed tables: transcribed rightly, and on them claims have the papers' verdicts."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from transformers import BertConfig

import deltune
from deltune.studies.claims.decisions import PrintedFinding, check_printed
from deltune.studies.claims.selectors import FLOOR
from deltune.studies.claims.statistics import average_ranks
from deltune.studies.jobs.store import read_results
from deltune.studies.papers.apet import PAPER_FAMILIES
from deltune.studies.papers.ln import SIZES
from deltune.studies.papers.published import (
    AP_LOW_THRESHOLDS,
    AP_TABLE2,
    CHOICES,
    LN_TABLE1,
    LN_TABLE2,
    LN_TABLE5,
    SHARES_OF_BOTH_SITES,
    TASKS,
    UV_TABLE3,
    UV_TABLE4,
    UV_TABLE5,
    UV_TABLE6,
    UV_TABLE12,
    UV_TABLE12_BY_BUDGET,
    Published,
)
from deltune.studies.papers.registry import CLAIMS, STUDIES, paper_statements
from deltune.studies.papers.uv import TABLE12_SHARES
from deltune.studies.report.page import build_section
from deltune.studies.scales import StudySetup
from deltune.train.metrics.registry import METRICS

RESULTS = Path(__file__).parents[2] / "results"

VERDICTS = {
    "ln/nlu": "+++.+++++", "ln/nlg": "+++++-", "ln/time": "..........", "ln/terms": "....", "ln/ablation": "++-+++",
    "ln/unified": "....", "uv/budget": "+++", "uv/insertion": "+++", "uv/representation": "+++++++",
    "uv/composition": "++++++", "uv/integration": "++++++.", "uv/full": "+++", "uv/glue": "++.", "ap/gap": "...",
    "ap/structure": "...", "ap/convergence": "..", "ap/thresholds": ".+..", "ap/all": "-+", "ap/transfer": "..",
}  # fmt: skip
"""Study -> for each claim whether the printed numbers agree (+), disagree (-), or are none (.)."""


def checked(study: str) -> list[PrintedFinding]:
    statements = paper_statements(study)
    return [check_printed(claim, statements.tables) for claim in statements.claims]


@pytest.mark.parametrize("study", CLAIMS)
def test_the_printed_tables_give_the_papers_verdicts(study: str) -> None:
    printed = checked(study)
    assert "".join({True: "+", False: "-", None: "."}[one.agrees] for one in printed) == VERDICTS[study]
    for one in printed:
        assert one.agrees is not False or one.claim.contradiction, (
            f"{one.claim.text}: a contradiction without its reason"
        )
        assert (one.agrees is None) == (one.deciding is None) == (not one.source)


def test_sizes_that_small_runs_have_in_place_of_the_papers() -> None:
    """What is said beside a claim is what the committed runs have."""
    words = {name: [claim.miniature for claim in CLAIMS[name] if claim.miniature] for name in CLAIMS}
    shares: dict[str, dict[str, str]] = {}
    for name in ("uv/glue", "ln/nlu"):
        study = STUDIES[name](StudySetup("small", runs=False))
        records = {record.name: record for record in read_results(RESULTS, [name])}
        outcomes = [one for one in study.outcomes(records) if one.error is None and "method" in one.cell]
        shares[name] = {one.cell["method"]: f"{one.count['percent']:.2f} %" for one in outcomes}
    assert f"MAM trains {shares['uv/glue']['mam']}" in words["uv/glue"][0]
    of_methods = sorted({shares["ln/nlu"][method] for method in ("adapter", "prefix", "lora", "mam")})
    assert f"{of_methods[0]} to {of_methods[-1]}" in words["ln/nlu"][1]
    trained = {o.cell["method"]: o.count["method"] for o in outcomes if o.error is None}
    assert f"{trained['layernorm'] / trained['bitfit']:.2f} times" in words["ln/nlu"][0]
    assert f"{38_400 / 82_944:.2f} times" in words["ln/nlu"][0]
    expressions = {
        (name, *(planned.cell[axis] for axis in axes)): job.spec["method"]
        for name, axes in (("uv/integration", ("method", "task")), ("uv/representation", ("method", "task", "budget")))
        for planned in STUDIES[name](StudySetup("small", runs=False)).plan_cells({})
        for job in [one.job for one in (planned, *planned.tries)]  # until its rate is chosen a cell has tries alone
        if job is not None and planned.cell.keys() >= {*axes}  # floors have axes of their own
    }
    for task, rank in (("g2p_us_to_gb", 128), ("conll04", 40)):
        assert f"rank={rank}" in expressions["uv/integration", "parallel_adapter_ffn", task]
        assert f"r = {rank}" in words["uv/integration"][0]
    for task, many, few in (("g2p_us_to_gb", "3", "0.4"), ("conll04", "0.4", "0.05")):
        assert "length=32" in expressions["uv/representation", "prefix", task, many]
        assert "length=4" in expressions["uv/representation", "prefix", task, few]
    assert "32 vectors become 4" in words["uv/representation"][0]


@pytest.mark.parametrize(("study", "text", "effect", "source"), [
    ("uv/representation", "reducing 200 vectors", 1.9 - 0.4, "table 4"),
    ("uv/representation", "at a tiny budget the gate", 35.2 - 34.9, "table 4"),
    ("uv/full", "prefix-tuning does not keep", ((20.40 - 20.46) + (35.1 - 35.6)) / 2, "table 12"),
    ("ap/all", "the lead of full tuning", None, "table 2, without tasks of which a number is illegible"),
    ("ap/thresholds", "larger models need more", None, "§5.3"),
])  # fmt: skip
def test_printed_numbers_are_those_of_the_paper(study: str, text: str, effect: float | None, source: str) -> None:
    (printed,) = [one for one in checked(study) if one.claim.text.startswith(text)]
    assert printed.deciding is not None and printed.source == source
    assert effect is None or printed.deciding.effect == pytest.approx(effect)
    assert "per factor" not in printed.deciding.unit


def test_shares_that_stand_for_both_sites() -> None:
    """Those of BART-large by the paper's table 11; table 12 prints the same, and 7.2 % for LoRA at attention."""
    vector = 100 * 2 * 1024 * 12 / 406_291_456
    for size, share in SHARES_OF_BOTH_SITES.items():
        shares = [float(one) for one in share.split(" to ")]
        at_ffn, at_attention = {
            "lora": (102 * 5 * 2 * vector, 200 * 2 * 3 * vector),
            "1024": (1024 * 2 * vector,) * 2,
        }.get(size) or (int(size) * 2 * vector, int(size) * 3 * vector)
        assert (shares[0], shares[-1]) == pytest.approx((at_ffn, at_attention), abs=0.1), size
    assert set(SHARES_OF_BOTH_SITES.values()) >= {key[-1] for key in UV_TABLE12_BY_BUDGET}
    assert set(TABLE12_SHARES["large"]) == {key[-1] for key in UV_TABLE12_BY_BUDGET}


def test_ranges_that_stand_where_no_comparison_is_printed() -> None:
    ranges = {claim.text: claim.printed_range for claims in CLAIMS.values() for claim in claims if claim.printed_range}
    assert len(ranges) == 2
    (of_thresholds,) = [words for text, words in ranges.items() if "low thresholds" in text]
    for model, (low, high) in AP_LOW_THRESHOLDS.items():
        assert f"{low:,.0f} to {high:,.0f} on {model.replace('t5', 'T5').replace('bert', 'BERT')}" in of_thresholds
    for one in (one for study in CLAIMS for one in checked(study) if one.claim.printed_range):
        assert one.agrees is None


FAR_LARGER = {"ln/time": 1, "ln/ablation": 1, "ap/gap": 1, "ap/structure": 2, "ap/convergence": 1, "ap/all": 1}
"""Study -> how many of its claims are about models far larger than those of small scale."""


@pytest.mark.parametrize("study", CLAIMS)
def test_what_is_about_far_larger_models_says_how_large_ours_are(study: str) -> None:
    reasons = [claim.untestable for claim in CLAIMS[study] if "million" in claim.untestable]
    assert len(reasons) == FAR_LARGER.get(study, 0)
    records = {record.name: record for record in read_results(RESULTS, [study])}
    if reasons and records:  # ap/gap has been given more rows of data, on which nothing has run yet
        outcomes = STUDIES[study](StudySetup("small", runs=False)).outcomes(records)
        largest = max(float(o.extra.get("parameters") or o.count.get("denominator_size") or 0) for o in outcomes)
        assert all(f"model here has {largest / 1e6:.0f} million" in reason for reason in reasons)


def test_a_sentence_that_is_repeated_names_the_study_that_has_it_first() -> None:
    order = list(CLAIMS)
    repeated = [(name, claim) for name, claims in CLAIMS.items() for claim in claims if claim.repeats]
    assert len(repeated) == 8
    for name, claim in repeated:
        assert order.index(claim.repeats) < order.index(name)
        assert any(not first.repeats for first in CLAIMS[claim.repeats])
    texts = [claim.text for claims in CLAIMS.values() for claim in claims if not claim.repeats]
    assert len(texts) == len(set(texts)) == 79


def test_contradictions_inside_a_paper() -> None:
    """All of them, so that none is added or lost unnoticed."""
    contradicted = {claim.text for claims in CLAIMS.values() for claim in claims if claim.contradiction}
    assert contradicted == {
        "terms change more for answers and entities than for “binary classification”: SST-2, SICK and CB",
        "prefix + LN beats MAM with fewer parameters", "full tuning ranks best of all",
        "the norm of attention alone beats that of the FFN alone",
        "on the largest model adjacent parameters match full tuning in every group: no more than 1 point below "
        "(margin ours)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "width", "layers", "size"), [("bert-base", 768, 12, "8"), ("bert-large", 1024, 24, "16")]
)
def test_by_the_sizes_of_the_text_mam_trains_fewer_than_prefix_and_norms(
    model: str, width: int, layers: int, size: str
) -> None:
    config = BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, intermediate_size=4 * width
    )
    by_text, by_table, prefix = (
        deltune.count(config, SIZES[model][name]).percent for name in ("mam_text", "mam", "prefix_layernorm")
    )
    assert by_text < prefix < by_table
    assert SIZES[model]["mam_text"] == f"mam(length=8, rank={size})"
    printed = {name: LN_TABLE1[model, name, "percent"] for name in ("mam", "prefix_layernorm")}
    assert by_table == pytest.approx(printed["mam"], rel=0.1) and by_text < 0.6 * printed["mam"]


# -- transcriptions


@pytest.mark.parametrize("table", [LN_TABLE1, LN_TABLE5])
def test_averages_are_those_of_their_rows(table: Published) -> None:
    """Scores and averages have one digit each: they differ by less than two halves of a tenth."""
    for key, average in table.items():
        if key[-1] == "average":
            assert fmean(table[*key[:2], task] for task in TASKS) == pytest.approx(average, abs=0.1), key


def test_the_rank_column_of_ln_table_2_does_not_follow_from_its_numbers() -> None:
    methods = [key[0] for key in LN_TABLE2 if key[1] == "rank"]
    columns = list(dict.fromkeys(key[1:] for key in LN_TABLE2 if len(key) == 3))
    values = np.array([[LN_TABLE2[method, *column] for method in methods] for column in columns])
    ranks = average_ranks(values, [METRICS[metric].better == "lower" for _, metric in columns])
    ours, printed = dict(zip(methods, ranks, strict=True)), {m: LN_TABLE2[m, "rank"] for m in methods}
    assert len(columns) == 14 and sum(printed.values()) == pytest.approx(36, abs=0.05) == pytest.approx(
        sum(ranks), abs=0.05
    )
    assert ours["prefix_layernorm"] == pytest.approx(2.46, abs=0.005) and ours["full"] == pytest.approx(2.71, abs=0.005)
    assert min(printed, key=printed.__getitem__) == "full" != min(ours, key=ours.__getitem__)


def test_uv_tables_repeat_each_other() -> None:
    scores = ("xsum.rouge1", "xsum.rouge2", "xsum.rougeL", "wmt16_en_ro.bleu")
    for column in (column.split(".") for column in scores):
        assert UV_TABLE3["attention", "prefix", *column] == UV_TABLE12["attention", "prefix", "200", *column]
        assert UV_TABLE6["prefix", *column] == UV_TABLE3["attention", "prefix", *column]
        for site in ("attention", "ffn"):
            for ours, name in (("adapter", "sequential"), ("parallel_adapter", "parallel")):
                assert UV_TABLE12[site, ours, "200", *column] == UV_TABLE3[site, name, *column]
    for metric, other in (("rouge1", "rouge1"), ("rouge2", "rouge2"), ("rougeL", "rougeLsum")):
        assert UV_TABLE12["ffn", "lora", "102", "xsum", metric] == UV_TABLE5["lora s=4", "xsum", other]
        assert UV_TABLE12["ffn", "parallel_adapter", "512", "xsum", metric] == UV_TABLE5["pa s=1", "xsum", other]
    for method in ("prefix", "parallel_adapter"):
        assert UV_TABLE4["attention", method, "200"] == UV_TABLE12["attention", method, "200", "wmt16_en_ro", "bleu"]


def test_ap_table_2_has_every_cell_but_five() -> None:
    cells = {key[:2] for key in AP_TABLE2}
    assert len(cells) == 6 * 5 and len(AP_TABLE2) == 5 * 3 * (12 + 9) - 5
    assert all(0 < number <= 100 for number in AP_TABLE2.values())


@pytest.mark.parametrize(("model", "parameters"), [
    ("bert-small", 28_763_648), ("bert-base", 109_482_240), ("bert-large", 335_141_888), ("t5-small", 76_961_152),
    ("t5-base", 247_577_856), ("t5-xxl", 11_135_332_352),
])  # fmt: skip
def test_the_n_of_each_group_gives_the_printed_share(model: str, parameters: int) -> None:
    family = next(family for family in PAPER_FAMILIES.values() if model in family.models)
    for group, n in zip(("prompt", "bitfit", "lora", "adapter"), family.models[model].sizes, strict=True):
        printed = AP_TABLE2[model, group, "percent"]
        digits = 3 if printed < 0.01 else 2
        assert abs(100 * n / parameters - printed) <= 10**-digits, group


def test_every_choice_is_of_a_study() -> None:
    assert {study for studies, _ in CHOICES for study in studies} <= set(STUDIES)
    assert paper_statements("ln/nlu").choices and not paper_statements("a sweep").claims


def test_each_run_of_transfer_is_tested_on_four_tasks() -> None:
    study = STUDIES["ap/transfer"](StudySetup("small", runs=False))
    records = {record.name: record for record in read_results(RESULTS, ["ap/transfer"])}
    section = build_section(study, records, paper_statements("ap/transfer"), small=True)
    assert sum(FLOOR not in outcome.cell for outcome in section.outcomes) == 640
