"""Names that PEFT, AdapterHub and transformers use, each with its name in deltune; used in error messages only.

Nothing runs under another library's name: an error says which word to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import MAX_NAME_LENGTH, closest_match, unknown_name

METHOD_NAMES: Mapping[str, str] = {
    "lntuning": "layernorm", "ln": "layernorm", "layernormtuning": "layernorm", "rmsnorm": "layernorm",
    "biasonly": "bitfit", "biastuning": "bitfit", "bias": "bitfit",
    "prompttuning": "prompt", "softprompt": "prompt", "softprompts": "prompt",
    "prefixtuning": "prefix", "prefixtuningflat": "prefix",
    "houlsby": "adapter(style='houlsby')", "houlsbyadapter": "adapter(style='houlsby')",
    "doubleseqbn": "adapter(style='houlsby')", "pfeiffer": "adapter(style='pfeiffer')",
    "pfeifferadapter": "adapter(style='pfeiffer')", "seqbn": "adapter(style='pfeiffer')",
    "bn": "adapter", "bottleneckadapter": "adapter", "adapters": "adapter", "seriesadapter": "adapter",
    "parbn": "parallel_adapter", "parallel": "parallel_adapter", "scaledparallel": "scaled_parallel_adapter",
    "mamadapter": "mam", "mixandmatch": "mam", "diffprune": "diff_pruning",
    "qlora": "lora(…), on a model that is loaded quantised",
    "rslora": "lora(scale=…), with alpha / √rank for the scale", "ptuningv2": "p_tuning_v2",
    "fulltuning": "full", "fullfinetuning": "full", "finetuning": "full", "finetune": "full", "fft": "full",
    **dict.fromkeys(("laddersidetuning", "lst", "sidetuning"), "ladder"),
    "linearprobe": "head", "linearprobing": "head", "headonly": "head", "classifieronly": "head", "none": "head",
}  # fmt: skip
"""Names of methods in other libraries, simplified as by `simplified`, each with an expression."""

ABSENT_METHODS: Mapping[str, str] = {
    "lily": "its router is averaged over a batch, so that rows change each other",
    "shadow": "it is a second model beside this one; a network that reads the states of all layers is ladder",
    **dict.fromkeys(
        ("bone", "compacterplusplus", "multitaskprompttuning", "cpt", "adaptionprompt", "seqbninv", "noreft", "direft",
         "ptuning", "pvera", "cartridge"), "",
    ),
}  # fmt: skip
"""Methods of others that have no translation, so that no similar name is suggested, each with its reason or ""."""

ARGUMENT_NAMES: Mapping[str, tuple[str, ...]] = {
    "r": ("rank",), "lora_r": ("rank",), "lora_rank": ("rank",), "dim": ("rank", "length"),
    "reduction_factor": ("rank", "bottleneck"), "bottleneck_size": ("reparameterise", "rank", "bottleneck"),
    "adapter_size": ("rank", "bottleneck"), "adapter_dim": ("rank", "bottleneck"),
    "lora_alpha": ("alpha", "scale"), "alpha": ("scale",), "scaling": ("scale",), "adapter_scalar": ("scale",),
    "lora_dropout": ("dropout",), "p": ("dropout",), "prob": ("dropout",),
    "target_modules": ("at", "site", "layers"), "modules": ("at", "site", "layers"),
    "target_parameters": ("at",), "token_indices": ("tokens",), "trainable_token_indices": ("tokens",),
    "attn_matrices": ("at",), "site": ("at",), "at": ("site",),
    "layers_to_transform": ("layers",), "layer": ("layers",), "leave_out": ("layers",),
    "num_virtual_tokens": ("length",), "prefix_length": ("length",), "prompt_length": ("length",),
    "pre_seq_len": ("length",), "n_tokens": ("length",), "num_tokens": ("length",),
    "non_linearity": ("activation",), "nonlinearity": ("activation",), "act": ("activation",),
    "encoder_hidden_size": ("reparameterise",), "prefix_projection": ("reparameterise",),
    "ln_before": ("layer_norm",), "add_layer_norm_before": ("layer_norm",),
    "init_weights": ("init",),
    "prompt_tuning_init": ("init_from",), "prompt_tuning_init_text": ("init_from",),
    **dict.fromkeys(("adapter_name", "adapter", "adapter_setup", "new_adapter_name", "load_as"), ("name",)),
    **dict.fromkeys(("adapter_names", "adapters", "selected_adapters"), ("names", "name")),
    **dict.fromkeys(("peft_config", "config", "adapter_config"), ("method",)),
    **dict.fromkeys(
        ("save_directory", "model_id", "pretrained_model_name_or_path", "adapter_name_or_path", "path", "checkpoint",
         "output_dir", "save_path"), ("folder",),
    ),
    **dict.fromkeys(("base_model", "model_name_or_path"), ("model",)),
    "set_active": ("use",),
}  # fmt: skip
"""Names of arguments in other libraries, each with the names that it can have here."""

ARGUMENT_NOTES: Mapping[str, str] = {
    "reduction_factor": "rank is the width of the model divided by it",
    "leave_out": "layers are those that are tuned",
    "prompt_tuning_init_text": "init_from takes token ids: tuple(tokenizer(text)['input_ids'])",
    "modules_to_save": "Every method trains the task head (attach has head='freeze'); add Selection(…) for others",
    "selected_adapters": "Call it once for each delta",
    "adapter_setup": "Several deltas act on rows of their own: with tuned.rows([…]): …",
    "is_trainable": "Leave it out: what is loaded can be trained on",
    "with_head": "Leave it out: the head goes with its delta",
    **dict.fromkeys(
        ("safe_serialization", "is_main_process", "save_embedding_layers", "safe_merge", "progressbar",
         "low_cpu_mem_usage", "autocast_adapter_dtype", "torch_device", "mixed", "ephemeral_gpu_offload"),
        "Leave it out",
    ),
    "bias": "Add a term that trains biases: … + bitfit(which='linear')",
    "init_lora_weights": "Leave it out: LoRA starts as by PEFT's default, W_down by Kaiming and W_up at 0",
    "use_rslora": "Give scale=alpha / √rank",
    "use_dora": "Write dora in place of lora",
    "rank_pattern": "Write a sum, such as lora(rank=4, at='query') + lora(rank=8, at='value')",
    "alpha_pattern": "Write a sum, such as lora(scale=1, at='query') + lora(scale=2, at='value')",
    "mh_adapter": "style='houlsby' has adapters after attention and FFN, style='pfeiffer' after the FFN alone",
    "output_adapter": "style='houlsby' has adapters after attention and FFN, style='pfeiffer' after the FFN alone",
    "is_parallel": "Use parallel_adapter",
    **dict.fromkeys(
        (
            "task_type", "inference_mode", "peft_type", "base_model_name_or_path", "fan_in_fan_out", "layers_pattern",
            "token_dim", "num_layers", "num_attention_heads", "num_transformer_submodules", "feedforward_modules",
            "auto_mapping", "revision",
        ),
        "Leave it out: the model itself tells it",
    ),
}  # fmt: skip
"""What to do about arguments of other libraries that have no name here, or one of another meaning."""

SITE_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "q", "q_lin", "query_proj", "wq", "to_q", "query_layer"), "query"),
    **dict.fromkeys(("k_proj", "k", "k_lin", "key_proj", "wk", "to_k"), "key"),
    **dict.fromkeys(("v_proj", "v", "v_lin", "value_proj", "wv", "to_v"), "value"),
    **dict.fromkeys(("o_proj", "o", "out_proj", "out_lin", "wo_proj"), "output"),
    **dict.fromkeys(
        ("gate_up_proj", "fc1", "lin1", "c_fc", "wi", "wi_0", "wi_1", "w1", "w3",
         "intermediate", "dense_h_to_4h", "intermediate_dense"), "ffn_up",
    ),
    **dict.fromkeys(
        ("embed_tokens", "wte", "word_embeddings", "embed", "embeddings", "shared", "tok_embeddings"), "embedding"
    ),
    **dict.fromkeys(("embed_out", "output_projection", "decoder", "unembed"), "lm_head"),
    **dict.fromkeys(("gate", "router_proj"), "router"),
    **dict.fromkeys(("down_proj", "fc2", "lin2", "wo", "w2", "dense_4h_to_h", "output_dense"), "ffn_down"),
    **dict.fromkeys(("mlp", "feed_forward", "feedforward", "fc", "ff"), "ffn"),
    **dict.fromkeys(("self_attn", "self_attention", "attn", "self"), "attention"),
    **dict.fromkeys(("layer_norm", "layernorm", "ln", "rms_norm"), "norm"),
}  # fmt: skip
"""Usual names of modules inside a layer, each with the site that they are."""

SEVERAL_SITES: Mapping[str, str] = {
    "all-linear": "('query', 'key', 'value', 'output', 'ffn_up', 'ffn_down')",
    "all_linear": "('query', 'key', 'value', 'output', 'ffn_up', 'ffn_down')",
    **dict.fromkeys(("c_attn", "qkv", "qkv_proj", "query_key_value", "in_proj"), "('query', 'key', 'value')"),
    "c_proj": "'output' in an attention and 'ffn_down' in an FFN",
    "dense": "'output' in an attention, 'ffn_up' or 'ffn_down' in an FFN",
    **dict.fromkeys(("classifier", "score"), "no site but the task head: attach(…, head='train') trains it"),
}  # fmt: skip
"""Usual names of modules that are not one site."""

OPTION_NAMES: Mapping[str, str] = {
    "learning_rate": "lr", "model_name_or_path": "model", "model_name": "model", "pretrained_model": "model",
    "dataset": "data", "dataset_name": "data", "train_file": "data", "data_dir": "data", "data_path": "data",
    "task_name": "task", "num_train_epochs": "epochs", "num_epochs": "epochs", "n_epochs": "epochs",
    "max_steps": "steps", "num_train_steps": "steps", "per_device_train_batch_size": "device_batch_size",
    "train_batch_size": "batch_size", "per_device_eval_batch_size": "device_batch_size",
    "eval_batch_size": "device_batch_size", "bs": "batch_size", "warmup_ratio": "warmup", "warmup_steps": "warmup",
    "lr_scheduler_type": "schedule", "lr_scheduler": "schedule", "scheduler": "schedule",
    "max_seq_length": "max_length", "max_seq_len": "max_length", "max_source_length": "max_length",
    "block_size": "max_length", "seq_len": "max_length", "max_grad_norm": "clip", "gradient_clipping": "clip",
    "label_smoothing_factor": "label_smoothing", "adam_beta1": "adam_betas", "adam_beta2": "adam_betas",
    "fp16": "precision", "bf16": "precision", "dtype": "precision", "max_train_samples": "max_train_rows",
    "max_eval_samples": "validation_rows", "max_predict_samples": "test_rows", "num_beams": "beams",
    "max_target_length": "target_length", "max_new_tokens": "max_tokens", "eval_steps": "validate_every",
    "early_stopping_patience": "patience", "metric_for_best_model": "metric", "metric_name": "metrics",
    "early_stopping": "patience", "label_names": "labels", "prompt_template": "template", "random_seed": "seed",
    "text_column": "columns", "label_column": "columns", "label_column_name": "columns", "text_column_name": "columns",
    "peft_type": "method", "peft_method": "method", "adapter_config": "method", "peft_config": "method",
    "lora_r": "method", "lora_rank": "method", "lora_alpha": "method", "lora_dropout": "method",
    "lora_target_modules": "method", "target_modules": "method", "num_virtual_tokens": "method",
    "output_dir": "output", "run_dir": "output", "overwrite_output_dir": "fresh",
}  # fmt: skip
"""Options of transformers' Trainer and its example scripts, each with the option of `deltune train`."""

OPTION_NOTES: Mapping[str, str] = {
    "per_device_train_batch_size": "batch_size is the rows of a step over all devices; gradients accumulate up to it",
    "gradient_accumulation_steps": "Give batch_size, the rows of a step, and device_batch_size, those at a time",
    "eval_strategy": "Every epoch is validated, or give validate_every, in steps",
    "evaluation_strategy": "Every epoch is validated, or give validate_every, in steps",
    "save_strategy": "The best delta is kept, and a run that is stopped goes on where it was",
    "save_steps": "The best delta is kept, and a run that is stopped goes on where it was",
    "load_best_model_at_end": "Leave it out: the best delta is what a run keeps",
    "resume_from_checkpoint": "Leave it out: a run that is stopped goes on where it was",
    "logging_steps": "Leave it out: log.jsonl has about 20 lines an epoch",
    "memory": "deltune choose has it, and deltune count --step-memory says what a method takes",
    "minutes": "deltune choose has it", "budget": "deltune fit solves a size for it, and deltune choose has it",
    "do_train": "Leave it out", "do_eval": "Leave it out", "do_predict": "Leave it out",
    "fp16": "precision is fp32, bf16 or auto", "bf16": "precision is fp32, bf16 or auto",
    "dtype": "precision is fp32, bf16 or auto",
    "lora_r": 'An expression has it: method "lora(rank=8)"', "lora_rank": 'An expression has it: method "lora(rank=8)"',
    "lora_alpha": 'An expression has it: method "lora(rank=8, alpha=16)"',
    "lora_dropout": 'An expression has it: method "lora(dropout=0.1)"',
    "lora_target_modules": "An expression has it: method \"lora(at=('query', 'value'))\"",
    "target_modules": "An expression has it: method \"lora(at=('query', 'value'))\"",
    "num_virtual_tokens": 'An expression has it: method "prefix(length=16)"',
    "adam_beta1": "adam_betas has both: 0.9,0.999", "adam_beta2": "adam_betas has both: 0.9,0.999",
    "text_column": "columns has all: text=a,label=b", "label_column": "columns has all: text=a,label=b",
    "text_column_name": "columns has all: text=a,label=b", "label_column_name": "columns has all: text=a,label=b",
}  # fmt: skip
"""What more there is to know about some options of others."""


FUNCTION_NAMES: Mapping[str, str] = {
    "get_peft_model": "deltune.attach(model, method)", "inject_adapter_in_model": "deltune.attach(model, method)",
    "PeftModel": "deltune.load(model, folder)", "AutoPeftModel": "deltune.load(folder)",
    "from_pretrained": "deltune.load(model, folder)", "PeftConfig": "deltune.parse(expression)",
    "save_pretrained": "tuned.save(folder)", "get_peft_model_state_dict": "tuned.save(folder)",
    "push_to_hub": "tuned.push_to_hub(repo_id)",
    "print_trainable_parameters": "print(tuned.count())", "get_nb_trainable_parameters": "tuned.count()",
    "merge_and_unload": "tuned.merge()", "merge_adapter": "tuned.merge()", "unload": "tuned.detach()",
    "delete_adapter": "tuned.detach(name)", "set_adapter": "tuned.use(name)",
    "active_adapters": "tuned.active", "active_adapter": "tuned.active",
    "add_adapter": "deltune.attach(model, method, name)", "load_adapter": "deltune.load(model, folder, name)",
    "disable_adapter": "with tuned.disable(): …", "disable_adapters": "with tuned.disable(): …",
    "get_base_model": "tuned.model, the model that you attached to", "base_model": "tuned.model",
    "generate": "model.generate(…), of the model itself", "forward": "model(…), of the model itself",
    "peft_config": "tuned.method", "config": "tuned.model.config",
}  # fmt: skip
"""Functions, methods and attributes of PEFT, each with what does the same here."""


def hint_for_function(name: str) -> str | None:
    """Return what a function or method of PEFT is here, as a sentence, or None for another name."""
    name = "AutoPeftModel" if name.startswith("AutoPeftModelFor") else name
    return f"Here it is: {FUNCTION_NAMES[name]}." if name in FUNCTION_NAMES else None


def simplified(name: str) -> str:
    """Return a name in small letters and digits alone, without the "Config" of a class."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("config")


def hint_for_name(name: object, vocabulary: Collection[str] = ()) -> str | None:
    """Return what a name in an expression is called here."""
    if not isinstance(name, str):
        return None
    key = simplified(name)
    if key in ABSENT_METHODS:
        return f"deltune has no such method{': ' + ABSENT_METHODS[key] if ABSENT_METHODS[key] else ''}."
    ours = {simplified(known): known for known in reversed(list(vocabulary))}
    for candidate in (key, key.removesuffix("tuning")):
        if method := ours.get(candidate) or METHOD_NAMES.get(candidate):
            return f"Here it is called {method}."
    return hint_for_site(name)


def registration_hint(names: Iterable[str]) -> str:
    """Return how parts of the user's own, by their names, become known, as a sentence."""
    calls = ", ".join(f"deltune.register({name[:MAX_NAME_LENGTH]})" for name in names)
    return (
        f"A part of your own is registered first: {calls}; on the command line, --import FILE runs the file that does."
    )


def unknown_term(kind: str, name: str, known: Collection[str], vocabulary: Collection[str] | None = None) -> str:
    """Return the message for a name in an expression that nothing has.

    It says what the name is called here, or which name is nearest. It also says that parts of the user's own are
    registered first, but for a name in small letters that is near one of ours: that is a method misspelt.
    """
    hint = hint_for_name(name, known if vocabulary is None else vocabulary)
    if hint is None:
        guess = closest_match(name, sorted(known))
        sentences = [f"Did you mean {guess!r}?"] if guess else []
        sentences += [] if guess and name.islower() else [registration_hint([name])]
        hint = " ".join(sentences)
    return unknown_name(kind, name, known, hint=hint or None)


def hint_for_site(name: object) -> str | None:
    """Return which site a module of this name is, as a sentence, or None for a name that is not usual."""
    if not isinstance(name, str):
        return None
    leaf = name.rpartition(".")[2].lower()
    if leaf in SITE_NAMES:
        return f"Here it is called {SITE_NAMES[leaf]!r}."
    return f"Here it is {SEVERAL_SITES[leaf]}." if leaf in SEVERAL_SITES else None


def hint_for_argument(key: str, parameters: Collection[str]) -> str | None:
    """Return what an argument of another library is called here."""
    name = next((name for name in ARGUMENT_NAMES.get(key, ()) if name in parameters), None)
    note = ARGUMENT_NOTES.get(key) if name is not None or key not in ARGUMENT_NAMES else None
    return " ".join(filter(None, (name and f"Here it is called {name!r}.", note and f"{note}.")))


def argument_of_methods(key: str) -> str | None:
    """Return what an argument of methods is called here, or None for one that no method has."""
    of_methods = {"rank", "scale", "alpha", "dropout", "at", "site", "layers", "length", "activation", "init", "tokens"}
    if key in of_methods:
        return key
    return next((name for name in ARGUMENT_NAMES.get(key, ()) if name in of_methods), None)


def hint_for_option(name: object, written: str = "{}") -> str | None:
    """Return what an option of another library's training is called here."""
    option = OPTION_NAMES.get(str(name))
    if written != "{}" and option is not None:
        option = option.replace("_", "-")
    called = option and f"Here it is {written.format(option)}."
    note = OPTION_NOTES.get(str(name))
    return " ".join(filter(None, (called, note and f"{note}."))) or None


def expression_of(config: Any) -> str | None:
    """Return the expression that does what a configuration object of PEFT or AdapterHub does, as far as it shows."""
    kind = getattr(config, "peft_type", None) or getattr(config, "architecture", None)
    if kind is None:
        return None
    key = simplified(str(getattr(kind, "value", kind)))
    name = METHOD_NAMES.get(key, key)
    values: dict[str, Any] = {}
    if name == "lora":
        of_others = any(getattr(config, option, None) for option in _OTHER_THAN_LORA)
        if of_others or (_value(config, "target_modules", "attn_matrices") and _sites(config) is None):
            return None
        values = {"rank": _value(config, "r"), "alpha": _value(config, "lora_alpha", "alpha")}
        values |= {"dropout": _value(config, "lora_dropout", "dropout") or None, "at": _sites(config)}
    elif name in ("prompt", "prefix"):
        values = {"length": _value(config, "num_virtual_tokens", "prefix_length")}
        if getattr(config, "prefix_projection", False):
            values["reparameterise"] = _value(config, "encoder_hidden_size")
    elif name not in ("layernorm", "ia3"):
        return None
    layers = _value(config, "layers_to_transform")
    values["layers"] = tuple(layers) if isinstance(layers, list) else (layers,) if isinstance(layers, int) else None
    arguments = ", ".join(f"{key}={value!r}" for key, value in values.items() if value is not None)
    return f"{name}({arguments})" if arguments else name


_OTHER_THAN_LORA = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "exclude_modules", "target_parameters")
"""Options of PEFT's LoRA by which it is another method, or another one for each module."""


def _value(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _sites(config: Any) -> tuple[str, ...] | None:
    """Return the sites of the modules that a configuration names; None where one of them is not a usual name."""
    modules = _value(config, "target_modules", "attn_matrices")
    names = [modules] if isinstance(modules, str) else sorted(modules or ())
    sites = [SITE_NAMES.get(name.rpartition(".")[2].lower()) for name in names if isinstance(name, str)]
    return tuple(site for site in dict.fromkeys(sites) if site) if sites and all(sites) else None
