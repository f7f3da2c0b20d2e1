"""Reads PEFT folders: adapter_config.json and the tensors beside it.

PEFT names a tensor base_model.model.MODULE.lora_A.weight, where a module is a whole linear, fused or not. PEFT computes
y + (α/r) B A x for LoRA; l ⊙ y for IA3, or W (l ⊙ x) in `feedforward_modules`; a tuned copy in place of a norm; prompt
vectors before the embeddings; and a prefix as the content of the cache, so that positions shift.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

from ..anatomy.types import Anatomy
from ..errors import DeltuneError, error_from_problems, first_names, word_list
from ..methods.forms.attention import Prefix
from ..methods.forms.base import Place
from ..methods.forms.hidden import Rescale
from ..methods.forms.low_rank import LowRank
from ..methods.library import bitfit, ia3, layernorm, prefix, prompt, trainable_tokens
from ..methods.resolve import resolve, token_rows
from ..methods.sites import Location, resolve_locations
from ..methods.spec import Method, Modification, Selection
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
    tensors_by_deltune_name,
)
from .peft_projections import MethodAndTensors, ProjectionReader, sites_by_path
from .peft_table import GLOBAL_PREFIX, NAME_PREFIX, OTHERS, PROMPTS, bias_mode, check_options, row_of

_IA3_LEAF = "ia3_l"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
PROMPT_TENSOR = "prompt_embeddings"
TOKENS = "TRAINABLE_TOKENS"

# -- reading ----------------------------------------------------------------------------------------------------------


def read_peft(
    anatomy: Anatomy,
    folder: ForeignFolder,
    place_of: Callable[[Location], Place | None],
    base_value: Callable[[str], torch.Tensor],
    modules: Iterable[str],
    windowed: bool = False,
) -> Translation:
    """Translate a PEFT folder for a model.

    `place_of` returns the model's own projection at a place, and `base_value` a weight of the model by its name. PEFT
    saves the base's own embeddings where they are adapted; they are no part of the adapter, and have to be this
    model's. `modules` are the paths of the model's modules, and `windowed` says that some of its attentions have a
    sliding window.
    """
    options, kind = folder.options, str(folder.options.get("peft_type"))
    problems = check_options(options)
    if kind in PROMPTS:
        problems += decoder_problems(anatomy, kind, windowed)
    if problems:
        raise error_from_problems(str(folder.where), problems)
    common = {n: t for n, t in folder.tensors.items() if n.startswith(GLOBAL_PREFIX) and not n.startswith(NAME_PREFIX)}
    unused = UnusedTensors(anatomy, {n: t for n, t in folder.tensors.items() if n not in common}, NAME_PREFIX)
    _separate_biases(unused, options, base_value)
    row = row_of(options)
    is_leaf = row.is_leaf if row else OTHERS[kind].leaves.__contains__
    numbers = [n for n, t in folder.tensors.items() if not t.is_floating_point() and not any(map(is_leaf, _endings(n)))]
    if numbers:
        raise error_from_problems(
            str(folder.where), [f"tensor {name} is not of floating-point numbers" for name in numbers]
        )
    incomplete = _head_problems(anatomy, options, unused)
    paths: list[str] = []
    if kind not in (*PROMPTS, TOKENS, "ADAPTION_PROMPT"):
        paths, problems = _changed_modules(anatomy, options, unused, modules, is_leaf)
        incomplete += problems
    head = unused.take_all([t.name for t in anatomy.tensors if t.area == "head"])
    problems = _other_embeddings(anatomy, unused, base_value, ("bias",) if bias_mode(options) else ())
    if problems:
        raise error_from_problems(str(folder.where), problems, fault="model")
    method: Method | None = None
    tensors: dict[str, torch.Tensor] = {}
    try:
        if row is not None:
            method, tensors = ProjectionReader(anatomy, options, row, unused, place_of, common).read(paths)
        elif kind == "ADAPTION_PROMPT":
            method, tensors = _read_adaption(anatomy, options, unused, place_of)
        elif kind in _READERS:
            method, tensors = _READERS[kind](anatomy, options, unused)
        chosen, rows = _read_tokens(anatomy, options, unused)
        saved, values = _read_saved_modules(anatomy, unused, bool(options.get("ensure_weight_tying")))
    except DeltuneError as error:
        unused.check(folder.where, [*incomplete, str(error)], stopped=True)
        raise
    incomplete += [f"extra tensor {name}" for name in common]
    unused.check(folder.where, incomplete)
    terms = [*([method] if method is not None else []), *chosen, *saved]
    if not terms:
        raise error_from_problems(str(folder.where), ["it has no tensors that this model has a place for"])
    return Translation(sum(terms[1:], terms[0]), tensors | rows | values, head)


def _separate_biases(
    unused: UnusedTensors, options: Mapping[str, Any], base_value: Callable[[str], torch.Tensor]
) -> None:
    """Make of the base's biases that changed modules have trained a change, or where all are, whole tensors."""
    trained = bias_mode(options)
    if trained == "all":  # PEFT has the biases of a head three times, of which the first is used
        endings = (".modules_to_save.bias", ".original_module.bias")
        unused.take_all([name for name in unused.tensors if name.endswith(endings)])
    for name in [n for n in unused.tensors if trained and n.endswith(".base_layer.bias")]:
        whole = name.replace(".base_layer.bias", ".bias")
        if trained == "all":
            unused.tensors[whole], unused.names[whole] = unused.tensors.pop(name), unused.names.pop(name)
            continue
        base = base_value(unused.anatomy.tensor(whole).name)
        if base.shape == unused.tensors[name].shape and not base.is_meta:
            unused.tensors[name] = unused.tensors[name].to(base) - base


def _changed_modules(
    anatomy: Anatomy,
    options: Mapping[str, Any],
    unused: UnusedTensors,
    modules: Iterable[str],
    is_leaf: Callable[[str], bool],
) -> tuple[list[str], list[str]]:
    """Return the modules that the file changes, in the model's order, and where its options say otherwise."""
    if options.get("target_modules") is None:
        return [], ["option target_modules is missing, so nothing says which modules the folder should have tensors of"]
    owners = {name.rpartition(".")[0] for t in anatomy.tensors for name in (t.name, *t.aliases)}
    paths = [path for path in modules if path in owners and unused.name_in_file(path) is not None]
    targeted = targeted_modules(anatomy, options, unused, paths)
    named = {name[: -len(ending) - 1] for name in unused.tensors for ending in _endings(name) if is_leaf(ending)}
    if options.get("save_indices") is False and not named:  # all that UNILORA has is one vector
        return [path for path in paths if path in targeted], []
    missing = [path for path in paths if path in targeted - named]
    others = [path for path in paths if path in named - targeted]
    problems = [f"missing tensors of {_listed(missing)}, which its options target"] if missing else []
    if others:
        problems.append(f"extra tensors of {_listed(others)}, which its options do not target")
    return [path for path in paths if path in named], problems


def targeted_modules(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors, paths: list[str]) -> set[str]:
    """Return which of the modules the options target, by PEFT's rules and the names in the model of the file."""
    target, layers = options["target_modules"], options.get("layers_to_transform")
    excluded, saved = module_matcher(options, "exclude_modules"), options.get("modules_to_save") or ()
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
        named = module_matcher(options, "target_modules")
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


def module_matcher(options: Mapping[str, Any], option: str) -> Callable[[str], bool]:
    """Return whether an option names a module: by a pattern of its path, or in a list by the end of its path."""
    value = options.get(option) or []
    if isinstance(value, str):
        pattern = Patterns(option, [value], r"(?:{})\Z")
        return lambda name: pattern.first(name) is not None
    endings = set(value)
    return lambda name: any(ending in endings for ending in _endings(name))


def modules_to_save_matcher(options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return whether a tensor is of a module that `modules_to_save` names, by the end of its path."""
    ends = tuple(options.get("modules_to_save") or ())
    return lambda name: any(name[:end].endswith(ends) for end, letter in enumerate(name) if letter == ".")


def _endings(name: str) -> Iterator[str]:
    """Yield a path, and what remains of it after each dot."""
    while name:
        yield name
        name = name.partition(".")[2]


def _head_problems(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> list[str]:
    """Return which tensors are missing of the modules that were saved as a whole."""
    is_whole = modules_to_save_matcher(options)
    names = {name: unused.name_in_file(name) for t in anatomy.tensors for name in (t.name, *t.aliases)}
    missing = [
        name
        for name, in_file in names.items()
        if in_file is not None and is_whole(in_file) and name not in unused.tensors
    ]
    return [f"missing tensors {_listed(missing)}, whose modules modules_to_save names"] if missing else []


def _other_embeddings(
    anatomy: Anatomy, unused: UnusedTensors, base_value: Callable[[str], torch.Tensor], trained: Collection[str]
) -> list[str]:
    """Take the base model's own tensors, but for trained leaves, out of a file; return what is wrong with them."""
    problems = []
    for tensor, name in ((t, name) for t in anatomy.tensors for name in (t.name, *t.aliases)):
        module, _, leaf = name.rpartition(".")
        saved = None if leaf in trained else unused.take(f"{module}.base_layer.{leaf}")
        if saved is None:
            continue
        base, shapes = base_value(tensor.name), (tuple(saved.shape), tuple(tensor.shape))
        if shapes[0] != shapes[1]:
            problems.append(f"{name} has shape {shapes[0]} in the file and {shapes[1]} here; resize the embeddings")
        elif not base.is_meta and not torch.equal(saved.to(base.device, base.dtype), base):
            problems.append(f"{name} is not the one that the adapter was trained with, which the file has")
    return problems


def decoder_problems(anatomy: Anatomy, kind: str, windowed: bool) -> list[str]:
    """Return why a model cannot have PEFT's prompt or prefix."""
    problems = []
    if len(anatomy.stacks) != 1 or not anatomy.stacks[0].causal or anatomy.output_kind != "words":
        problems.append(f"{kind} has a translation for language models of one decoder stack; this is {anatomy.model}")
    if kind in ("PREFIX_TUNING", "CARTRIDGE") and windowed:
        problems.append("with PEFT a prefix slides out of a sliding window, with deltune it stays visible")
    return problems


def ia3_pieces(
    anatomy: Anatomy, paths: list[str], of_input: Callable[[str], bool]
) -> Iterator[tuple[str, Modification, Location]]:
    """Yield the vectors of IA3 at modules: of their outputs, or of their inputs where `of_input` says so."""
    at_inputs = {
        place.target.path: (site, place)
        for site in ("heads", "ffn_inner")
        for place in locations_or_none(anatomy, Modification(site, Rescale(), "sequential"))
    }
    for path, sites in sites_by_path(anatomy, paths).items():
        if path not in paths:
            continue
        if of_input(path):
            if path not in at_inputs:
                raise DeltuneError(
                    f"IA3 on the input of {path}: rescaled inputs have a translation for W_o and the FFN's last linear "
                    "only"
                )
            site, place = at_inputs[path]
            yield path, Modification(site, Rescale(), "sequential"), place
            continue
        for site in sites:
            modification = Modification(site, Rescale(), "sequential")
            for place in locations_or_none(anatomy, modification):
                if place.linear is not None and place.linear.path == path:
                    yield path, modification, place


def _read_ia3(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    ending = f".{_IA3_LEAF}"
    names = [name.removesuffix(ending) for name in unused.tensors if name.endswith(ending)]
    gains = {path: gain for path in names if (gain := unused.take(f"{path}{ending}", axes=2)) is not None}
    of_input = module_matcher(options, "feedforward_modules")
    for path, gain in gains.items():
        is_named = of_input(unused.name_in_file(path) or path)
        if options.get("feedforward_modules") is not None and is_named != (len(gain) == 1):
            raise DeltuneError(
                f"{path}{ending} has shape {tuple(gain.shape)}, which does not fit option feedforward_modules: "
                "vectors of these modules have one row, others one column"
            )
    pieces: list[PlacedTensors] = []
    planned = list(ia3_pieces(anatomy, list(gains), lambda path: len(gains[path]) == 1))
    for path, modification, place in planned:
        gain, columns = gains[path], place.target.columns
        if place.target.side == "input":
            pieces.append(PlacedTensors(modification, place, {"gain": gain[0]}))
            continue
        width = sum(other.widths.out_width for other_path, _, other in planned if other_path == path)
        if tuple(gain.shape) != (width, 1):
            raise DeltuneError(f"{path}{ending} has shape {tuple(gain.shape)}, which does not fit {path}")
        pieces.append(PlacedTensors(modification, place, {"gain": rows_of_columns(gain, columns)[:, 0].contiguous()}))
    if missing := gains.keys() - {piece.place.target.path for piece in pieces}:
        raise error_from_problems("IA3", [f"extra tensor {path}{ending}" for path in sorted(missing)])
    if not pieces:
        raise DeltuneError("no tensor ia3_l of a module that this model has")
    method = method_from_pieces(anatomy, pieces, [ia3])
    return method, tensors_by_deltune_name(anatomy, method, pieces)


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
    return norm_method(anatomy, set(values)), {f"base.{name}": value for name, value in values.items()}


def norm_method(anatomy: Anatomy, names: set[str]) -> Method:
    """Return the method that trains these tensors of norms and no others."""
    norm_layers = [anatomy.layers[t.layer] for t in anatomy.tensors if t.name in names and t.layer is not None]
    layers = tuple(sorted({layer.index for layer in norm_layers}))
    choices = product(("both", "attention", "ffn"), ("all", layers), (None, False, True), (None, False, True))

    def candidate(of: Any, layer_choice: Any, embedding: bool | None, final: bool | None) -> Callable[[], Method]:
        return lambda: layernorm("both", of, layer_choice, embedding=embedding, final=final)

    return method_selecting(anatomy, names, [candidate(*choice) for choice in choices])


def _read_prompt(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    rows = _take_prompt_tensor(options, unused)
    columns_and_rows = [unused.take(f"prefix_task_{part}", axes=3) for part in ("cols", "rows")]
    if options["peft_type"] == "MULTITASK_PROMPT_TUNING":
        columns, task_rows = columns_and_rows
        shapes = [tuple(t.shape) if t is not None else None for t in columns_and_rows]
        ranks = options.get("num_ranks")
        if columns is None or task_rows is None or shapes != [(1, len(rows), ranks), (1, ranks, rows.shape[1])]:
            raise DeltuneError(
                f"prefix_task_cols and prefix_task_rows have shapes {shapes}, of {ranks} ranks and one task"
            )
        rows = rows * (columns[0] @ task_rows[0])
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
    return whole_tensors(anatomy, set(values)), {f"base.{name}": value for name, value in values.items()}


def whole_tensors(anatomy: Anatomy, names: set[str]) -> list[Method]:
    """Return methods that train these tensors and no others: one where they are all biases of the model."""
    if names and all(anatomy.tensor(name).role.endswith("bias") for name in names):
        with contextlib.suppress(DeltuneError):
            return [method_selecting(anatomy, names, [bitfit])]
    return methods_selecting(anatomy, names)


def token_tables(anatomy: Anatomy, options: Mapping[str, Any], named: Callable[[str], str]) -> dict[str, list[int]]:
    """Return the tables of which the options train rows, by their paths, with the ids of the tokens.

    `named` returns what the options call a module.
    """
    tokens = options.get("trainable_token_indices") or options.get("token_indices") or ()
    words = [table.path for stack in anatomy.stacks if (table := stack.embedding) is not None]
    vocabulary = [anatomy.vocabulary.path] if anatomy.vocabulary is not None else []
    if isinstance(tokens, Mapping):
        by_name = {name: ids for name, ids in tokens.items()}
    else:
        targets = options.get("target_modules") if options.get("peft_type") == TOKENS else None
        names = [targets] if isinstance(targets, str) else targets
        by_name = dict.fromkeys(names if names else [named(path) for path in words[:1]], tokens)
    return {
        path: list(ids)
        for path in dict.fromkeys((*words, *vocabulary))
        for name, ids in by_name.items()
        if ids and name in _endings(named(path))
    }


def token_method(anatomy: Anatomy, tables: Mapping[str, list[int]]) -> list[Method]:
    """Return the methods that train rows of these tables and of no others."""
    methods: list[Method] = []
    for tokens in {tuple(sorted(ids)) for ids in tables.values()}:
        paths = {path for path, ids in tables.items() if tuple(sorted(ids)) == tokens}
        choices: list[Method] = [trainable_tokens(tokens)]
        choices += [Selection(("embedding",), (area,), tokens=tokens) for area in ("embedding", "vocabulary")]
        for method in choices:
            part = method.parts[0]
            assert isinstance(part, Selection)
            tensors = [tensor for tensor, _ in token_rows(anatomy, part, tokens)]
            owners = [{name.rpartition(".")[0] for name in (t.name, *t.aliases)} for t in tensors]
            if all(paths & names for names in owners) and paths <= set().union(*owners):
                methods.append(method)
                break
        else:
            raise DeltuneError(f"no selection of rows of embeddings is of {word_list(sorted(paths))} alone")
    return methods


def _read_tokens(
    anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors
) -> tuple[list[Method], dict[str, torch.Tensor]]:
    """Read rows of embeddings, which PEFT has in the order of the token ids in its options."""
    tables = token_tables(anatomy, options, lambda path: unused.name_in_file(path) or path)
    if not tables:
        if options.get("peft_type") == TOKENS or options.get("trainable_token_indices"):
            raise DeltuneError("its options choose tokens of no table of embeddings that this model shows")
        return [], {}
    values: dict[str, torch.Tensor] = {}
    for path, tokens in tables.items():
        tensor = anatomy.tensor(f"{path}.weight")
        stems = [name.rpartition(".")[0] for name in (tensor.name, *tensor.aliases)]
        names = [f"{stem}.{part}trainable_tokens_delta" for stem in stems for part in ("", "token_adapter.")]
        saved = list(unused.take_all(names).values())
        width = tensor.shape[1]
        if not saved or any(tuple(rows.shape) != (len(tokens), width) for rows in saved):
            raise DeltuneError(
                f"{path} should have a row of {width} for each of the {len(tokens)} tokens in the options"
            )
        if any(not torch.equal(rows, saved[0]) for rows in saved[1:]):
            raise DeltuneError(
                f"{tensor.name} is one tensor of this model, and the file has several values for its rows"
            )
        order = torch.tensor(tokens).argsort()
        index = torch.tensor(tokens)[order][:, None] * width + torch.arange(width)
        values[f"partly.{tensor.name}.values"] = saved[0][order].flatten()
        values[f"partly.{tensor.name}.index"] = index.flatten()
    return token_method(anatomy, tables), values


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


def _read_adaption(
    anatomy: Anatomy,
    options: Mapping[str, Any],
    unused: UnusedTensors,
    place_of: Callable[[Location], Place | None],
) -> MethodAndTensors:
    """Read a prompt that the attention's own projections make keys and values of, behind a gate on the values."""
    length, number = options.get("adapter_len"), options.get("adapter_layers")
    if not isinstance(length, int) or not 0 < length < 1 << 20:
        raise DeltuneError(f"option adapter_len={length!r} is no length")
    modification = Modification("heads", Prefix(length))
    places = {site: resolve_locations(anatomy, Modification(site, LowRank(1))) for site in ("key", "value")}
    pieces: list[PlacedTensors] = []
    for location in resolve_locations(anatomy, modification):
        path, widths = location.target.path, location.widths
        rows, gate = (unused.take(f"{path}.adaption_{part}") for part in ("prompt", "gate"))
        if rows is None and gate is None:
            continue
        width = anatomy.stack(location.shifted_stack or location.name.partition(".")[0]).width
        if rows is None or gate is None or tuple(rows.shape) != (1, length, width) or tuple(gate.shape) != (1,):
            raise DeltuneError(f"{path} should have a prompt of 1 × {length} × {width} and a gate")
        pair = {}
        for name, site, heads in (("keys", "key", widths.head_width), ("values", "value", widths.value_width)):
            place = next(place for place in places[site] if place.sublayer == location.sublayer)
            at = place_of(place)
            assert at is not None and place.linear is not None
            if place.linear.columns is not None:
                raise DeltuneError(f"{path} has query, key and value in one linear, where PEFT's prompt passes W_o by")
            pair[name] = F.linear(rows[0].to(at.weight), at.weight, at.bias).unflatten(1, (-1, heads)).cpu()
        pair["values"] = pair["values"] * gate.to(pair["values"])
        pieces.append(PlacedTensors(modification, location, pair))
    if len(pieces) != number:
        raise DeltuneError(f"{len(pieces)} attentions have a prompt, and option adapter_layers is {number!r}")
    layers = tuple(int(piece.place.name.split(".")[1]) for piece in pieces)
    candidates = [lambda: prefix(length, gate=False), lambda: prefix(length, gate=False, layers=layers)]
    method = method_from_pieces(anatomy, pieces, candidates)
    return method, tensors_by_deltune_name(anatomy, method, pieces)


_READERS: dict[str, Callable[[Anatomy, Mapping[str, Any], UnusedTensors], MethodAndTensors]] = {
    "IA3": _read_ia3, "LN_TUNING": _read_norms, "PROMPT_TUNING": _read_prompt, "P_TUNING": _read_prompt,
    "MULTITASK_PROMPT_TUNING": _read_prompt, "CPT": _read_prompt,
    "PREFIX_TUNING": _read_prefix, "CARTRIDGE": _read_prefix,
}  # fmt: skip
