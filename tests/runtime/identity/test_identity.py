"""A delta that changes nothing leaves every model class of transformers as it is, whatever it is asked to do.

Rows are model classes × behaviours. A row runs the bare model, then the same weights under deltas that leave the
outputs alone (layer norms not trained yet, LoRA whose up-projection is zero, both), and for some rows the same model
with a trained delta disabled and with one detached. Results are equal bit for bit: adding an exact zero is exact, and
the bare model is frozen as the one under a delta is.

What a bare model refuses is skipped with its own message, which must be one of `tables.LIMITS`; no quick row of the
sample is. Contrastive, constrained and diverse beam search and DoLa are not rows: transformers 5 has none of them
without the hub. Offloaded caches are none either: they need an accelerator.
"""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from tables.versions import needs

from .behaviours import BEHAVIOURS, ROWS, Behaviour, prepared, results, unequal
from .specimens import VARIANTS, Entry, attach, build, entries, move, specimen, variants
from .tables import HIDDEN, LAYERLESS, NORMLESS, REFUSED, UNMADE, limit, looked_up

pytestmark = pytest.mark.filterwarnings("ignore:.*where small updates are lost")

SAMPLE = (
    "BertForSequenceClassification", "RobertaForMaskedLM", "ModernBertForTokenClassification",
    "DistilBertForQuestionAnswering", "ElectraForMultipleChoice", "GPT2LMHeadModel",
    "LlamaForCausalLM", "Gemma2ForCausalLM", "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
)  # fmt: skip
"""Classes whose quick rows run always; all of them do without a refusal."""

MADE = tuple(entry for entry in entries() if not looked_up(UNMADE, entry))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The rows of `test_unchanged`; ten thousand that would be left out again take seconds to collect."""
    if "row" not in metafunc.fixturenames:
        return
    everything = metafunc.config.option.markexpr != "not slow"
    rows = []
    for entry in MADE:
        sample = entry.class_name in SAMPLE
        if looked_up(REFUSED, entry) or not (sample or everything):
            continue
        for row in ROWS:
            quick = sample and row.quick
            if (not row.roles or entry.role in row.roles) and (quick or everything):
                marks = [] if quick else [pytest.mark.slow]
                rows.append(pytest.param(entry, row, id=f"{entry}: {row}", marks=marks))
    metafunc.parametrize(("entry", "row"), rows)


@pytest.mark.sample(60)
def test_unchanged(entry: Entry, row: Behaviour) -> None:
    try:
        bare = prepared(row, entry) if row.prepare else specimen(entry).bare
        expected = results(row, entry, bare)
    except Exception as error:
        reason = limit(entry, row, error)
        if reason is None or (row.quick and entry.class_name in SAMPLE):
            raise
        pytest.skip(f"the bare model: {reason}")
    assert any(isinstance(value, torch.Tensor) for value in expected.values())
    differences = []
    for variant in variants(entry, row.variants):
        model = _subject(entry, row, variant)
        if variant == "disabled":
            with deltune.tuned(model).disable():
                actual = results(row, entry, model)
        else:
            actual = results(row, entry, model)
        differences += [f"{variant}: {line}" for line in unequal(expected, actual)]
    assert not differences, f"{len(differences)} of {len(expected)} × {len(row.variants)} differ"


def _subject(entry: Entry, row: Behaviour, variant: str) -> PreTrainedModel:
    """The model that a row runs beside the bare one."""
    if not row.prepare:
        return specimen(entry).with_delta(variant)
    model = prepared(row, entry)
    attach(entry, model, variant)
    return model


CAUSAL = [
    pytest.param(row, id=str(row), marks=() if row.quick else pytest.mark.slow)
    for row in ROWS
    if "causal" in (row.roles or ("causal",))
]


@pytest.mark.parametrize("behaviour", CAUSAL)
def test_changed(behaviour: Behaviour) -> None:
    """Every behaviour tells a delta that changes something from one that does not."""
    entry = next(entry for entry in MADE if entry.class_name == "LlamaForCausalLM")
    bare, model = (prepared(behaviour, entry) if behaviour.prepare else build(entry) for _ in range(2))
    move(attach(entry, model, "sum"))
    assert unequal(results(behaviour, entry, bare), results(behaviour, entry, model))


@pytest.mark.parametrize("name", ["BigBirdModel", "BigBirdPegasusModel"])
def test_block_sparse(name: str) -> None:
    """A family that attends in blocks until it reads a short input still does so under a delta, and after it."""
    entry = next(entry for entry in MADE if entry.class_name == name)
    blocks = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
    bare, model = build(entry, **blocks), build(entry, **blocks)
    expected = results(BEHAVIOURS["long"], entry, bare)
    tuned = deltune.attach(model, "layernorm")
    assert not unequal(expected, results(BEHAVIOURS["long"], entry, model))
    tuned.detach()
    assert not unequal(expected, results(BEHAVIOURS["long"], entry, model))


@pytest.mark.slow
@pytest.mark.parametrize("entry", [e for e in MADE if looked_up(REFUSED, e)], ids=str)
def test_refused(entry: Entry) -> None:
    """A family that deltune cannot have is refused in words, and the model goes on as before."""
    model = build(entry)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = results(ROWS[0], entry, build(entry))
    with pytest.raises(deltune.DeltuneError, match=looked_up(REFUSED, entry)):
        attach(entry, model, "layernorm")
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not unequal(expected, results(ROWS[0], entry, model))


TABLES = {"unmade": UNMADE, "refused": REFUSED, "hidden": HIDDEN, "normless": NORMLESS, "layerless": LAYERLESS}


@needs("transformers", "5.23")
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_tables(table: dict[str, str]) -> None:
    """Every row of a table is a class or a family of this version of transformers."""
    names = {entry.class_name for entry in entries()} | {entry.model_type for entry in entries()}
    assert not table.keys() - names


LACKING = [
    (e, table, v)
    for table, v in ((HIDDEN, "lora"), (LAYERLESS, "lora"), (NORMLESS, "layernorm"))
    for e in MADE
    if looked_up(table, e)
]


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "table", "variant"), LACKING, ids=[f"{e}: {v}" for e, _, v in LACKING])
def test_lacking(entry: Entry, table: dict[str, str], variant: str) -> None:
    """A delta that a family has no place for is refused by name."""
    with pytest.raises(deltune.DeltuneError, match=looked_up(table, entry)):
        deltune.attach(build(entry), VARIANTS[variant])


@pytest.mark.slow
@pytest.mark.parametrize("entry", [e for e in entries() if looked_up(UNMADE, e)], ids=str)
def test_unmade(entry: Entry) -> None:
    """What is said not to be had here cannot be had; a class that can belongs to the others."""
    with pytest.raises(Exception):  # noqa: B017  whatever the family's own code raises
        results(ROWS[0], entry, build(entry))
