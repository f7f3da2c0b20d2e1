"""Guesses of a newcomer: other libraries' words are answered with ours, and never run as something else."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    PeftType,
    PrefixTuningConfig,
    PromptTuningConfig,
)
from safetensors.torch import save_file

import deltune
from deltune.interop import peft_table
from deltune.methods import other_names
from deltune.methods.registry import REGISTRY, VOCABULARY
from deltune.methods.spec import SITES
from deltune.models import load_config
from deltune.train.config import PLACES, RunConfig
from deltune.train.data.columns import guess_task_kind
from deltune.train.data.readers import DataFile
from deltune.train.data.rows import NumberedRows
from tables.families import FAMILIES
from tables.specimens import batch, build

NAMES = {
    "ln_tuning": "Here it is called layernorm.",
    "LoRA(rank=8)": "Here it is called lora.",
    "LoraConfig(r=8)": "Here it is called lora.",
    "prompt_tuning(length=8)": "Here it is called prompt.",
    "PrefixTuning": "Here it is called prefix.",
    "adapter_tuning": "Here it is called adapter.",
    "seq_bn": "Here it is called adapter(style='pfeiffer').",
    "p_tuning(length=4)": "deltune has no such method.",
    "xloraconfig": "Here it is called xlora.",
    "Lily": "deltune has no such method: its router is averaged over a batch",
    "ladder_side_tuning(width=4)": "Here it is called ladder.",
    "LST": "Here it is called ladder.",
    "Shadow": "deltune has no such method: it is a second model beside this one",
    "lora(r=8)": "Here it is called 'rank'.",
    "lora(lora_alpha=16)": "Here it is called 'alpha'.",
    "mam(lora_alpha=16)": "Here it is called 'scale'.",
    "lora(target_modules=['q_proj'])": "Here it is called 'at'.",
    "lora(bias='all')": "Add a term that trains biases: … + bitfit(which='linear').",
    "adapter(reduction_factor=16)": "Here it is called 'rank'. rank is the width of the model divided by it.",
    "prefix(num_virtual_tokens=8)": "Here it is called 'length'.",
    "lora(at=('q_proj', 'v_proj'))": "unknown site 'q_proj'. Here it is called 'query'.",
    "lora(at=q_proj)": "Here it is called 'query'.",
    "lora(at='all-linear')": "Here it is ('query', 'key', 'value', 'output', 'ffn_up', 'ffn_down').",
    "Modification('mlp', Bottleneck(4))": "unknown site 'mlp'. Here it is called 'ffn'.",
    "Selection(('bias',), areas=('ffn',))": "It is a part of the layers: give of='ffn'.",
}


@pytest.mark.parametrize("expression", NAMES)
def test_an_expression_of_others_is_answered_with_our_word(expression: str) -> None:
    with pytest.raises(deltune.DeltuneError) as caught:
        deltune.parse(expression)
    assert NAMES[expression] in str(caught.value) and "Did you mean" not in str(caught.value).splitlines()[0]


CONFIGS: dict[str, Any] = {
    "lora(rank=4, alpha=16, dropout=0.1, at=('query', 'value'))": LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.1
    ),
    "prompt(length=8)": PromptTuningConfig(num_virtual_tokens=8),
    "prefix(length=8)": PrefixTuningConfig(num_virtual_tokens=8),
    "layernorm": LNTuningConfig(),
    "ia3": IA3Config(),
}


@pytest.mark.parametrize("expression", CONFIGS)
def test_a_configuration_of_peft_is_answered_with_its_expression(expression: str) -> None:
    deltune.parse(expression)
    with pytest.raises(deltune.DeltuneError) as caught:
        deltune.parse(CONFIGS[expression])
    assert f'What it configures is written "{expression}".' in str(caught.value)


OTHER_CONFIGS: dict[str, Any] = {
    "DoRA": LoraConfig(use_dora=True),
    "ranks of modules": LoraConfig(rank_pattern={"q_proj": 4}),
    "modules of no site": LoraConfig(target_modules=["q_proj", "shiny"]),
    "AdaLoRA": AdaLoraConfig(total_step=10),
    "LoHa": LoHaConfig(),
}


@pytest.mark.parametrize("config", OTHER_CONFIGS)
def test_a_configuration_that_no_expression_has_gets_none(config: str) -> None:
    with pytest.raises(deltune.DeltuneError, match="method is an expression") as caught:
        deltune.parse(OTHER_CONFIGS[config])
    assert "lora(" not in str(caught.value)


@pytest.mark.parametrize("kind", PeftType)
def test_a_type_of_peft_is_ours_or_no_method_and_never_a_similar_name(kind: PeftType) -> None:
    try:
        deltune.parse(f"{kind.value}(r=8)")
    except deltune.DeltuneError as error:
        assert "Did you mean" not in str(error)
        assert "Here it is called" in str(error) or "deltune has no such method" in str(error)


@pytest.mark.parametrize("kind", ["BONE", *peft_table.REFUSED])
def test_a_folder_of_peft_without_translation_says_what_to_do(kind: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    save_file({"base_model.model.x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(deltune.DeltuneError, match=rf"peft_type '?{kind}.*merge_and_unload") as caught:
        deltune.load(build(FAMILIES["bert"], "base"), tmp_path)
    assert "Did you mean" not in str(caught.value)


def test_every_type_of_peft_is_read_or_refused_with_a_reason() -> None:
    assert set(peft_table.KINDS) == {kind.value for kind in PeftType}


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel": torch.nn.DataParallel,
    "both": lambda model: torch.compile(torch.nn.DataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_model_inside_of_another_module_is_named(wrapper: str, tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "base")
    wrapped = WRAPPERS[wrapper](model)
    for call in (
        lambda: deltune.attach(wrapped, "lora"),
        lambda: deltune.load(wrapped, tmp_path),
        lambda: deltune.count(wrapped, "lora"),
        lambda: deltune.inspect(wrapped),
        lambda: deltune.fit(wrapped, "lora(rank=?)", "1%"),
    ):
        with pytest.raises(deltune.DeltuneError, match=r"it wraps a BertModel: give that model"):
            call()
    with pytest.raises(deltune.DeltuneError, match="nothing is attached"):
        deltune.tuned(wrapped)
    handle = deltune.attach(model, "layernorm")
    assert deltune.tuned(wrapped) is handle


def test_an_attribute_of_others_is_answered_with_our_word() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'ln_tuning'\. Here it is called layernorm"):
        getattr(deltune, "ln_" + "tuning")
    assert not hasattr(deltune, "foo")


OPTIONS = {
    "learning_rate": "Here it is lr.",
    "per_device_train_batch_size": "Here it is device_batch_size. batch_size is the rows of a step",
    "gradient_accumulation_steps": "Give batch_size",
    "num_train_epochs": "Here it is epochs.",
    "lora_r": 'Here it is method. An expression has it: method "lora(rank=8)".',
    "load_best_model_at_end": "Leave it out",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_others_is_answered_with_ours(option: str) -> None:
    with pytest.raises(deltune.DeltuneError) as caught:
        RunConfig.from_flat(model="minilm", data="tickets", method="lora", **{option: 1})
    assert f"unknown option '{option}'. {OPTIONS[option]}" in str(caught.value)


def test_the_tables_name_what_exists_and_hide_nothing() -> None:
    """Every translation can be written, and no word of others is one of ours."""
    for name, expression in other_names.METHOD_NAMES.items():
        assert expression.partition("(")[0] in REGISTRY, expression
        assert name not in REGISTRY or expression == name
    assert not {other_names.simplified(name) for name in REGISTRY} & other_names.ABSENT_METHODS.keys()
    assert set(other_names.SITE_NAMES.values()) <= set(SITES)
    parameters = {key for make in [*VOCABULARY.values(), *SEAMS] for key in signature(make).parameters}
    assert {key for keys in other_names.ARGUMENT_NAMES.values() for key in keys} <= parameters
    places = {*PLACES, "output", "fresh"}
    assert set(other_names.OPTION_NAMES.values()) <= places
    assert not places & {*other_names.OPTION_NAMES, *other_names.OPTION_NOTES}


TEXTS, LABELS = [f"text number {i}" for i in range(60)], ["good", "bad"] * 30
KINDS: dict[tuple[str, ...], str] = {
    ("source", "targets", "category"): "generation",
    ("source", "target"): "generation",
    ("source", "target: labels"): "classification",
    ("article", "summary", "category"): "classification",
    ("article", "summary"): "generation",
    ("text", "label"): "classification",
    ("text",): "classification",  # which is refused without a label: whether it is running text is asked for
    ("text: running",): "language",
}


@pytest.mark.parametrize("columns", KINDS)
def test_the_kind_of_task_follows_from_the_columns(columns: tuple[str, ...]) -> None:
    labels = ("label", "category", "target: labels")
    values = {c.partition(":")[0]: LABELS if c in labels else TEXTS for c in columns}
    rows = [(i, dict(zip(values, row, strict=True))) for i, row in enumerate(zip(*values.values(), strict=True))]
    name = "train.txt" if columns[0].endswith("running") else "train.jsonl"
    assert guess_task_kind(DataFile(name, NumberedRows(rows)), None) == KINDS[columns]


def test_a_handle_shows_what_a_user_needs_and_warns_of_a_lost_block() -> None:
    tuned = deltune.attach(build(FAMILIES["bert"], "sequence"), "lora")
    assert {"use", "rows", "save", "count", "trainable_parameters"} <= set(dir(tuned))
    assert all(hasattr(tuned, name) for name in dir(tuned))
    assert len(dir(tuned)) < 25 and not any(name.startswith("_") for name in dir(tuned))
    for call in (lambda: tuned.rows(["default"]), tuned.disable):
        with pytest.warns(UserWarning, match="inside of a with block alone"):
            call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tuned.rows(["default"]), tuned.disable():
            pass


PLACES_OF_BIASES = {
    "bitfit(which='ffn')": 6 * (1536 + 384),
    "bitfit(which='attention')": 6 * 4 * 384,
    "Selection(('bias',), of='ffn')": 6 * (1536 + 384 + 384),
    "Selection(('linear.weight',), of='attention')": 6 * 4 * 384 * 384,
    "Selection(('all',), of='ffn', layers='last 2')": 2 * (2 * 384 * 1536 + 1536 + 384 + 2 * 384),
    "lora(rank=1, at='query', layers='last 2')": 2 * 2 * 384,
    "lora(rank=1, at='query', layers='first 5')": 5 * 2 * 384,
    "lora(rank=1, at='query', layers=(-1, 5, 0))": 2 * 2 * 384,
}


@pytest.mark.parametrize("expression", PLACES_OF_BIASES)
def test_sublayers_and_layers_can_be_named(expression: str) -> None:
    """MiniLM: 6 layers, width 384, FFN width 1,536."""
    assert deltune.count(load_config("minilm"), expression).method == PLACES_OF_BIASES[expression]


@pytest.mark.parametrize("layers", ["'last 7'", "(-7,)", "(6,)"])
def test_layers_that_are_not_there_are_refused(layers: str) -> None:
    with pytest.raises(deltune.DeltuneError, match="the encoder has 6 layers, 0 to 5"):
        deltune.count(load_config("minilm"), f"lora(layers={layers})")


SEAMS: tuple[Callable[..., Any], ...] = (
    deltune.attach, deltune.load, deltune.export, deltune.count, deltune.fit, deltune.Tuned.save, deltune.Tuned.use,
    deltune.Tuned.rows, deltune.Tuned.merge, deltune.Tuned.detach, deltune.Tuned.count, deltune.Tuned.delta,
    deltune.Tuned.push_to_hub,
)  # fmt: skip
"""The functions that take over from those of other libraries."""

ARGUMENTS: dict[str, tuple[Callable[[deltune.Tuned, dict[str, Any]], Any], str]] = {
    "attach adapter_name": (lambda t, x: deltune.attach(t.model, "lora", **x), "Here it is called 'name'."),
    "attach peft_config": (lambda t, x: deltune.attach(t.model, **x), "Here it is called 'method'."),
    "attach mixed": (lambda t, x: deltune.attach(t.model, "lora", **x), "has no argument 'mixed'. Leave it out."),
    "attach nmae": (lambda t, x: deltune.attach(t.model, "lora", **x), "Did you mean 'name'? It takes: (model, method"),
    "load adapter_name": (lambda t, x: deltune.load(t.model, "d", **x), "Here it is called 'name'."),
    "load model_id": (lambda t, x: deltune.load(t.model, **x), "Here it is called 'folder'."),
    "load is_trainable": (lambda t, x: deltune.load(t.model, "d", **x), "Leave it out: what is loaded can be"),
    "save save_directory": (lambda t, x: t.save(**x), "Here it is called 'folder'."),
    "save selected_adapters": (lambda t, x: t.save("d", **x), "Here it is called 'name'. Call it once for each"),
    "rows adapter_names": (lambda t, x: t.rows(**x), "rows has no argument 'adapter_names'. Here it is"),
    "use adapter_name": (lambda t, x: t.use(**x), "Here it is called 'name'. It takes: (name, train=None, head_of"),
    "merge safe_merge": (lambda t, x: t.merge(**x), "merge has no argument 'safe_merge'. Leave it out."),
    "merge adapter_names": (lambda t, x: t.merge(**x), "Here it is called 'name'."),
    "attach lora_alpha": (lambda t, x: deltune.attach(t.model, "lora", **x), 'expression, such as "lora(alpha=…)"'),
    "count config": (lambda t, x: deltune.count(t.model, **x), "Here it is called 'method'."),
}  # fmt: skip
"""A function and an argument of others -> a call with it, and what its error says."""


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_of_others_is_answered_with_ours(case: str) -> None:
    tuned = deltune.attach(build(FAMILIES["bert"], "base"), "layernorm")
    call, message = ARGUMENTS[case]
    with pytest.raises(deltune.DeltuneError, match=re.escape(message)):
        call(tuned, {case.split()[1]: "x"})
    with pytest.raises(TypeError, match="attach"):  # any other wrong call is what it is in every function
        deltune.attach()  # type: ignore[call-arg]


MERGES: tuple[tuple[Any, dict[str, Any], str], ...] = (
    (["a", "c"], {}, "unknown delta 'c'"),
    (["a", "a"], {}, "each once"),
    ("a", {"dequantize": "b"}, "dequantize='b' is not True or False"),
)


@pytest.mark.parametrize(("names", "options", "message"), MERGES, ids=[m[2][:40] for m in MERGES])
def test_a_merge_that_is_refused_changes_nothing(names: Any, options: dict[str, Any], message: str) -> None:
    model = build(FAMILIES["bert"], "base")
    for name in ("a", "b"):
        tuned = deltune.attach(model, "lora(rank=2)", name=name)
    with pytest.raises(deltune.DeltuneError, match=re.escape(message)):
        tuned.merge(names, **options)
    assert tuned.names == ("a", "b") and tuned.active == "b"


def test_the_handle_stands_for_the_whole_model() -> None:
    """A loop that PEFT's wrapper was given to gets the same from the handle."""
    model = build(FAMILIES["bert"], "sequence")
    tuned = deltune.attach(model, "lora(rank=2)")
    assert dict(tuned.named_parameters()).keys() == dict(model.named_parameters()).keys()
    trained = [p for p in tuned.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in tuned.trainable_parameters()}
    assert not tuned.eval().training and not any(module.training for module in model.modules())
    assert tuned.train().training and all(module.training for module in model.modules())
    assert not model.eval().training and not tuned.training
    assert {p.dtype for p in tuned.to(torch.float64).parameters()} == {p.dtype for p in model.parameters()}
    assert next(model.parameters()).dtype == torch.float64
    tuned.detach()
    assert list(tuned.parameters()) == [] and not tuned.eval().training


def test_a_folder_is_no_method(tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "sequence")
    deltune.attach(model, "lora(rank=2)").save(tmp_path / "lora_of_mine")
    with pytest.raises(deltune.DeltuneError, match=r"is a folder, .*deltune\.load\(model, "):
        deltune.attach(build(FAMILIES["bert"], "sequence"), str(tmp_path / "lora_of_mine"))


def test_a_head_for_another_purpose_is_refused(tmp_path: Path) -> None:
    """The heads of a classifier and of a tagger have tensors of the same names and shapes."""
    model, tagger = build(FAMILIES["bert"], "sequence"), build(FAMILIES["bert"], "tokens")
    tagger.load_state_dict(dict(model.state_dict()), strict=False)
    deltune.attach(model, "lora(rank=2)").save(tmp_path / "delta")
    with pytest.raises(deltune.DeltuneError, match="load the base model as BertForSequenceClassification"):
        deltune.load(tagger, tmp_path / "delta")

    class Mine(type(build(FAMILIES["bert"], "sequence"))):  # type: ignore[misc]
        """A class of the user's own."""

    model = build(FAMILIES["bert"], "sequence")
    model.__class__ = Mine
    assert deltune.load(model, tmp_path / "delta").names == ("default",)


def test_a_model_is_no_name() -> None:
    """Counting takes a configuration, and says how one is loaded; attaching takes a model."""
    calls: list[Callable[..., Any]] = [deltune.count, lambda model, _: deltune.fit(model, "lora(rank=?)", "1%")]
    for call in calls:
        with pytest.raises(deltune.DeltuneError, match=r"(count|fit) takes .* not the text 'minilm'; load_config\('mi"):
            call("minilm", "lora")
    with pytest.raises(deltune.DeltuneError, match="not to the text 'minilm': load the model first"):
        deltune.attach("minilm", "lora")  # type: ignore[arg-type]


def test_another_delta_is_merged_by_its_name() -> None:
    """As after use(name); and what save_pretrained wrote before is answered with what to save."""
    model = build(FAMILIES["bert"], "base").eval()
    tuned = deltune.attach(model, "lora(rank=2)", "one")
    deltune.attach(model, "layernorm", "two")
    for parameter in tuned.delta("one").parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        tuned.use("one")
        expected = model(**batch(model)).last_hidden_state
        tuned.use("two")
        assert not torch.allclose(model(**batch(model)).last_hidden_state, expected, atol=1e-4)
        assert tuned.merge("one") is model
        torch.testing.assert_close(model(**batch(model)).last_hidden_state, expected)
    assert not hasattr(model, "deltune")


def test_a_folder_of_save_pretrained_is_no_delta(tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "base")
    deltune.attach(model, "layernorm")
    model.save_pretrained(tmp_path)
    shutil.rmtree(tmp_path / "delta")  # what is in use is beside the merged model
    with pytest.raises(deltune.DeltuneError, match=r"no delta .* merged into its weights"):
        deltune.load(model, tmp_path, "again")


SUMS: dict[str, tuple[Callable[[], Any], str]] = {
    "a form": (lambda: deltune.Bottleneck(4) + deltune.lora(), "wrap it: Modification(site, Bottleneck(rank=4))"),
    "a form on the right": (lambda: deltune.lora() + deltune.Bottleneck(4), "wrap it: Modification(site, Bottleneck("),
    "two forms": (lambda: deltune.LowRank(2) + deltune.Bottleneck(4), "cannot be added: only methods can"),
    "a composition": (lambda: deltune.lora() + deltune.Scale(2), "Scale(value=2) is a part of a method"),
    "a class": (lambda: deltune.Bottleneck + deltune.lora(), "call it: Bottleneck(…)"),
    "a function": (lambda: deltune.lora + deltune.bitfit(), "call it: lora(…)"),
    "a text": (lambda: deltune.lora() + "bitfit", "deltune.parse('bitfit')"),
    "a number": (lambda: deltune.lora() + 1, "cannot be added"),
    "a number on the left": (lambda: 1 + deltune.lora(), "cannot be added"),
    "times": (lambda: 2 * deltune.lora(), "methods can only be added"),
    "minus": (lambda: deltune.lora() - deltune.bitfit(), "methods can only be added"),
}


@pytest.mark.parametrize("case", SUMS)
def test_what_cannot_be_added(case: str) -> None:
    make, message = SUMS[case]
    with pytest.raises(deltune.DeltuneError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(("rank", "method"), [(32, "lora(rank=32)"), (65, "Modification('ffn', LowRank(65))")])
def test_a_rank_above_the_full_one_is_warned_of(rank: int, method: str) -> None:
    """It can be had, as in PEFT: the count is exact, and a lower rank does the same."""
    model = build(FAMILIES["bert"], "base")
    full = model.config.hidden_size
    with warnings.catch_warnings():
        warnings.simplefilter("error" if rank <= full else "ignore")
        deltune.attach(model, method)
    if rank > full:
        with pytest.warns(UserWarning, match=rf"has a rank of {full} at most, so that rank={full} reaches"):
            deltune.attach(model, method, "again")


FUNCTIONS = {
    "save_pretrained": "tuned.save(folder)",
    "merge_and_unload": "tuned.merge()",
    "print_trainable_parameters": "print(tuned.count())",
    "set_adapter": "tuned.use(name)",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_method_of_a_peft_model_is_answered_with_ours(name: str) -> None:
    tuned = deltune.attach(build(FAMILIES["bert"], "base"), "layernorm")
    with pytest.raises(AttributeError, match=re.escape(f"Here it is: {FUNCTIONS[name]}.")):
        getattr(tuned, name)
    assert not hasattr(tuned, "no_such_name")


def test_functions_of_peft_are_answered_with_ours() -> None:
    with pytest.raises(AttributeError, match=re.escape("Here it is: deltune.attach(model, method).")):
        deltune.get_peft_model  # type: ignore[attr-defined]  # noqa: B018


def test_columns_by_role_say_which_kind_of_task_it_is() -> None:
    file = DataFile("train.jsonl", NumberedRows([(1, {"a": ["x"], "b": ["O"]})]))
    assert guess_task_kind(file, None, {"tokens": "a", "tags": "b"}) == "tagging"
    assert guess_task_kind(file, None, {"source": "a", "targets": "b"}) == "generation"
    assert guess_task_kind(file, None, {"text": "a", "label": "b"}) == "classification"
    assert guess_task_kind(file, None, ["a", "b"]) == "classification"


def test_adapter_names_are_not_ignored() -> None:
    """A model takes any keyword, so that a ported script would get the answers of another delta."""
    model = build(FAMILIES["bert"], "base")
    deltune.attach(model, "layernorm", name="a")
    with pytest.raises(deltune.DeltuneError, match=r"tuned\.rows"):
        model(**batch(model), adapter_names=["a", "a"])
