"""Writes a delta as a PEFT folder where PEFT can express it, and lists every reason where it cannot.

vLLM and llama.cpp read folders of PEFT too, but less than PEFT does, and what they do not know they ignore. For them
everything that they would refuse or ignore is refused here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..anatomy.types import Columns
from ..errors import DeltuneError, error_from_problems, first_names
from ..methods.compositions import Add, Gate, Scale
from ..methods.forms.attention import Prefix
from ..methods.forms.hidden import Rescale
from ..methods.forms.prompt import Prompt
from ..methods.positions import ALL
from ..methods.resolve import ResolvedEdit
from ..methods.spec import PROJECTIONS, Modification
from .base import ExportedDelta
from .peft_projections import sites_by_path
from .peft_read import PROMPT_TENSOR
from .peft_table import GLOBAL_PREFIX, NAME_PREFIX, PATTERNS, Row, frod_category, row_of_form

OptionsAndTensors = tuple[dict[str, Any], dict[str, torch.Tensor]]

SERVERS = ("vllm", "llama.cpp")
"""The programs for which a LoRA can be written, beside PEFT itself."""

MAX_RANK_OF_VLLM = 512
"""The greatest value that vLLM takes for --max-lora-rank."""

_DOWN, _UP = (".lora_A.weight", ".lora_embedding_A"), (".lora_B.weight", ".lora_embedding_B")


def write_peft(content: ExportedDelta) -> OptionsAndTensors:
    kinds: dict[str, None] = {}
    problems: dict[str, None] = {}
    for edit in content.edits:
        kind, problem = _peft_type(content, edit)
        if problem:
            problems[f"{edit.modification!r}: {problem}"] = None
        else:
            kinds[kind] = None
    norms = {t.name for t in content.anatomy.tensors if t.role.startswith("norm.")}
    whole = [name for name in content.in_place if name not in content.rows]
    if whole:
        kinds["LN_TUNING"] = None
        if others := [name for name in whole if name not in norms]:
            names = first_names(others, 3)
            problems[f"PEFT trains norms in place and nothing else; this delta also trains {names}"] = None
    if content.rows and not kinds:
        kinds["TRAINABLE_TOKENS"] = None
    elif content.rows and list(kinds) != ["LORA"]:
        problems[f"PEFT trains rows of embeddings alone or beside LoRA, and not beside {' and '.join(kinds)}"] = None
    if not problems and not kinds:
        problems["the head alone is no method of PEFT; save the model instead"] = None
    if not problems and len(kinds) > 1:
        problems[f"PEFT keeps one type of adapter in a folder, and this delta is a sum of {' and '.join(kinds)}"] = None
    if not problems:
        try:
            write = _WRITERS.get(next(iter(kinds)), _write_projections)
            return _add_head(content, *_add_rows(content, *write(content)))
        except DeltuneError as error:
            problems[str(error)] = None
    raise error_from_problems("this delta cannot be written for PEFT", list(problems))


def write_for_server(content: ExportedDelta, server: str, task: str | None) -> OptionsAndTensors:
    """Return the options and tensors of a PEFT folder that vLLM serves, or that llama.cpp's script converts.

    Both have one alpha for all modules. vLLM divides it by the one rank in the options, and llama.cpp by the rank of
    each tensor. So all modules get the greatest rank, by zeros, and one scale, by a factor in their up-projections.
    `server` is one of `SERVERS`, and `task` is PEFT's task type of the model's class.
    """
    problems = [] if task == "CAUSAL_LM" else [
        f"{server} finds modules by their names in a causal language model (AutoModelForCausalLM), and this is "
        f"{content.anatomy.model}"
    ]  # fmt: skip
    if content.head:
        problems.append(f"{server} has no task heads (modules_to_save), and the head is a part of this delta")
    others = dict.fromkeys(e.modification for e in content.edits if _peft_type(content, e)[0] != "LORA")
    problems += [f"{server} reads LoRA alone, and {modification!r} is none" for modification in others]
    if content.in_place:
        problems.append(f"{server} reads LoRA alone, and this delta trains {next(iter(content.in_place))} in place")
    if not content.edits and not content.in_place:
        problems.append(f"{server} reads LoRA alone, and this delta has none")
    options: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    if not others and not content.in_place and content.edits:
        try:
            options, tensors = write_peft(content)
        except DeltuneError as error:
            problems.append(str(error))
    rank = max((tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_DOWN)), default=0)
    if server == "vllm" and rank > MAX_RANK_OF_VLLM:
        problems.append(f"vLLM serves ranks of at most {MAX_RANK_OF_VLLM}, and this delta has rank {rank}")
    if server == "llama.cpp":
        problems += _problems_of_llama_cpp(content)
    if problems:
        raise error_from_problems(f"this delta cannot be written for {server}", problems)
    return _with_one_rank(options, tensors)


def _problems_of_llama_cpp(content: ExportedDelta) -> Iterator[str]:
    """Yield what convert_lora_to_gguf.py would turn into other weights, or stop at."""
    transposed = {e.place.target.path for e in content.edits if e.place.linear and e.place.linear.transposed}
    transposed -= {e.place.target.path for e in content.edits if e.place.widths.lookup}
    if transposed:
        yield (
            f"{next(iter(transposed))} holds its weight transposed (Conv1D), and llama.cpp's script turns its LoRA "
            "around too: merge the delta, and convert the model"
        )
    vocabulary = content.anatomy.vocabulary
    paths = {edit.place.target.path for edit in content.edits}
    if (
        vocabulary is not None
        and vocabulary.path in paths
        and content.anatomy.tensor(f"{vocabulary.path}.weight").aliases
    ):
        yield (
            f"{vocabulary.path} shares its weight with the embeddings, and llama.cpp's script leaves it out: merge "
            "the delta, and convert the model"
        )


def _with_one_rank(options: dict[str, Any], tensors: dict[str, torch.Tensor]) -> OptionsAndTensors:
    """Give all modules of a LoRA one rank and one scale, without changing what they compute."""
    scale = options["lora_alpha"] / options["r"] or 1.0  # llama.cpp takes an alpha of 0 for a scale of 1
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_DOWN))
    uniform: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_DOWN):
            uniform[name] = torch.nn.functional.pad(tensor, (0, 0, 0, rank - tensor.shape[0]))
            continue
        path = name.removeprefix(NAME_PREFIX)
        path = path.removesuffix(next(leaf for leaf in _UP if path.endswith(leaf)))
        alpha = options["alpha_pattern"].get(re.escape(path), options["lora_alpha"])
        factor = alpha / tensor.shape[1] / scale
        uniform[name] = torch.nn.functional.pad(tensor * factor, (0, rank - tensor.shape[1]))
    one: dict[str, Any] = {
        "r": rank,
        "lora_alpha": _integer_if_whole(scale * rank),
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return options | one, uniform


def _peft_type(content: ExportedDelta, edit: ResolvedEdit) -> tuple[str, str]:
    """Return PEFT's name for the method of an edit, and why PEFT cannot express it, or an empty text."""
    modification, place = edit.modification, edit.place
    form = modification.form
    row = row_of_form(modification)
    if row is not None and place.linear is not None:
        plain = isinstance(modification.compose, Add) or (
            isinstance(modification.compose, Scale)
            and not modification.compose.learned
            and bool(row.alpha or "scale" in row.arguments)
        )
        if isinstance(modification.positions, str) and modification.positions != ALL:
            return row.label, "PEFT changes a text from a sequence of tokens on, and not its ends"
        return row.label, "" if plain else f"PEFT's {row.kind} has one fixed scale a module, and no gate"
    if (
        isinstance(form, Rescale)
        and isinstance(modification.compose, Add)
        and {*sites_by_path(content.anatomy, ()).get(place.target.path, ())} & {*PROJECTIONS}
    ):
        return (
            "IA3",
            ""
            if modification.insertion == "sequential"
            else "PEFT's IA3 rescales a module's output, and this adds to it",
        )
    if isinstance(form, Prompt | Prefix):
        return ("PROMPT_TUNING" if isinstance(form, Prompt) else "PREFIX_TUNING"), _token_problem(content, modification)
    if place.weight is not None:
        return "", "deltune writes PEFT's LoRA for modules, not for the weights of experts and routers"
    return "", f"PEFT has no {type(form).__name__} at site {modification.site!r}"


def _token_problem(content: ExportedDelta, modification: Modification) -> str:
    """Return why PEFT cannot express this prompt or prefix, or an empty text."""
    anatomy, form = content.anatomy, modification.form
    if len(anatomy.stacks) != 1 or not anatomy.stacks[0].causal or anatomy.output_kind != "words":
        return f"it is written for language models of one decoder stack; this is {anatomy.model}"
    if isinstance(form, Prompt):
        return "" if form.positions == "shift" else "PEFT's prompt takes positions; train with positions='shift'"
    if not isinstance(modification.compose, Gate):
        return "PEFT's prefix joins the keys and values; this one is added to the attention's output"
    if not form.shift:
        return "PEFT's prefix moves positions on, this one does not: train with shift_positions=True"
    return (
        "with PEFT a prefix slides out of a sliding window, with deltune it stays visible"
        if content.sliding_window
        else ""
    )


def _edits_by_path(content: ExportedDelta) -> Iterator[tuple[str, list[ResolvedEdit]]]:
    """Yield the edits of each module, with the module's path."""
    edits: dict[str, list[ResolvedEdit]] = {}
    for edit in content.edits:
        edits.setdefault(edit.place.target.path, []).append(edit)
    yield from edits.items()


def _output_width(content: ExportedDelta, path: str) -> int:
    """Return the number of output features of a module."""
    transposed = any(e.place.linear.transposed for e in content.edits if e.place.linear and e.place.target.path == path)
    return content.anatomy.tensor(f"{path}.weight").shape[1 if transposed else 0]


def _write_projections(content: ExportedDelta) -> OptionsAndTensors:
    """Write a type that changes projections."""
    tensors: dict[str, torch.Tensor] = {}
    by_path: dict[str, dict[str, Any]] = {}
    problems: dict[str, None] = {}
    order = {name: number for number, t in enumerate(content.anatomy.tensors) for name in (t.name, *t.aliases)}
    edited = sorted(_edits_by_path(content), key=lambda pair: order[f"{pair[0]}.weight"])
    for number, (path, edits) in enumerate(edited):
        form = edits[0].modification.form
        row = row_of_form(edits[0].modification)
        assert row is not None
        parts = [content.full_tensors[edit.key] for edit in edits]
        columns = [edit.place.linear.columns if edit.place.linear else None for edit in edits]
        problem = _problem_of_parts(content, row, path, edits, parts)
        if problem:
            problems[problem] = None
            continue
        names = form.tensors(edits[0].place.widths)
        rows = _output_width(content, path)
        whole = {
            n: _join_columns([p[n] for p in parts], columns, rows) if n in row.outputs else parts[0][n] for n in names
        }
        lookup = edits[0].place.widths.lookup
        for name, tensor in row.to_peft(whole, edits[0].place.widths).items():
            if name not in row.shared:
                tensors[f"{NAME_PREFIX}{path}.{row.leaf(name, lookup)}"] = tensor
            elif name not in names or names[name].seed is None:
                leaf = row.shared[name].replace("*", frod_category(path))
                leaf = leaf.replace(".0", f".{number}") if name in names and not names[name].shared else leaf
                name_in_file = f"{GLOBAL_PREFIX}{leaf}"
                other = tensors.setdefault(name_in_file, tensor)
                if other is not tensor and not torch.equal(other, tensor):
                    problems[f"PEFT's {row.kind} has one {name} for all modules, and this delta has several"] = None
        by_path[path] = _options_of_edit(row, edits[0])
    row = row_of_form(content.edits[0].modification)
    assert row is not None
    options = _joint_options(by_path, row, problems) if by_path else {}
    if problems:
        raise DeltuneError("; ".join(problems))
    transposed = any(e.place.linear.transposed and not e.place.widths.lookup for e in content.edits if e.place.linear)
    options |= {"peft_type": row.kind, **_target_options(content, list(by_path)), "fan_in_fan_out": transposed}
    return options | {"bias": "none"}, tensors


def _problem_of_parts(
    content: ExportedDelta, row: Row, path: str, edits: list[ResolvedEdit], parts: list[Mapping[str, torch.Tensor]]
) -> str:
    """Return why the edits of one module are not what PEFT has at a module, or an empty text."""
    if len({edit.place.name for edit in edits}) < len(edits):
        return f"two terms change one projection; PEFT has one {row.kind} a module"
    fused = path.rpartition(".")[2]
    if sum(edit.place.linear.out_width for edit in edits if edit.place.linear) < _output_width(content, path):
        sites = " and ".join(edit.modification.site for edit in edits)
        return f"{sites} is a part of the fused {fused}, PEFT changes whole modules"
    same = all(torch.equal(p[n], parts[0][n]) for p in parts[1:] for n in p if n not in row.outputs)
    alike = len({(edit.modification.form, edit.modification.compose) for edit in edits}) == 1
    if len(edits) > 1 and not (row.outputs and same and alike):
        return f"the parts of the fused {fused} have matrices of their own, in PEFT they share one"
    return ""


def _options_of_edit(row: Row, edit: ResolvedEdit) -> dict[str, Any]:
    form = edit.modification.form
    options = {option: getattr(form, name) for name, option in row.arguments.items() if hasattr(form, name)}
    options |= {**row.when, **row.write(form)}
    if isinstance(edit.modification.positions, tuple):
        options["alora_invocation_tokens"] = edit.modification.positions
    factor = edit.modification.compose.factor({})
    assert isinstance(factor, float | int)
    scale = factor * getattr(form, "scale", 1.0)
    if row.alpha:
        options[row.alpha] = _integer_if_whole(scale * row.divisor(options))
    elif "scale" in row.arguments:
        options[row.arguments["scale"]] = scale
    return options


def _joint_options(by_path: Mapping[str, dict[str, Any]], row: Row, problems: dict[str, None]) -> dict[str, Any]:
    """Return the options of all modules: the most frequent values, and patterns of the modules that have others."""
    joint: dict[str, Any] = {}
    for name in next(iter(by_path.values())):
        values = {path: options[name] for path, options in by_path.items()}
        joint[name] = Counter(values.values()).most_common(1)[0][0]
        pattern = next((pattern for pattern in row.patterns if name in PATTERNS[pattern]), None)
        others = {re.escape(path): value for path, value in values.items() if value != joint[name]}
        if pattern is not None:
            joint[pattern] = others
        elif others:
            shown = sorted(set(map(str, values.values())))
            problems[f"PEFT's {row.kind} has one {name}, here there are {', '.join(shown)}"] = None
    return joint


def _integer_if_whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _join_columns(
    parts: list[torch.Tensor], columns: list[Columns | None], rows: int, fill: float = 0.0
) -> torch.Tensor:
    """Return the tensor (out, …) of a fused projection from its parts' tensors, with `fill` elsewhere."""
    if columns[0] is None:
        return parts[0]
    joined = parts[0].new_full((rows, *parts[0].shape[1:]), fill)
    for tensor, part_columns in zip(parts, columns, strict=True):
        assert part_columns is not None
        view = joined.unflatten(0, (part_columns.groups, -1))[:, part_columns.start : part_columns.stop]
        view.copy_(tensor.unflatten(0, (part_columns.groups, -1)))
    return joined


def _write_ia3(content: ExportedDelta) -> OptionsAndTensors:
    tensors: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    for path, edits in _edits_by_path(content):
        sides = {edit.place.target.side for edit in edits}
        if len({edit.place.name for edit in edits}) < len(edits) or len(sides) > 1:
            raise DeltuneError("two terms rescale one projection; PEFT has one vector a module")
        gains = [content.full_tensors[edit.key]["gain"] for edit in edits]
        if sides == {"input"}:
            inputs.append(path)
            tensors[f"{NAME_PREFIX}{path}.ia3_l"] = gains[0][None]
        else:
            columns = [edit.place.target.columns for edit in edits]
            tensors[f"{NAME_PREFIX}{path}.ia3_l"] = _join_columns(
                gains, columns, _output_width(content, path), fill=1.0
            )[:, None]
    paths = [name.removeprefix(NAME_PREFIX).removesuffix(".ia3_l") for name in tensors]
    transposed = any(e.place.linear.transposed for e in content.edits if e.place.linear)
    targets = _target_options(content, paths)
    feedforward = {
        "feedforward_modules": _target_options(content, inputs)["target_modules"],
        "fan_in_fan_out": transposed,
    }
    if not isinstance(feedforward["feedforward_modules"], type(targets["target_modules"])):
        targets = {"target_modules": _pattern(paths)}
        feedforward["feedforward_modules"] = _pattern(inputs)
    return {"peft_type": "IA3", **targets, **feedforward}, tensors


def _write_norms(content: ExportedDelta) -> OptionsAndTensors:
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in content.in_place))
    tensors = {}
    for tensor in content.anatomy.tensors:
        owner, _, leaf = tensor.name.rpartition(".")
        if owner in owners:
            value = content.in_place.get(tensor.name, content.original(tensor.name))
            tensors[f"{NAME_PREFIX}{owner}.ln_tuning_layers.{leaf}"] = value
    return {"peft_type": "LN_TUNING", **_target_options(content, owners)}, tensors


def _write_prompt(content: ExportedDelta) -> OptionsAndTensors:
    rows = torch.cat([content.full_tensors[edit.key]["rows"] for edit in content.edits])
    stack = content.anatomy.stacks[0]
    heads = next((a.heads for layer in content.anatomy.layers for a in layer.attentions if a.heads), 1)
    options = {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM", "num_layers": stack.depth,
               "num_attention_heads": heads, **_token_options(rows, stack.width)}  # fmt: skip
    return options, {PROMPT_TENSOR: rows}


def _token_options(rows: torch.Tensor, width: int) -> dict[str, Any]:
    return {"num_virtual_tokens": rows.shape[0], "token_dim": width, "num_transformer_submodules": 1}


def _write_prefix(content: ExportedDelta) -> OptionsAndTensors:
    places = [edit.place.name for edit in content.edits]
    expected = [f"{layer.stack}.{layer.index}.self.heads" for layer in content.anatomy.layers]
    if places != expected or len({edit.modification.form for edit in content.edits}) > 1:
        raise DeltuneError("PEFT's prefix is one, of one length, in every layer's self-attention")
    widths = content.edits[0].place.widths
    if widths.head_width != widths.value_width:
        raise DeltuneError("PEFT's prefix has keys and values of one width")
    pairs = [content.full_tensors[edit.key][leaf] for edit in content.edits for leaf in ("keys", "values")]
    rows = torch.stack(pairs, dim=1).flatten(1)
    options = {"peft_type": "PREFIX_TUNING", "prefix_projection": False, "num_layers": len(places),
               "num_attention_heads": widths.kv_heads,
               **_token_options(rows, widths.kv_heads * widths.head_width)}  # fmt: skip
    return options, {PROMPT_TENSOR: rows}


def _add_rows(content: ExportedDelta, options: dict[str, Any], tensors: dict[str, torch.Tensor]) -> OptionsAndTensors:
    """Add the rows of embeddings that are trained."""
    by_path = {name.removesuffix(".weight"): list(rows) for name, rows in content.rows.items()}
    alone = options["peft_type"] == "TRAINABLE_TOKENS"
    part = "" if alone else "token_adapter."
    for path, rows in by_path.items():
        values = content.in_place[f"{path}.weight"][rows]
        tensors[f"{NAME_PREFIX}{path}.{part}trainable_tokens_delta"] = values
    if alone:
        tokens = {tuple(rows) for rows in by_path.values()}
        if len(tokens) > 1:
            raise DeltuneError("PEFT trains rows of the same tokens in all tables, and this delta of others in each")
        return options | {"token_indices": list(tokens.pop()), "target_modules": list(by_path)}, tensors
    return options | ({"trainable_token_indices": by_path} if by_path else {}), tensors


_WRITERS: Mapping[str, Callable[[ExportedDelta], OptionsAndTensors]] = {
    "IA3": _write_ia3, "LN_TUNING": _write_norms, "PROMPT_TUNING": _write_prompt, "PREFIX_TUNING": _write_prefix,
    "TRAINABLE_TOKENS": lambda content: ({"peft_type": "TRAINABLE_TOKENS"}, {}),
}  # fmt: skip


def _target_options(content: ExportedDelta, paths: list[str]) -> dict[str, Any]:
    """Return target_modules for exactly these modules.

    PEFT takes a name for every module whose path ends in it; where that would match others too, a pattern is returned.
    """
    modules = {name.rpartition(".")[0] for t in content.anatomy.tensors for name in (t.name, *t.aliases)}
    suffixes = tuple(f".{path}" for path in paths)
    ambiguous = any(name.endswith(suffixes) for name in modules - set(paths)) if paths else False
    return {"target_modules": _pattern(paths) if ambiguous else paths}


def _pattern(paths: list[str]) -> str:
    return "|".join(re.escape(path) for path in paths)


def _add_head(content: ExportedDelta, options: dict[str, Any], tensors: dict[str, torch.Tensor]) -> OptionsAndTensors:
    """Add the head as PEFT keeps it, as whole modules."""
    if not content.head:
        return options, tensors
    heads = {f"{NAME_PREFIX}{name}": value for name, value in content.head.items()}
    modules = [path for path in content.anatomy.head if any(n.startswith(f"{path}.") for n in content.head)]
    return {**options, "modules_to_save": modules}, tensors | heads
