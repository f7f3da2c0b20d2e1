"""A delta as PEFT's files: the options and the tensors of one kind that PEFT has, or every reason why not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..anatomy.types import Anatomy, Columns
from ..errors import DeltuneError, error_from_problems
from ..methods.attention_forms import Prefix
from ..methods.compositions import Add, Gate, Scale
from ..methods.forms import LowRank, Prompt, Rescale
from ..methods.resolve import ResolvedEdit
from ..methods.spec import Modification
from .base import ExportedDelta
from .peft_read import PREFIX, ROWS

Written = tuple[dict[str, Any], dict[str, torch.Tensor]]


def write(content: ExportedDelta) -> Written:
    """Options and tensors for PEFT. Error: everything that PEFT cannot express, with the reasons."""
    kinds: dict[str, None] = {}
    problems: dict[str, None] = {}
    for edit in content.edits:
        kind, why = _kind(content, edit)
        if why:
            problems[f"{edit.modification!r}: {why}"] = None
        else:
            kinds[kind] = None
    norms = {t.name for t in content.anatomy.tensors if t.role.startswith("norm.")}
    if content.own:
        kinds["LN_TUNING"] = None
        if others := [name for name in content.own if name not in norms]:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            problems[f"PEFT trains norms in place and nothing else; here also {', '.join(others[:3])}{more}"] = None
    if not problems and not kinds:
        problems["the head alone is no method of PEFT; save the model instead"] = None
    if not problems and len(kinds) > 1:
        problems[f"PEFT keeps one kind of change in a folder, this is a sum of {' and '.join(kinds)}"] = None
    if not problems:
        try:
            return _with_head(content, *_WRITERS[next(iter(kinds))](content))
        except DeltuneError as error:
            problems[str(error)] = None
    raise error_from_problems("this delta cannot be written for PEFT", list(problems))


def _kind(content: ExportedDelta, edit: ResolvedEdit) -> tuple[str, str]:
    """PEFT's name for an edit, and why it has none."""
    m, place = edit.modification, edit.place
    form = m.form
    if isinstance(form, LowRank) and m.insertion == "parallel" and place.linear is not None:
        plain = isinstance(m.compose, Add) or (isinstance(m.compose, Scale) and not m.compose.learned)
        return "LORA", "" if plain else "PEFT's LoRA has one fixed scale a module, and no gate"
    if isinstance(form, Rescale) and isinstance(m.compose, Add) and place.target.path in _paths(content.anatomy):
        return "IA3", "" if m.insertion == "sequential" else "PEFT's IA3 rescales what a module gives; this adds to it"
    if isinstance(form, Prompt | Prefix):
        return ("PROMPT_TUNING" if isinstance(form, Prompt) else "PREFIX_TUNING"), _of_tokens(content, m)
    return "", f"PEFT has no {type(form).__name__} at site {m.site!r}"


def _of_tokens(content: ExportedDelta, m: Modification) -> str:
    """Why PEFT cannot have this prompt or prefix."""
    anatomy, form = content.anatomy, m.form
    if len(anatomy.stacks) != 1 or not anatomy.stacks[0].causal or anatomy.answers != "words":
        return f"it is written for language models of one decoder stack; this is {anatomy.model}"
    if isinstance(form, Prompt):
        return "" if form.positions == "shift" else "PEFT's prompt takes positions; train with positions='shift'"
    if not isinstance(m.compose, Gate):
        return "PEFT's prefix joins the keys and values; this one is added to the attention's output"
    if not form.shift:
        return "PEFT's prefix moves positions on, this one does not: train with shift_positions=True"
    return "PEFT's prefix slides out of a sliding window, ours is always visible" if content.windowed else ""


def _paths(anatomy: Anatomy) -> set[str]:
    """Modules that are projections."""
    found = {linear.path for layer in anatomy.layers for ffn in layer.ffns for linear in (*ffn.inputs, ffn.output)}
    for layer in anatomy.layers:
        for a in layer.attentions:
            found |= {linear.path for linear in (a.query, a.key, a.value, a.output) if linear is not None}
    return found


def _groups(content: ExportedDelta) -> Iterator[tuple[str, list[ResolvedEdit]]]:
    """The edits of each module."""
    found: dict[str, list[ResolvedEdit]] = {}
    for edit in content.edits:
        found.setdefault(edit.place.target.path, []).append(edit)
    yield from found.items()


def _rows(content: ExportedDelta, path: str) -> int:
    """Outputs of a module."""
    weight = next(t for t in content.anatomy.tensors if f"{path}.weight" in (t.name, *t.aliases))
    transposed = any(e.place.linear.transposed for e in content.edits if e.place.linear and e.place.target.path == path)
    return weight.shape[1 if transposed else 0]


def _low_rank(content: ExportedDelta) -> Written:
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    problems: dict[str, None] = {}
    for path, edits in _groups(content):
        parts = [content.dense[edit.key] for edit in edits]
        scales = [edit.modification.compose.factor({}) for edit in edits]
        down, rows = parts[0]["down"], _rows(content, path)
        columns = [edit.place.target.columns for edit in edits]
        if len({edit.place.name for edit in edits}) < len(edits):
            problems["two terms change one projection; PEFT has one pair of matrices a module"] = None
        elif sum(edit.place.widths.out_width for edit in edits) < rows:
            sites = " and ".join(edit.modification.site for edit in edits)
            problems[f"{sites} is a part of the fused {path.rpartition('.')[2]}, PEFT changes whole modules"] = None
        elif any(not torch.equal(p["down"], down) for p in parts[1:]) or len(set(scales)) > 1:
            problems[
                f"the parts of the fused {path.rpartition('.')[2]} have matrices of their own, in PEFT they share one"
            ] = None
        else:
            scale = scales[0]
            assert isinstance(scale, float | int)
            tensors[f"{PREFIX}{path}.lora_A.weight"] = down
            tensors[f"{PREFIX}{path}.lora_B.weight"] = _whole([p["up"] for p in parts], columns, rows)
            ranks[path], alphas[path] = down.shape[0], scale * down.shape[0]
    dropouts = {form.dropout for e in content.edits if isinstance(form := e.modification.form, LowRank)}
    if len(dropouts) > 1:
        problems[f"PEFT's LoRA has one dropout, here there are {sorted(dropouts)}"] = None
    if problems:
        raise DeltuneError("; ".join(problems))
    rank, alpha = Counter(ranks.values()).most_common(1)[0][0], Counter(alphas.values()).most_common(1)[0][0]
    options = {
        "peft_type": "LORA", **_targets(content, list(ranks)), "r": rank, "lora_alpha": _short(alpha),
        "lora_dropout": dropouts.pop(), "bias": "none",
        "fan_in_fan_out": any(e.place.linear.transposed for e in content.edits if e.place.linear),
        "rank_pattern": {re.escape(path): r for path, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(path): _short(a) for path, a in alphas.items() if a != alpha},
    }  # fmt: skip
    return options, tensors


def _short(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _whole(parts: list[torch.Tensor], columns: list[Columns | None], rows: int, rest: float = 0.0) -> torch.Tensor:
    """The parts of a fused projection's (out, …) in their places; `rest` elsewhere."""
    if columns[0] is None:
        return parts[0]
    whole = parts[0].new_full((rows, *parts[0].shape[1:]), rest)
    for tensor, chosen in zip(parts, columns, strict=True):
        assert chosen is not None
        view = whole.unflatten(0, (chosen.groups, -1))[:, chosen.start : chosen.stop]
        view.copy_(tensor.unflatten(0, (chosen.groups, -1)))
    return whole


def _rescale(content: ExportedDelta) -> Written:
    tensors: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    for path, edits in _groups(content):
        sides = {edit.place.target.side for edit in edits}
        if len({edit.place.name for edit in edits}) < len(edits) or len(sides) > 1:
            raise DeltuneError("two terms rescale one projection; PEFT has one vector a module")
        gains = [content.dense[edit.key]["gain"] for edit in edits]
        if sides == {"input"}:
            inputs.append(path)
            tensors[f"{PREFIX}{path}.ia3_l"] = gains[0][None]
        else:
            columns = [edit.place.target.columns for edit in edits]
            tensors[f"{PREFIX}{path}.ia3_l"] = _whole(gains, columns, _rows(content, path), rest=1.0)[:, None]
    paths = [name.removeprefix(PREFIX).removesuffix(".ia3_l") for name in tensors]
    turned = any(e.place.linear.transposed for e in content.edits if e.place.linear)
    found = _targets(content, paths)
    written = {"feedforward_modules": _targets(content, inputs)["target_modules"], "fan_in_fan_out": turned}
    if not isinstance(written["feedforward_modules"], type(found["target_modules"])):
        found = {"target_modules": _pattern(paths)}
        written["feedforward_modules"] = _pattern(inputs)
    return {"peft_type": "IA3", **found, **written}, tensors


def _norms(content: ExportedDelta) -> Written:
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in content.own))
    tensors = {}
    for tensor in content.anatomy.tensors:
        owner, _, leaf = tensor.name.rpartition(".")
        if owner in owners:
            value = content.own.get(tensor.name, content.original(tensor.name))
            tensors[f"{PREFIX}{owner}.ln_tuning_layers.{leaf}"] = value
    return {"peft_type": "LN_TUNING", **_targets(content, owners)}, tensors


def _prompt(content: ExportedDelta) -> Written:
    rows = torch.cat([content.dense[edit.key]["rows"] for edit in content.edits])
    stack = content.anatomy.stacks[0]
    heads = next((a.heads for layer in content.anatomy.layers for a in layer.attentions if a.heads), 1)
    options = {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM", "num_layers": stack.depth,
               "num_attention_heads": heads, **_counted(rows, stack.width)}  # fmt: skip
    return options, {ROWS: rows}


def _counted(rows: torch.Tensor, width: int) -> dict[str, Any]:
    return {"num_virtual_tokens": rows.shape[0], "token_dim": width, "num_transformer_submodules": 1}


def _prefix(content: ExportedDelta) -> Written:
    places = [edit.place.name for edit in content.edits]
    wanted = [f"{layer.stack}.{layer.index}.self.heads" for layer in content.anatomy.layers]
    if places != wanted or len({edit.modification.form for edit in content.edits}) > 1:
        raise DeltuneError("PEFT's prefix is one, of one length, in every layer's self-attention")
    widths = content.edits[0].place.widths
    if widths.head_width != widths.value_width:
        raise DeltuneError("PEFT's prefix has keys and values of one width")
    pairs = [content.dense[edit.key][leaf] for edit in content.edits for leaf in ("keys", "values")]
    rows = torch.stack(pairs, dim=1).flatten(1)
    options = {"peft_type": "PREFIX_TUNING", "prefix_projection": False, "num_layers": len(places),
               "num_attention_heads": widths.kv_heads,
               **_counted(rows, widths.kv_heads * widths.head_width)}  # fmt: skip
    return options, {ROWS: rows}


_WRITERS: Mapping[str, Callable[[ExportedDelta], Written]] = {
    "LORA": _low_rank, "IA3": _rescale, "LN_TUNING": _norms, "PROMPT_TUNING": _prompt, "PREFIX_TUNING": _prefix,
}  # fmt: skip


def _targets(content: ExportedDelta, paths: list[str]) -> dict[str, Any]:
    """Exactly these modules: PEFT takes a name for every module that ends in it, so where one does, a pattern."""
    modules = {name.rpartition(".")[0] for t in content.anatomy.tensors for name in (t.name, *t.aliases)}
    ends = tuple(f".{path}" for path in paths)
    beside = any(name.endswith(ends) for name in modules - set(paths)) if paths else False
    return {"target_modules": _pattern(paths) if beside else paths}


def _pattern(paths: list[str]) -> str:
    return "|".join(re.escape(path) for path in paths)


def _with_head(content: ExportedDelta, options: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Written:
    """The head as PEFT keeps it: whole modules."""
    if not content.head:
        return options, tensors
    heads = {f"{PREFIX}{name}": value for name, value in content.head.items()}
    modules = [path for path in content.anatomy.head if any(n.startswith(f"{path}.") for n in content.head)]
    return {**options, "modules_to_save": modules}, tensors | heads
