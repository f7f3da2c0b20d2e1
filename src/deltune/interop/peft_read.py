"""Reads PEFT folders: adapter_config.json and the tensors beside it.

PEFT names a tensor base_model.model.MODULE.lora_A.weight, where a module is a whole linear, fused or not. PEFT computes
y + (α/r) B A x for LoRA; l ⊙ y for IA3, or W (l ⊙ x) in `feedforward_modules`; a tuned copy in place of a norm; prompt
vectors before the embeddings; and a prefix as the content of the cache, so that positions shift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import torch

from ..anatomy.types import Anatomy
from ..errors import DeltuneError, error_from_problems, first_names, unknown_name, word_list
from ..methods.compositions import Add, Scale
from ..methods.forms.hidden import Rescale
from ..methods.forms.low_rank import LowRank
from ..methods.library import ia3, layernorm, lora, prefix, prompt
from ..methods.resolve import resolve
from ..methods.spec import OTHER_PROJECTIONS, PROJECTIONS, Method, Modification
from .base import (
    ForeignFolder,
    Patterns,
    PlacedTensors,
    Translation,
    UnusedTensors,
    locations_or_none,
    method_from_pieces,
    method_selecting,
    methods_selecting,
    rows_of_columns,
    tensors_by_file_name,
)

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
NAME_PREFIX = "base_model.model."
PROMPT_TENSOR = "prompt_embeddings"

_COMMON_OPTIONS = {"peft_type", "task_type", "base_model_name_or_path", "peft_version", "revision", "inference_mode",
           "auto_mapping", "modules_to_save"}  # fmt: skip
_TARGET_OPTIONS = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"}
_TOKEN_OPTIONS = {"num_virtual_tokens", "token_dim", "num_attention_heads", "num_layers"}
READ_OPTIONS: dict[str, set[str]] = {
    "LORA": {*_TARGET_OPTIONS, "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora",
             "megatron_core", "qalora_group_size", "ensure_weight_tying", "eva_config", "runtime_config"},
    "IA3": {*_TARGET_OPTIONS, "feedforward_modules", "init_ia3_weights"},
    "LN_TUNING": _TARGET_OPTIONS,
    "PROMPT_TUNING": {*_TOKEN_OPTIONS, "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path",
                      "tokenizer_kwargs"},
    "PREFIX_TUNING": {*_TOKEN_OPTIONS, "encoder_hidden_size", "prefix_projection", "init_weights"},
}  # fmt: skip
"""The types of adapters that have a translation, each with the options that are read or have no effect once trained."""

_OTHER_TYPES = "It has no translation: where PEFT can merge it (merge_and_unload), save the merged model and tune that."

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base's weights
    "num_transformer_submodules": (1,),
}


# -- reading ----------------------------------------------------------------------------------------------------------


def read_peft(
    anatomy: Anatomy,
    folder: ForeignFolder,
    base_value: Callable[[str], torch.Tensor],
    modules: Iterable[str],
    windowed: bool = False,
) -> Translation:
    """Translate a PEFT folder for a model.

    `base_value` returns a weight of the model by its name. PEFT saves the base's own embeddings where they are adapted;
    they are no part of the adapter, and have to be this model's. `modules` are the paths of the model's modules, and
    `windowed` says that some of its attentions have a sliding window.
    """
    options, kind = folder.options, str(folder.options.get("peft_type"))
    if kind not in READ_OPTIONS:
        raise DeltuneError(f"{folder.where}: {unknown_name('peft_type', kind, READ_OPTIONS, hint=_OTHER_TYPES)}")
    problems = [
        f"option {name}={value!r} has no translation"
        for name, value in options.items()
        if name not in _COMMON_OPTIONS | READ_OPTIONS[kind] and value and value not in _NEUTRAL_VALUES.get(name, ())
    ]
    if kind in ("PROMPT_TUNING", "PREFIX_TUNING"):
        problems += _decoder_problems(anatomy, kind, windowed)
    if problems:
        raise error_from_problems(str(folder.where), problems)
    unused = UnusedTensors(anatomy, folder.tensors, NAME_PREFIX)
    incomplete = _head_problems(anatomy, options, unused)
    if kind in _LEAVES:
        incomplete += _target_problems(anatomy, kind, options, unused, modules)
    head = unused.take_all([t.name for t in anatomy.tensors if t.area == "head"])
    problems = _other_embeddings(anatomy, unused, base_value)
    if problems:
        raise error_from_problems(str(folder.where), problems, fault="model")
    try:
        method, tensors = _READERS[kind](anatomy, options, unused)
        saved, values = _read_saved_modules(anatomy, unused, bool(options.get("ensure_weight_tying")))
    except DeltuneError as error:
        unused.check(folder.where, [*incomplete, str(error)])
        raise
    unused.check(folder.where, incomplete)
    return Translation(sum(saved, method), tensors | values, head)


_LORA_OF_LINEAR = ("lora_A.weight", "lora_B.weight")
_LORA_OF_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_IA3_LEAF = "ia3_l"
_LEAVES: dict[str, tuple[str, ...]] = {
    "LORA": (*_LORA_OF_LINEAR, *_LORA_OF_EMBEDDING), "IA3": (_IA3_LEAF,),
    "LN_TUNING": ("ln_tuning_layers.weight", "ln_tuning_layers.bias"),
}  # fmt: skip
"""Endings of the names of an adapter's tensors in the modules that it changes."""

_GATED = ("gate_proj", "up_proj")
_OUTSIDE_FFN = tuple(site for site in OTHER_PROJECTIONS if site not in _GATED)

MethodAndTensors = tuple[Method, dict[str, torch.Tensor]]


def _target_problems(
    anatomy: Anatomy, kind: str, options: Mapping[str, Any], unused: UnusedTensors, modules: Iterable[str]
) -> list[str]:
    """Compare the modules that the options target with those that the file has tensors of."""
    if options.get("target_modules") is None:
        return ["option target_modules is missing, so nothing says which modules the folder should have tensors of"]
    owners = {name.rpartition(".")[0] for t in anatomy.tensors for name in (t.name, *t.aliases)}
    paths = [path for path in modules if path in owners and unused.name_in_file(path) is not None]
    targeted = _targets(anatomy, options, unused, paths)
    present = {path for path in paths if any(f"{path}.{leaf}" in unused.tensors for leaf in _LEAVES[kind])}
    missing = [path for path in paths if path in targeted - present]
    others = [path for path in paths if path in present - targeted]
    problems = [f"missing tensors of {_listed(missing)}, which its options target"] if missing else []
    if others:
        problems.append(f"extra tensors of {_listed(others)}, which its options do not target")
    return problems


def _targets(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors, paths: list[str]) -> set[str]:
    """Return which of the modules the options target, by PEFT's rules and the names in the model of the file."""
    target, layers = options["target_modules"], options.get("layers_to_transform")
    excluded, saved = _named(options, "exclude_modules"), options.get("modules_to_save") or ()
    saved_whole = Patterns("modules_to_save", saved, r"(?:^|.*\.){}(?:$|\..*)")
    of_layers = options.get("layers_pattern") or r"[^.]*"
    stems = [of_layers] if isinstance(of_layers, str) else of_layers
    layer_of = Patterns("layers_pattern", stems, r"(?:^|.*?\.){}\.(\d+)\.")
    if all_linear := isinstance(target, str) and target.lower() == "all-linear":
        head = "" if options.get("task_type") != "SEQ_CLS" else next(iter(anatomy.head), "")
        left = {head, anatomy.vocabulary.path if anatomy.vocabulary else ""}
        named: Callable[[str], bool] = {
            linear.path for linear in anatomy.linears if linear.path not in left
        }.__contains__
    else:
        named = _named(options, "target_modules")
    chosen = set()
    for path in paths:
        name = unused.name_in_file(path) or path
        if not named(path if all_linear else name) or excluded(name) or saved_whole.first(name):
            continue
        if isinstance(target, list) and name not in target and layers not in (None, []):
            layer = layer_of.first(name)
            if layer is None or int(layer[1][1]) not in (layers if isinstance(layers, list) else [layers]):
                continue
        chosen.add(path)
    return chosen


def _listed(names: list[str]) -> str:
    return first_names(names, 5) if len(names) > 5 else word_list(names)


def _named(options: Mapping[str, Any], option: str) -> Callable[[str], bool]:
    """Return whether an option names a module: by a pattern of its path, or in a list by the end of its path."""
    value = options.get(option) or []
    if isinstance(value, str):
        pattern = Patterns(option, [value], r"(?:{})\Z")
        return lambda name: pattern.first(name) is not None
    endings = set(value)
    return lambda name: any(ending in endings for ending in _endings(name))


def _endings(name: str) -> Iterator[str]:
    """Yield a path, and what remains of it after each dot."""
    while name:
        yield name
        name = name.partition(".")[2]


def _head_problems(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> list[str]:
    """Return which tensors are missing of the modules that were saved as a whole."""
    ends = tuple(options.get("modules_to_save") or ())
    names = {name: unused.name_in_file(name) for t in anatomy.tensors for name in (t.name, *t.aliases)}
    missing = [
        name
        for name, in_file in names.items()
        if in_file is not None
        and any(in_file[:end].endswith(ends) for end, letter in enumerate(in_file) if letter == ".")
        and name not in unused.tensors
    ]
    return [f"missing tensors {_listed(missing)}, whose modules modules_to_save names"] if missing else []


def _other_embeddings(anatomy: Anatomy, unused: UnusedTensors, base_value: Callable[[str], torch.Tensor]) -> list[str]:
    """Take the base model's own tensors out of a file, and return what is wrong with them."""
    problems = []
    for tensor, name in ((t, name) for t in anatomy.tensors for name in (t.name, *t.aliases)):
        module, _, leaf = name.rpartition(".")
        saved = unused.take(f"{module}.base_layer.{leaf}")
        if saved is None:
            continue
        base, shapes = base_value(tensor.name), (tuple(saved.shape), tuple(tensor.shape))
        if shapes[0] != shapes[1]:
            problems.append(f"{name} has shape {shapes[0]} in the file and {shapes[1]} here; resize the embeddings")
        elif not base.is_meta and not torch.equal(saved.to(base.device, base.dtype), base):
            problems.append(f"{name} is not the one that the adapter was trained with, which the file has")
    return problems


def _decoder_problems(anatomy: Anatomy, kind: str, windowed: bool) -> list[str]:
    problems = []
    if len(anatomy.stacks) != 1 or not anatomy.stacks[0].causal or anatomy.output_kind != "words":
        problems.append(f"{kind} has a translation for language models of one decoder stack; this is {anatomy.model}")
    if kind == "PREFIX_TUNING" and windowed:
        problems.append("with PEFT a prefix slides out of a sliding window, with deltune it stays visible")
    return problems


def _read_lora(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    pieces: list[PlacedTensors] = []
    problems: list[str] = []
    alpha_of, rank_of = (
        _by_pattern(options, *names) for names in (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern"))
    )
    for path, linears in _projections_by_path(anatomy, "parallel", LowRank(1), unused):
        leaves = _LORA_OF_EMBEDDING if linears[0][1].widths.lookup else _LORA_OF_LINEAR
        path_in_file = unused.name_in_file(path) or path
        down, up = (unused.take(f"{path}.{leaf}", axes=2) for leaf in leaves)
        if down is None and up is None:
            continue
        if down is None or up is None:
            problems.append(f"missing tensor {path}.{leaves[0 if down is None else 1]}")
            continue
        rank, alpha = rank_of(path_in_file), alpha_of(path_in_file)
        if down.shape[0] != rank or up.shape[1] != rank:
            shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
            problems.append(f"{path} has matrices of shapes {shapes}, and by the options its rank is {rank}")
            continue
        scale = alpha / (math.sqrt(rank) if options.get("use_rslora") else rank)
        dropout = 0.0 if leaves is _LORA_OF_EMBEDDING else float(options.get("lora_dropout") or 0)  # PEFT's has none
        form = LowRank(rank, dropout)
        if sum(place.widths.out_width for _, place in linears) != up.shape[0]:
            problems.append(f"{path} should have as many outputs as this model's, not {up.shape[0]} values")
            continue
        for site, place in linears:
            modification = Modification(site, form, compose=Add() if scale == 1 else Scale(scale))
            columns = place.linear.columns if place.linear else None
            pieces.append(PlacedTensors(modification, place, {"down": down, "up": rows_of_columns(up, columns)}))
    if problems or not pieces:
        raise error_from_problems("LoRA", problems or ["no tensor lora_A of a module that this model has"])
    sites = tuple(dict.fromkeys(piece.modification.site for piece in pieces))
    first = pieces[0].modification
    first_form, factor = first.form, first.compose.factor({})
    assert isinstance(first_form, LowRank) and isinstance(factor, float | int)
    at = ("query", "value") if set(sites) == {"query", "value"} else sites
    method = method_from_pieces(
        anatomy, pieces, [lambda: lora(first_form.rank, scale=factor, at=at, dropout=first_form.dropout)]
    )
    return method, tensors_by_file_name(anatomy, method, pieces)


def _by_pattern(options: Mapping[str, Any], option: str, of_modules: str) -> Callable[[str], Any]:
    """Return a function from a module's path to its value: its pattern's in `of_modules`, or else `option`."""
    values = options.get(of_modules) or {}
    patterns, others = Patterns(of_modules, values), options.get(option, 8)

    def value(path: str) -> Any:
        first = patterns.first(path)
        return others if first is None else list(values.values())[first[0]]

    return value


def _projections_by_path(
    anatomy: Anatomy, insertion: Any, form: Any, unused: UnusedTensors
) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield the modules that are projections, each with its sites and places; a fused one has several.

    Where the file changes one of the two linears before a gated FFN's activation and not the other, the two are sites
    of their own instead of `ffn_up`.
    """
    linears = [(site, place) for site in PROJECTIONS for place in _linears_at(anatomy, site, insertion, form)]
    in_file: dict[str, set[bool]] = {}
    for site, place in linears:
        if site == "ffn_up":
            path = place.target.path
            leaves = (*_LORA_OF_LINEAR, _IA3_LEAF)
            in_file.setdefault(path.rpartition(".")[0], set()).add(
                any(f"{path}.{leaf}" in unused.tensors for leaf in leaves)
            )
    if any(len(both) > 1 for both in in_file.values()):
        linears = [(site, place) for site, place in linears if site != "ffn_up"]
        linears += [(site, place) for site in _GATED for place in _linears_at(anatomy, site, insertion, form)]
    linears += [(site, place) for site in _OUTSIDE_FFN for place in _linears_at(anatomy, site, insertion, form)]
    by_path: dict[str, list[tuple[str, Any]]] = {}
    for site, place in linears:
        by_path.setdefault(place.target.path, []).append((site, place))
    yield from by_path.items()


def _linears_at(anatomy: Anatomy, site: str, insertion: Any, form: Any) -> list[Any]:
    """Return the places of a site; without the weights of experts, which PEFT stores otherwise."""
    places = locations_or_none(anatomy, Modification(site, form, insertion))
    return [place for place in places if place.linear is not None]


def _read_ia3(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    pieces: list[PlacedTensors] = []
    inputs = {
        place.target.path: (site, place)
        for site in ("heads", "ffn_inner")
        for place in locations_or_none(anatomy, Modification(site, Rescale(), "sequential"))
    }
    feedforward = options.get("feedforward_modules")
    of_input = _named(options, "feedforward_modules")
    input_gains: dict[str, torch.Tensor] = {}
    for path, linears in _projections_by_path(anatomy, "sequential", Rescale(), unused):
        gain = unused.take(f"{path}.{_IA3_LEAF}", axes=2)
        by_input = of_input(unused.name_in_file(path) or path)
        if gain is not None and feedforward is not None and by_input != (len(gain) == 1):
            raise DeltuneError(
                f"{path}.{_IA3_LEAF} has shape {tuple(gain.shape)}, which does not fit option feedforward_modules: "
                "vectors of these modules have one row, others one column"
            )
        if gain is not None and gain.shape[0] != 1:
            if tuple(gain.shape) != (sum(place.widths.out_width for _, place in linears), 1):
                raise DeltuneError(f"{path}.ia3_l has shape {tuple(gain.shape)}, which does not fit {path}")
            rescale = [(Modification(site, Rescale(), "sequential"), place) for site, place in linears]
            pieces += [
                PlacedTensors(modification, p, {"gain": rows_of_columns(gain, p.target.columns)[:, 0].contiguous()})
                for modification, p in rescale
            ]
        elif gain is not None:
            input_gains[path] = gain[0]
    for path, gain in input_gains.items():
        if path not in inputs:
            raise DeltuneError(
                f"IA3 on the input of {path}: rescaled inputs have a translation for W_o and the FFN's last linear only"
            )
        site, place = inputs[path]
        pieces.append(PlacedTensors(Modification(site, Rescale(), "sequential"), place, {"gain": gain}))
    if not pieces:
        raise DeltuneError("no tensor ia3_l of a module that this model has")
    method = method_from_pieces(anatomy, pieces, [ia3])
    return method, tensors_by_file_name(anatomy, method, pieces)


def _read_norms(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    values: dict[str, torch.Tensor] = {}
    for tensor in anatomy.tensors:
        owner, _, leaf = tensor.name.rpartition(".")
        value = unused.take(f"{owner}.ln_tuning_layers.{leaf}") if tensor.role.startswith("norm.") else None
        if value is not None:
            values[tensor.name] = value
    owners = {name.rpartition(".")[0] for name in values}
    norms = [t.name for t in anatomy.tensors if t.role.startswith("norm.") and t.name.rpartition(".")[0] in owners]
    if missing := [f"missing tensor {name}" for name in norms if name not in values]:
        raise error_from_problems("norms", missing)
    norm_layers = [anatomy.layers[t.layer] for t in anatomy.tensors if t.name in values and t.layer is not None]
    layers = tuple(sorted({layer.index for layer in norm_layers}))
    choices = product(("both", "attention", "ffn"), ("all", layers), (None, False, True), (None, False, True))

    def candidate(of: Any, layer_choice: Any, embedding: bool | None, final: bool | None) -> Callable[[], Method]:
        return lambda: layernorm("both", of, layer_choice, embedding=embedding, final=final)

    method = method_selecting(anatomy, set(values), [candidate(*choice) for choice in choices])
    return method, {f"base.{name}": value for name, value in values.items()}


def _read_prompt(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    rows = _take_prompt_tensor(options, unused)
    method = prompt(rows.shape[0])
    (edit,) = resolve(anatomy, method, lambda: 0).edits
    return method, {f"edit.{edit.key}.rows": rows}


def _read_saved_modules(
    anatomy: Anatomy, unused: UnusedTensors, tied: bool
) -> tuple[list[Method], dict[str, torch.Tensor]]:
    """Read the modules that were trained as a whole (`modules_to_save`), which PEFT copies one by one, tied or not."""
    values: dict[str, torch.Tensor] = {}
    problems = []
    for tensor in anatomy.tensors:
        names = (tensor.name, *tensor.aliases)
        if saved := unused.take_all(names):
            values[tensor.name], *others = saved.values()
            if not tied and (len(saved) < len(names) or not all(torch.equal(values[tensor.name], o) for o in others)):
                content = "values of their own" if others else f"{next(iter(saved))} alone"
                problems.append(
                    f"{word_list(names)} are one tensor of this model, and the file has {content}: give each its own "
                    "first, for example by: output = model.get_output_embeddings(); output.weight = "
                    "torch.nn.Parameter(output.weight.detach().clone())"
                )
    if problems:
        raise error_from_problems("modules_to_save", problems)
    return methods_selecting(anatomy, set(values)), {f"base.{name}": value for name, value in values.items()}


def _take_prompt_tensor(options: Mapping[str, Any], unused: UnusedTensors) -> torch.Tensor:
    rows = unused.take(next((n for n in unused.tensors if n.endswith(PROMPT_TENSOR)), PROMPT_TENSOR))
    if rows is None or rows.dim() != 2:
        raise DeltuneError(f"missing tensor {PROMPT_TENSOR}, a matrix with a row for each virtual token")
    tokens = options.get("num_virtual_tokens")
    if tokens not in (None, len(rows)):
        raise DeltuneError(f"{PROMPT_TENSOR} has {len(rows)} rows, and option num_virtual_tokens is {tokens}")
    return rows


def _read_prefix(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    rows = _take_prompt_tensor(options, unused)
    method = prefix(rows.shape[0], shift_positions=True)
    edits = resolve(anatomy, method, lambda: 0).edits
    widths = edits[0].place.widths
    row_width = 2 * len(edits) * widths.kv_heads * widths.head_width
    if rows.shape[1] != row_width or widths.head_width != widths.value_width:
        raise DeltuneError(
            f"{PROMPT_TENSOR} has rows of {rows.shape[1]}; the {len(edits)} layers of this model take {row_width}"
        )
    pairs = rows.reshape(rows.shape[0], 2 * len(edits), widths.kv_heads, widths.head_width)
    tensors: dict[str, torch.Tensor] = {}
    for index, edit in enumerate(edits):
        tensors[f"edit.{edit.key}.keys"] = pairs[:, 2 * index].contiguous()
        tensors[f"edit.{edit.key}.values"] = pairs[:, 2 * index + 1].contiguous()
    return method, tensors


_READERS: dict[str, Callable[[Anatomy, Mapping[str, Any], UnusedTensors], MethodAndTensors]] = {
    "LORA": _read_lora, "IA3": _read_ia3, "LN_TUNING": _read_norms, "PROMPT_TUNING": _read_prompt,
    "PREFIX_TUNING": _read_prefix,
}  # fmt: skip
