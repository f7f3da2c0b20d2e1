"""`attach`, `load`, `export` and `tuned`: put a method or a saved delta on a model, and write one for other libraries.

Adapter folders of PEFT and AdapterHub are read and written here, by `interop`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import SAFE_WEIGHTS_NAME

from ..anatomy.inspection import describe_wrapped, inspect, model_inside, wrapped_model
from ..anatomy.offloading import loaded_devices
from ..anatomy.quantization import check_gradients_pass, check_quantization
from ..anatomy.skeleton import HANDLE_NAME
from ..anatomy.tracing import all_configs
from ..anatomy.types import Anatomy
from ..compat import attention_implementation, copy_tensors, set_in_parameter_dict, submodules_of
from ..errors import DeltuneError, describe_value, excerpt, unknown_name
from ..files import atomic_folder, user_path, write_error
from ..interop import adapterhub, adapterhub_write, peft_config, peft_read, peft_write
from ..interop.base import CONFIG_FILE, ExportedDelta, Translation, has_file, is_foreign
from ..interop.foreign import foreign_base, open_folder
from ..interop.peft_config import PeftConfiguration
from ..interop.tensor_files import TensorInfo, tensor_infos
from ..methods.counting import TRAINING_COPIES
from ..methods.forms.prompt import Prompt
from ..methods.masks import RowMask
from ..methods.memory import check_memory
from ..methods.parser import explain_arguments
from ..methods.registry import parse
from ..methods.resolve import ResolvedMethod
from ..methods.schedules import RankSchedule
from ..methods.spec import Method
from ..models import (
    HEAD_LABELS,
    HEADS,
    HEADS_WITH_LABELS,
    Pooling,
    check_versions,
    head_of_class,
    head_of_class_name,
    load_model,
    name_on_hub,
)  # fmt: skip
from . import hub, serialization
from .attached import Attached, check_name
from .attention import prefix_implementation
from .combine import with_allocated_ranks
from .delta_schema import (
    BaseFacts,
    Expected,
    check_finite,
    check_positions,
    check_shapes,
    check_tensors,
    expected_tensors,
    parse_saved_method,
)
from .handle import Tuned
from .model_state import refuse_inference_tensors, refuse_shared_modules
from .modules import Delta, Edit, HeadLabels, parameter_key
from .offloading import check_offloading, follow_offloading
from .pooling import begin_with_head_of, check_pooling, gives_up_pooling
from .sharding import ADDED_LATE, BEFORE_SHARDING, refuse_sharded, write_once
from .statistics import check_data, collect_statistics

FORMATS = ("peft", "adapterhub", *peft_write.SERVERS)
"""The formats that `export` writes: folders of PEFT and AdapterHub, and what other programs read of PEFT's."""

Files = dict[str, dict[str, Any]]
"""Options by the names of their files."""


def read_foreign(attached: Attached, folder: str | Path) -> Translation:
    """Translate an adapter folder of PEFT or AdapterHub into a method and tensors for this model."""
    contents = open_folder(folder)
    if "peft_type" in contents.options:
        modules = [path for path, _ in attached.model.named_modules()]
        windowed = has_sliding_window(attached.model)
        return peft_read.read_peft(
            attached.anatomy, contents, attached.base_place, attached.state.base_value, modules, windowed
        )
    relative = hasattr(attached.model.config, "relative_attention_num_buckets")
    return adapterhub.read_adapterhub(attached.anatomy, contents, relative)


def collect_export(attached: Attached, name: str | None = None) -> ExportedDelta:
    """Collect a delta for a writer of another format: the one of this name, or the one in use."""
    delta, state = with_allocated_ranks(attached, attached.delta(name)), attached.state
    if waiting := [s.schedule for s in delta.schedule_states() if isinstance(s.schedule, RankSchedule)]:
        raise DeltuneError(
            f"{delta.method!r} is exported as LoRA once its ranks are final: after tuned.advance(share) with share ≥ "
            f"{max(schedule.stop for schedule in waiting):g}"
        )
    with torch.no_grad():
        values = {n: state.delta_value(delta, n).detach() for n in delta.selected if n not in delta.head}
        values |= {n: sparse.merged_value(state.base_value(n).detach()) for n, sparse in delta.masked_tensors()}
        full = {key: {leaf: t.detach() for leaf, t in edit.full_tensors().items()} for key, edit in delta.named_edits()}
    head = {n: state.delta_value(delta, n).detach() for n in delta.head}
    return ExportedDelta(
        attached.anatomy, delta.planned.edits, full, values, head, lambda n: attached.dense_value(n).detach(),
        has_sliding_window(attached.model),
        {tensor.name: mask.rows for tensor, mask in delta.planned.masked if isinstance(mask, RowMask)},
    )  # fmt: skip


def _exported(attached: Attached, format: str, name: str | None) -> tuple[Files, dict[str, dict[str, torch.Tensor]]]:
    """Return the contents of a folder in another library's format: options and tensors by the names of their files."""
    model, exported = attached.model, collect_export(attached, name)
    task = HEADS[head_of_class_name(attached.anatomy.model) or "base"].peft_task
    if format == "adapterhub":
        return _exported_for_adapterhub(attached, exported, name)
    if format == "peft":
        options, tensors = peft_write.write_peft(exported)
    else:
        options, tensors = peft_write.write_for_server(exported, format, task)
    options |= {
        "task_type": task, "base_model_name_or_path": name_on_hub(model.config.name_or_path or ""),
        "inference_mode": True,
    }  # fmt: skip
    return {CONFIG_FILE: options}, {peft_read.WEIGHT_FILES[0]: tensors}


def _exported_for_adapterhub(
    attached: Attached, exported: ExportedDelta, name: str | None
) -> tuple[Files, dict[str, dict[str, torch.Tensor]]]:
    """Return a delta as AdapterHub's library saves an adapter, under its name here."""
    delta = attached.delta(name)
    if name is None:
        name = next(each for each in attached.names if attached.delta(each) is delta)
    ids = {label: label_id for label_id, label in (delta.labels or attached.base_labels).id2label}
    files = adapterhub_write.write_adapterhub(exported, attached.anatomy.model, name, ids)
    options, tensors = {CONFIG_FILE: files.options}, {adapterhub.WEIGHT_FILES[0]: files.tensors}
    if files.head:
        options[adapterhub.HEAD_CONFIG], tensors[adapterhub.HEAD_WEIGHTS[0]] = files.head_options, files.head
    return options, tensors


def _write_folder(folder: str | Path, options: Files, tensors: dict[str, dict[str, torch.Tensor]]) -> Path:
    """Write a new folder of options and tensors by the names of their files."""
    target = user_path(folder, "folder")
    with atomic_new_folder(target) as fresh:
        for file, values in tensors.items():
            whole = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in values.items()}
            save_file(whole, fresh / file, metadata={"format": "pt"})
        for file, facts in options.items():
            (fresh / file).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return target


@contextlib.contextmanager
def atomic_new_folder(folder: str | Path) -> Iterator[Path]:
    """Give a temporary folder to fill, which is renamed to `folder` if the block succeeds."""
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DeltuneError(f"{target} exists and is not an empty folder; choose another")
    try:
        with atomic_folder(target) as fresh:
            yield fresh
    except (OSError, safetensors.SafetensorError) as error:
        raise write_error(target, error, "nothing was changed there") from error


def has_sliding_window(model: PreTrainedModel) -> bool:
    """Return whether some attention of a model sees a part of the text alone: its last tokens, or a chunk of it."""
    config: Any = getattr(model.config, "text_config", None) or model.config
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ()  # GPT-Neo's name
    if kinds:
        return any(word in kind for kind in kinds for word in ("sliding", "chunked", "local"))
    return bool(getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None))


@explain_arguments
def attach(
    model: PreTrainedModel,
    method: str | Method | PeftConfiguration,
    name: str = "default",
    head: Literal["train", "freeze"] = "train",
    pooling: Pooling = "model",
    *,
    data: Iterable[Mapping[str, Any]] | None = None,
    original: PreTrainedModel | None = None,
) -> Tuned:
    """Attach a method to a model and put it in use. The model is changed in place, and all other weights are frozen.

    Initial values are drawn from torch's global random generator.

    Args:
        model: A model of transformers, or a SentenceTransformer or CrossEncoder, whose model of transformers is tuned.
        method: An expression, such as "prefix(length=16) + layernorm", a method object, or a configuration of PEFT,
            such as LoraConfig(r=8, target_modules=["q_proj"]).
        name: The name of the delta on this model: letters, digits, "-" and "_".
        head: "train" trains the task head, "freeze" does not. The head is saved with the delta either way.
        pooling: The input of a head whose class reads the model's `pooler_output`: "model" for the output of the
            class's own pooler; or the mean, the first or the last of the hidden states of the text.
        data: For methods that start from data, such as eva: some batches as the model reads them, mappings of tensors,
            each of which passes through the base model once, without dropout.
        original: For loftq, the model before it was quantised.

    Returns:
        The handle of the model.

    Raises:
        DeltuneError: The method is unknown, lacks the data that it starts from, or needs a place that this model does
            not have, the name is taken, the head does not read a pooler, the model is quantised in a way that cannot be
            tuned, a part of it belongs to another model with deltas, or there is too little memory. The model stays as
            it was.
    """
    check_versions()
    model = _checked_model(model)
    with _default_modes():
        check_gradients_pass(model)
        of_peft = method if hasattr(method, "peft_type") and hasattr(method, "to_dict") else None
        parsed = _parse_or_explain(method) if of_peft is None else None  # type: ignore[arg-type]
        if head not in ("train", "freeze"):
            raise DeltuneError(unknown_name("head", head, ("train", "freeze")))
        handle = find_tuned(model)
        check_name(name, handle.names if handle else ())
        anatomy = handle.anatomy if handle else inspect(model)
        _check_head_plain(anatomy)
        if parsed is None:
            paths = [path for path, _ in model.named_modules()]
            parsed = peft_config.method_of_config(anatomy, cast(Any, of_peft), paths, has_sliding_window(model))
        check_pooling(model, anatomy, pooling)
        handle = handle or Tuned(model)
        planned = handle.attached.resolve(parsed, pooling)
        check_data(parsed, data, original)
        check_memory(model, anatomy, planned, parsed, TRAINING_COPIES)
        if any(edit.modification.form.needs == "attention" for edit in planned.edits):
            for config in all_configs(model):
                prefix_implementation(attention_implementation(config))
        _attach(handle, parsed, planned, name, head, pooling, data, original)
    return handle


def attach_trained_head(model: PreTrainedModel, source: str, pooling: str, name: str = "default") -> Tuned:
    """Attach a delta that leaves a model's own head as it is, and has it read what the model's files say.

    Args:
        model: A classifier over the labels of the files.
        source: The name of the model, whose files have the head where it reads another pooling than its class.
        pooling: The pooling that the head reads.
        name: The name of the delta on this model.
    """
    handle = attach(model, "head", name, head="freeze", pooling=pooling)  # type: ignore[arg-type]
    if pooling != "model" and not begin_with_head_of(source, model, handle.anatomy, handle.delta(name).pooling):
        raise DeltuneError(f"the linear of {source} is no head over the labels that stand beside it ({HEAD_LABELS})")
    return handle


def _parse_or_explain(method: str | Method) -> Method:
    """Parse a method; of what is a folder and no method, say how a delta is loaded."""
    try:
        return parse(method)
    except DeltuneError:
        if isinstance(method, str | Path) and os.path.isdir(method):
            raise DeltuneError(
                f"{excerpt(str(method))} is a folder, and a method is an expression such as 'lora(rank=8)': a saved "
                f"delta is attached by deltune.load(model, {excerpt(str(method))})"
            ) from None
        raise


@contextlib.contextmanager
def _default_modes() -> Iterator[None]:
    """Make tensors on the CPU and with gradients, also inside `torch.device("meta")` and torch.inference_mode().

    Tensors that are made in inference mode cannot be trained later, and a delta is moved to the model's devices.
    """
    on_cpu = torch.get_default_device() == torch.device("cpu")
    with torch.inference_mode(False), contextlib.nullcontext() if on_cpu else torch.device("cpu"):
        yield


def _attach(
    handle: Tuned, parsed: Method, planned: ResolvedMethod, name: str, head: str, pooling: Pooling,
    data: Iterable[Mapping[str, Any]] | None, original: PreTrainedModel | None,
) -> None:  # fmt: skip
    attached, base_value = handle.attached, handle.attached.state.base_value
    heads = tuple(t.name for t in handle.anatomy.tensors if t.area == "head")
    delta = attached.move_to_model(Delta(parsed, planned, heads, head))
    delta.pooling = pooling
    statistics: dict[Edit, torch.Tensor] = {}
    if any(edit.form.statistic for edit in delta.all_edits()):
        with handle.disable():
            statistics = collect_statistics(attached, delta, data, original)
    delta.initialize(lambda edit: attached.base_place(edit.place, statistics.get(edit)))
    for name_in_model, sparse in delta.masked_tensors():
        sparse.initialize(base_value(name_in_model).detach())
    _start_rows(handle, delta)
    owned = delta.owned_tensor_names
    for owned_name, value in zip(owned, attached.state.base_values(owned), strict=True):
        set_in_parameter_dict(delta.held, parameter_key(owned_name), nn.Parameter(value.detach().clone()))
    low_precision = [n for n in delta.selected if base_value(n).dtype in (torch.bfloat16, torch.float16)]
    if low_precision:
        warnings.warn(
            f"{parsed!r} trains {len(low_precision)} tensors of {base_value(low_precision[0]).dtype} in place, where "
            "small updates are lost to rounding: load the model in float32 and use autocast",
            stacklevel=4,
        )
    for waste in (*planned.wasteful_parts(), *_padding_rows(handle.model, planned)):
        warnings.warn(waste, stacklevel=4)
    attached.add(name, delta, attached.base_labels)


def _padding_rows(model: PreTrainedModel, planned: ResolvedMethod) -> Iterator[str]:
    """Yield for each table of embeddings whose padding token is chosen that its row gets no gradient."""
    for tensor, mask in planned.masked:
        if not isinstance(mask, RowMask) or tensor.aliases:  # a tied row gets one from the vocabulary
            continue
        padding = getattr(model.get_submodule(tensor.name.rpartition(".")[0]), "padding_idx", None)
        if padding in mask.rows:
            yield (
                f"token {padding} is the padding token of {tensor.name}, whose row gets no gradient, so that it stays "
                "as it is: leave it out of tokens="
            )


@torch.no_grad()
def _start_rows(handle: Tuned, delta: Delta) -> None:
    """Initialize prompt rows with the embeddings of given token ids, repeated up to the prompt's length."""
    for edit in delta.all_edits():
        form = edit.modification.form
        if isinstance(form, Prompt) and form.init_from:
            embeddings = handle.model.get_submodule(handle.anatomy.stacks[0].words or "")
            ids = [form.init_from[i % len(form.init_from)] for i in range(form.length)]
            device = next(device for _, _, device in loaded_devices(embeddings, handle.attached.state.offloaded))
            with handle.disable():  # the base model's embeddings, whatever delta is in use
                edit.set_initial_value("rows", embeddings(torch.tensor(ids, device=device)))


@explain_arguments
def load(
    model: PreTrainedModel | str | Path,
    folder: str | Path | None = None,
    name: str = "default",
    *,
    allow_nonfinite: bool = False,
    use: bool = True,
    base: Literal["same", "any"] = "same",
    revision: str | None = None,
    token: str | bool | None = None,
) -> Tuned:
    """Attach a saved delta under a name, whatever it was called when it was saved, and put it in use.

    `load(folder)` loads the base model too, by the name that the folder has for it, and `load("BASE", folder)` the base
    of this name, with the head that the delta was tuned with; `tuned.model` is that model.

    `load(model, "user/name")` fetches a delta from the Hugging Face Hub if there is no such folder here. Only the files
    of a delta, of PEFT or of AdapterHub are downloaded.

    The folder may come from a stranger: nothing in it is executed, every size in it is compared with the model and with
    the length of its file before anything is allocated, and a symbolic link is only followed inside the folder (and to
    the blobs of a Hugging Face cache).

    Args:
        model: The base model that the delta was trained on, or its folder or hub id; or the delta's folder alone.
        folder: A run, its `delta` folder, any folder that `save` wrote, a Trainer's checkpoint of a model with a delta,
            or an adapter folder of PEFT or AdapterHub. Or a hub id, OWNER/NAME; a `Path` is never one.
        name: What the delta is called on this model.
        allow_nonfinite: Load values that are NaN or infinite as they are, instead of refusing them.
        use: Whether the delta is put in use, in place of the one that is in use now. False: that one stays in use.
        base: "same" loads the delta only on the base model that it was tuned on. "any" takes every model with the same
            names and shapes of tensors, such as a quantised form of it, and warns of what differs.
        revision: For a hub id: a branch, a tag or a commit. Default: the branch main.
        token: For a hub id: an access token. Default: the one of `hf auth login`.

    Returns:
        The handle of the model.

    Raises:
        DeltuneError: The folder holds no delta; the hub does not have it or cannot be reached; a file is truncated,
            altered or not what its format says; the delta is of another base model, of other tensors, or of a head that
            this model class does not have; another library's options have no translation here. The model stays as it
            was.
    """
    if folder is None and isinstance(model, str | Path):
        where = _folder_or_fetched(model, revision, token)
        model = _checked_model(_load_base_of(where))
    elif folder is not None:
        where = _folder_or_fetched(folder, revision, token)
        model = _checked_model(_load_base_of(where, str(model)) if isinstance(model, str | Path) else model)
    else:
        raise DeltuneError("no folder is given: load(model, folder), or load(folder) with the base model as well")
    with _default_modes():
        saved = None if _is_foreign_delta(where) else serialization.open_delta(where)
        handle = find_tuned(model)
        check_name(name, handle.names if handle else ())
        handle = handle or Tuned(model)
        if saved is None:
            delta, labels = _read_foreign_delta(handle.attached, where, allow_nonfinite)
        else:
            delta, labels = _read_delta(handle.attached, saved, allow_nonfinite, base)
        handle.attached.add(name, delta, labels, use)
        _freeze_without_gradients(handle.attached, name)
        return handle


def _freeze_without_gradients(attached: Attached, name: str) -> None:
    """Freeze a loaded delta on a quantised model that lets no gradient through, and say so."""
    try:
        check_gradients_pass(attached.model)
    except DeltuneError as error:
        delta = attached.delta(name)
        parameters = attached.state.parameters_by_name(delta)
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        if delta.saved_requires_grad is not None:  # what use() gives them back
            delta.saved_requires_grad = dict.fromkeys(parameters, False)
        warnings.warn(f"delta {name!r} can be used but not trained here: {error}", stacklevel=4)


def read_delta(attached: Attached, folder: Path) -> tuple[Delta, HeadLabels]:
    """Read a saved delta for a model without attaching it; other threads may use the model meanwhile."""
    with _default_modes():
        if _is_foreign_delta(folder):
            return _read_foreign_delta(attached, folder, allow_nonfinite=False)
        return _read_delta(attached, serialization.open_delta(folder), allow_nonfinite=False)


def check_base_of_delta(attached: Attached, base: BaseFacts, where: Path, allowed: str = "same") -> None:
    """Check that a saved delta was tuned on this model, by what its folder says, without reading its tensors.

    Other threads may use the model meanwhile.
    """
    compared = base.tokens if base.compared_tokens is None else base.compared_tokens
    serialization.check_base(base, where, attached.base_fingerprint(compared), allowed)


def add_delta(attached: Attached, name: str, delta: Delta, labels: HeadLabels) -> None:
    """Attach a delta that `read_delta` has read, and leave in use what is in use."""
    check_name(name, attached.names)
    with _default_modes():
        attached.add(name, delta, labels, use=False)


def _folder_or_fetched(folder: str | Path, revision: str | None, token: str | bool | None) -> Path:
    """The folder of a delta: on this machine, or fetched from the hub."""
    if hub.names_repository(folder):
        return hub.fetch_delta(str(folder), revision, token)
    where = user_path(folder, "folder")
    if revision is not None:
        raise DeltuneError(
            f"revision={revision!r} is for a delta on the hub, and {str(where)!r} "
            f"{'is a folder here' if where.exists() else 'is no hub id, OWNER/NAME'}: leave revision out"
        )
    return where


def _is_foreign_delta(where: Path) -> bool:
    return is_foreign(where) and not has_file(where, serialization.FACTS)


def _load_base_of(where: Path, name: str = "") -> PreTrainedModel:
    """Load the base model that a folder names, or another, with the head that its delta was tuned with."""
    labels: list[str] | None
    if _is_foreign_delta(where):
        head, base, count = foreign_base(where)
        labels = None if count is None else [f"LABEL_{i}" for i in range(count)]
    else:
        facts = serialization.read_metadata(where)
        head, base = "", facts.base.name
        labels = [label for _, label in facts.labels.pairs] if facts.labels else None
    base = name or base
    if not base:
        raise DeltuneError(f"{where} does not name its base model: give it, as in load('BASE', folder)")
    try:
        head = head or head_of_class(base, facts.base.model)
        return load_model(base, head, labels if head in HEADS_WITH_LABELS else None)
    except DeltuneError as error:
        raise DeltuneError(
            f"the base model of {where}, {base!r}, cannot be loaded: {error} Or load it yourself: load(model, folder)"
        ) from error


def _read_delta(
    attached: Attached, saved: serialization.SavedDelta, allow_nonfinite: bool, base: str = "same"
) -> tuple[Delta, HeadLabels]:
    """Make the delta of a folder for this model, after all checks; without labels of its own it has the model's."""
    facts, where, model = saved.facts, saved.where, attached.model
    check_base_of_delta(attached, facts.base, where, base)
    head, heads_here = tuple(facts.head.tensors), _head_tensors(attached)
    if head and head != heads_here:
        raise DeltuneError(
            f"{where} holds a head of {facts.base.model} ({', '.join(head[:8])}); {type(model).__name__} has "
            f"{', '.join(heads_here) or 'none'}: load the base model as {facts.base.model}"
        )
    if head:
        _check_purpose(facts.base.model, model, where)
    method, explicit = parse_saved_method(attached.anatomy, facts, len(saved.tensors), where)
    check_pooling(model, attached.anatomy, facts.pooling)
    planned = attached.resolve(explicit, facts.pooling)
    labels = None
    if facts.labels is not None and (head or not heads_here):
        labels = HeadLabels(facts.labels.pairs, facts.labels.problem_type)
    needed = _check_file(attached, planned, head, saved.tensors, labels, where)
    check_memory(model, attached.anatomy, planned, explicit)
    delta = attached.move_to_model(Delta(method, planned, head, facts.head.mode, folded=True))
    delta.pooling = facts.pooling
    delta.trained = facts.trained.model_dump(exclude_none=True) if facts.trained else {}
    _fill(attached, delta, needed, saved.numbers(), where, allow_nonfinite)
    return delta, labels or attached.base_labels


def _head_tensors(attached: Attached) -> tuple[str, ...]:
    return tuple(t.name for t in attached.anatomy.tensors if t.area == "head")


def _check_purpose(saved_class: str, model: PreTrainedModel, where: Path) -> None:
    """Raise an error for a model whose head has tensors of these names for another purpose, such as tagging."""
    here = {match[0] for kind in type(model).__mro__ if (match := _PURPOSE.search(kind.__name__))}
    saved = _PURPOSE.search(saved_class)
    if saved and here and saved[0] not in here:
        raise DeltuneError(
            f"{where} holds a head of {saved_class}, and this model is a {type(model).__name__}: load the base model "
            f"as {saved_class}"
        )


_PURPOSE = re.compile(r"For[A-Z][A-Za-z]*$")
"""The end of the name of a class of transformers, which says what its head is for."""


def _check_file(
    attached: Attached,
    planned: ResolvedMethod,
    head: tuple[str, ...],
    facts: dict[str, TensorInfo],
    labels: HeadLabels | None,
    where: Path,
) -> Expected:
    """Check, before anything is allocated, that a file has the tensors of a resolved method on this model."""
    anatomy = attached.anatomy
    owned = tuple(dict.fromkeys((*(t.name for t in planned.selected), *head)))
    needed = expected_tensors(anatomy, planned, owned, head)
    check_tensors(needed, facts, where)
    shapes = {t.name: t.shape for t in anatomy.tensors}
    _check_head(
        len(labels.id2label) if labels else 0,
        len(attached.base_labels.id2label) if anatomy.output_kind == "labels" and labels else None,
        {name: (facts[f"base.{name}"].shape, tuple(shapes[name])) for name in head}, where,
    )  # fmt: skip
    return needed


def _fill(
    attached: Attached,
    delta: Delta,
    needed: Expected,
    numbers: dict[str, torch.Tensor],
    where: Path,
    allow_nonfinite: bool,
) -> None:
    """Draw what a new delta does not save, and copy the tensors of a file, which has the expected ones, into it."""
    delta.draw()
    check_positions(needed, numbers, where)
    parameters = delta.tensors_to_save()
    shapes: dict[str, tuple[int, ...] | None] = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    check_shapes(shapes | {f"base.{name}": None for name in delta.owned_tensor_names}, tensor_infos(numbers), where)
    filled = dict(parameters)
    with torch.no_grad():
        copy_tensors(list(parameters.values()), [numbers[name] for name in parameters])
        owned = delta.owned_tensor_names
        for name, like in zip(owned, attached.state.base_values(owned), strict=True):
            # the file's memory is unaligned, which would change the last bits of results
            value = numbers[f"base.{name}"].to(device=like.device, dtype=like.dtype, copy=True)
            filled[f"base.{name}"] = parameter = nn.Parameter(value)
            set_in_parameter_dict(delta.held, parameter_key(name), parameter)
        if not allow_nonfinite:
            check_finite(filled, where)


def _read_foreign_delta(attached: Attached, where: Path, allow_nonfinite: bool) -> tuple[Delta, HeadLabels]:
    """Make a delta of a folder of PEFT or AdapterHub; if it has no head, the model's own stays and is frozen."""
    adapter = read_foreign(attached, where)
    planned = attached.resolve(adapter.method)
    head = _head_tensors(attached)
    if adapter.head and (missing := [n for n in head if n not in adapter.head]):
        raise DeltuneError(f"{where} has only a part of a head; missing: {', '.join(missing)}")
    head_tensors = {n: adapter.head.get(n, attached.state.base_value(n).detach()) for n in head}
    labels = attached.base_labels
    if adapter.head:
        width = next(iter(head_tensors[head[-1]].shape), 0)  # the last linear's outputs
        names = adapter.labels or tuple(label for _, label in labels.id2label)
        names = names if len(names) == width else tuple(f"LABEL_{i}" for i in range(width))
        labels = HeadLabels(tuple(enumerate(names)), labels.problem_type)
    numbers = adapter.tensors | {f"base.{n}": t for n, t in head_tensors.items()}
    untouched = {
        f"base.{n}": TensorInfo("F32", tuple(t.shape)) for n, t in head_tensors.items() if n not in adapter.head
    }
    try:
        needed = _check_file(attached, planned, head, tensor_infos(numbers) | untouched, labels, where)
    except DeltuneError as error:
        if error.fault == "files":
            error.fault = "model"  # such a folder does not identify its base, which is more often another one
        raise
    check_memory(attached.model, attached.anatomy, planned, adapter.method)
    mode = "train" if adapter.head else "freeze"
    delta = attached.move_to_model(Delta(adapter.method, planned, head, mode, folded=True))
    _fill(attached, delta, needed, numbers, where, allow_nonfinite)
    return delta, labels


@explain_arguments
def export(
    model: PreTrainedModel,
    folder: str | Path,
    format: str = "peft",
    name: str | None = None,
    *,
    pooling: Literal["model"] | None = None,
) -> Path:
    """Write a delta in the format of another library, completely or not at all.

    Args:
        model: A model with attached deltas.
        folder: A new or empty folder.
        format: "peft", the adapter folder that PEFT loads. "adapterhub", what AdapterHub's `load_adapter` takes.
            "vllm", a folder of PEFT that vLLM serves, and "llama.cpp", one that its script convert_lora_to_gguf.py
            converts: both for LoRA on a causal language model.
        name: The delta's name. Default: the delta in use.
        pooling: "model" has a head that was trained on another pooling read the class's pooler, which gives other
            outputs. Default: such a delta is refused.

    Returns:
        The folder.

    Raises:
        DeltuneError: The folder is not empty, the format is unknown, nothing is attached under this name, or the
            format cannot express a part of the method; the message lists all such parts with the reasons.
    """
    if not isinstance(model, nn.Module):
        raise DeltuneError(
            f"export takes a model with a delta attached, and then the new folder; its first argument is "
            f"{describe_value(model)}. Load the model and the delta first, as in export(model, 'DIR'), or export the "
            "folder of a run on the command line: deltune export RUN --output DIR"
        )
    attached = tuned(model).attached
    if format not in FORMATS:
        raise DeltuneError(unknown_name("format", format, FORMATS))
    if not gives_up_pooling(pooling) and (trained := attached.delta(name).pooling) != "model":
        raise DeltuneError(
            f"this delta's head reads {trained!r} of the hidden states, and {format} has adapters of the model's class "
            "alone, whose head reads its pooler: train with --pooling model, or export with it (pooling='model'), "
            "which gives other outputs; deltune merge RUN --output DIR writes the whole model for sentence-transformers"
        )
    with attached.whole():
        options, tensors = _exported(attached, format, name)
    return write_once(attached.model, lambda: _write_folder(folder, options, tensors))


def _check_head_plain(anatomy: Anatomy) -> None:
    """Raise an error for a task head with quantised tensors, which is saved with every delta."""
    if quantized := [t for t in anatomy.tensors if t.area == "head" and t.quantized]:
        raise DeltuneError(
            f"the task head of {anatomy.model} is quantised ({quantized[0].name}: {quantized[0].quantized}), and a "
            "delta has a head of its own that is trained: leave the head in floating point (llm_int8_skip_modules of "
            "BitsAndBytesConfig, modules_to_not_convert of other configurations)"
        )


def _check_head(labels: int, model_labels: int | None, shapes: dict[str, tuple[Any, Any]], where: Path) -> None:
    """Check that a head fits this model; only its last linear may have another number of labels, its first axis."""
    last = next(reversed(shapes), "").rpartition(".")[0]
    widths = {shape[:1] for name, (shape, _) in shapes.items() if name.rpartition(".")[0] == last}
    for name, (shape, here) in shapes.items():
        relabelled = name.rpartition(".")[0] == last and len(shape) == len(here) > 0 and shape[1:] == here[1:]
        if shape != here and not (relabelled and shape[0] == labels):
            raise DeltuneError(
                f"{where}: head tensor {name} has shape {tuple(shape)}, this model's head has {tuple(here)}; only the "
                f"number of labels may differ, and the file names {labels}"
            )
        if shape == here and relabelled and model_labels not in (None, labels) and shape[0] == model_labels:
            raise DeltuneError(f"{where} names {labels} labels, but its head tensor {name} has {shape[0]} outputs")
    if len(widths) > 1:
        raise DeltuneError(f"{where}: the tensors of its head's {last} have different numbers of outputs")


def _checked_model(model: object) -> PreTrainedModel:
    """Return a plain model of transformers, also the one inside a SentenceTransformer.

    Raises:
        DeltuneError: It is something else, such as a model wrapped by PEFT.
    """
    model = model_inside(model)
    if isinstance(model, PreTrainedModel):
        refuse_sharded(model, ADDED_LATE, BEFORE_SHARDING)
        check_quantization(model)
        check_offloading(model)
        refuse_inference_tensors(model)
        handle = find_tuned(model)
        if handle is not None:
            follow_offloading(handle.attached.state)
        refuse_shared_modules(model)
        return model
    advice = f"; {wrapped}" if (wrapped := describe_wrapped(model)) else ", as in attach(model, method)"
    if hasattr(model, "peft_config"):
        advice = ": take PEFT's layers off first (its unload()), or save it and deltune.load its folder"
    elif not wrapped and (hasattr(model, "add_adapter") or hasattr(model, "load_lora_weights")):  # of diffusers
        advice = ": it has its own adapters (add_adapter); of a pipeline, the text_encoder is a model of transformers"
    elif isinstance(model, Tuned):
        advice = ": give its model, as in attach(tuned.model, method)"
    elif isinstance(model, str | Path | PreTrainedConfig):
        advice = ": load the model first, with transformers' Auto class for its task or deltune.models.load_model"
    raise DeltuneError(f"a method is attached to a model of transformers, not to {describe_value(model)}{advice}")


def find_tuned(model: nn.Module) -> Tuned | None:
    """Return the handle of a model, or None if nothing is attached."""
    handle: Any = submodules_of(model).get(HANDLE_NAME)
    return handle if isinstance(handle, Tuned) else None


def tuned(model: nn.Module) -> Tuned:
    """Return the handle of a model with attached deltas.

    Args:
        model: The model, the handle itself, or a module that wraps the model, as torch.compile and
            DistributedDataParallel do.

    Returns:
        The handle, the same object that `attach` or `load` returned.

    Raises:
        DeltuneError: Nothing is attached to the model.
    """
    if isinstance(model, Tuned):
        return model
    if not isinstance(model, nn.Module):
        raise DeltuneError(f"deltune.tuned takes a model that deltas are attached to, not {describe_value(model)}")
    handle = find_tuned(wrapped_model(model) or model)
    if handle is None:
        raise DeltuneError(
            f"nothing is attached to this {type(model).__name__}; call deltune.attach(model, method) first"
        )
    return handle


class ScheduleCallback(TrainerCallback):
    """Call `Tuned.advance` in each step of a Trainer, which methods with a schedule need, such as `adalora`.

    Trainer(model=model, …, callbacks=[deltune.ScheduleCallback()])
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse to scale the loss where a penalty is added to gradients, which knows no scale."""
        deltas = tuned(kwargs["model"]).attached.training() if args.fp16 else []
        if penalised := [delta for delta in deltas if delta.adds_penalties()]:
            raise DeltuneError(
                f"fp16=True scales the loss, but not the penalty of {penalised[0].method!r}: give bf16=True, or for "
                "adalora orthogonality=0"
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance the delta in use, after the step of the optimizer and before its gradients go."""
        tuned(kwargs["model"]).advance(min(1.0, (state.global_step + 1) / state.max_steps))


class DeltaCheckpointMixin:
    """For a trainer of sentence-transformers: resume from checkpoints of deltas, and load the best one at the end.

    Checkpoints of every Trainer hold the deltas alone. transformers' Trainer reads them as they are, and the trainers
    of sentence-transformers read them as whole models. Put it first:
    `class MyTrainer(DeltaCheckpointMixin, SentenceTransformerTrainer): pass`.
    """

    model: Any
    accelerator: Any

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        """Load the deltas, and the other modules of the model that have files of their own, such as a dense layer."""
        inner = tuned(self.model).model
        inner.load_state_dict(load_file(Path(checkpoint_path) / SAFE_WEIGHTS_NAME), strict=False)
        for name, module in self.accelerator.unwrap_model(self.model).named_children():
            files = [*Path(checkpoint_path).glob(f"{name}_*/{SAFE_WEIGHTS_NAME}")]
            if files and inner not in [*module.modules()]:
                module.load_state_dict(load_file(files[0]))
