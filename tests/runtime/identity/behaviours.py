"""What a model is asked to do, bare and with a delta that changes nothing: forward passes, gradients, generation."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.modeling_outputs import BaseModelOutput

from .specimens import GENERATING, ROLES, Entry, batch, build

NEW = 5  # tokens that are generated
Run = Callable[[Entry, PreTrainedModel], Any]
Prepare = Callable[[PreTrainedModel], PreTrainedModel]
BODIES = ("base", "masked", "causal", "seq2seq")  # a class with a task head repeats what its body does
EVERY = ("layernorm", "lora", "sum", "disabled", "detached")


@dataclass(frozen=True)
class Behaviour:
    """One thing to do with a model.

    Args:
        run: does it, and returns every tensor that comes out, in any nesting.
        roles: the classes it is a row of; all of them when empty.
        prepare: what is done to the bare model before a delta is attached; none of it when None.
        variants: the deltas it is run with.
        quick: whether it is a row of the sample that always runs.
    """

    name: str
    run: Run
    roles: tuple[str, ...] = ()
    prepare: Prepare | None = None
    variants: tuple[str, ...] = ("sum",)
    quick: bool = False

    def __str__(self) -> str:
        return self.name


# Forward passes


def outputs(
    entry: Entry, model: PreTrainedModel, padding: str | None = "right", length: int = 8, **options: Any
) -> Any:
    with torch.no_grad():
        return model(**batch(entry, model, padding, length=length), **options)


def _hidden_states(entry: Entry, model: PreTrainedModel) -> Any:
    return outputs(entry, model, output_hidden_states=True)


def _attentions(entry: Entry, model: PreTrainedModel) -> Any:
    with kernel(model, "eager"):
        return outputs(entry, model, output_hidden_states=True, output_attentions=True)


def _embeddings(entry: Entry, model: PreTrainedModel) -> Any:
    """The same batch as vectors; whatever is asked for besides stays."""
    inputs = batch(entry, model)
    with torch.no_grad():
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
        return model(**inputs)


def _later_tokens(entry: Entry, model: PreTrainedModel) -> Any:
    """A forward pass that goes on from the cache of another."""
    inputs = batch(entry, model, None)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    with torch.no_grad():
        first = model(**inputs, use_cache=True)
        if not first.past_key_values:
            raise TypeError("its outputs have no past_key_values")
        more: dict[str, Any] = {name: inputs[name][:, -1:]}
        if name == "decoder_input_ids":
            more |= {
                "encoder_outputs": BaseModelOutput(first.encoder_last_hidden_state),
                "attention_mask": inputs["attention_mask"],
            }
        return model(**more, past_key_values=first.past_key_values, use_cache=True)


@contextlib.contextmanager
def kernel(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Another attention implementation inside the context."""
    configs = {
        id(m.config): m.config for m in model.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ValueError(f"{type(model).__name__} does not take attn_implementation={name!r}")
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _with_kernel(name: str) -> Run:
    def run(entry: Entry, model: PreTrainedModel) -> Any:
        # Compiled, flex attention takes minutes on a CPU; its arithmetic is the same without the compiler.
        with kernel(model, name), torch.compiler.set_stance("force_eager"):
            return outputs(entry, model)

    return run


def _to(dtype: torch.dtype) -> Prepare:
    return lambda model: model.to(dtype)


# Losses and gradients


def _labels(entry: Entry, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    inputs = batch(entry, model)
    rows = torch.tensor([0, 1])
    match entry.role:
        case "sequence" | "choice":
            return {"labels": rows}
        case "question":
            return {"start_positions": rows, "end_positions": rows + 2}
        case "tokens":
            return {"labels": inputs["input_ids"] % 2}
        case _:
            return {"labels": inputs.get("decoder_input_ids", inputs["input_ids"])}


def _loss(entry: Entry, model: PreTrainedModel) -> Any:
    return outputs(entry, model, **_labels(entry, model))


def _training(checkpointing: Mapping[str, Any] | None = None) -> Run:
    """A step in train mode, with dropout: its outputs, and the gradient of the loss at the embeddings' outputs."""

    def run(entry: Entry, model: PreTrainedModel) -> Any:
        embedded: list[torch.Tensor] = []

        def keep(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[-1].clone()  # some families go on in place

        if checkpointing is not None:
            model.gradient_checkpointing_enable(dict(checkpointing))
        words = model.get_input_embeddings().weight  # an encoder and a decoder may share it in modules of their own
        tables = [module for module in model.modules() if getattr(module, "weight", None) is words]
        hooks = [table.register_forward_hook(keep) for table in tables if isinstance(table, torch.nn.Embedding)]
        model.train()
        try:
            made = model(**batch(entry, model), use_cache=False) if _caches(model) else model(**batch(entry, model))
            values = [value for value in flat(made).values() if isinstance(value, torch.Tensor) and value.requires_grad]
            torch.stack([value.float().square().sum() for value in values]).sum().backward()
        finally:
            model.eval()
            for hook in hooks:
                hook.remove()
            if checkpointing is not None:
                model.gradient_checkpointing_disable()
            model.zero_grad()
        if not any(tensor.grad is not None for tensor in embedded):
            raise TypeError("no gradient reaches the outputs of its input embeddings")
        return {"outputs": made, "gradients": [tensor.grad for tensor in embedded]}

    return run


def _caches(model: PreTrainedModel) -> bool:
    return getattr(model.config, "use_cache", None) is not None


# Keeping and resizing


def _reloaded(model: PreTrainedModel) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).requires_grad_(False).eval()


def _resized(model: PreTrainedModel) -> PreTrainedModel:
    model.resize_token_embeddings(103)
    return model.requires_grad_(False)


# Generation


def generate(entry: Entry, model: PreTrainedModel, rows: int = 2, **options: Any) -> Any:
    inputs = batch(entry, model, "left", rows)
    inputs.pop("decoder_input_ids", None)
    fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": 1, "pad_token_id": 1}
    returning = {"return_dict_in_generate": True, "output_scores": True}
    return model.generate(**{**inputs, **fixed, **returning, **options})


def _generation(rows: int = 2, **options: Any) -> Run:
    return lambda entry, model: generate(entry, model, rows, **options)


def _assisted(entry: Entry, model: PreTrainedModel) -> Any:
    """A second model of the same class proposes the tokens; it never has a delta."""
    return generate(entry, model, 1, assistant_model=build(entry), output_scores=False)


def _from_embeddings(entry: Entry, model: PreTrainedModel) -> Any:
    with torch.no_grad():
        vectors = model.get_input_embeddings()(batch(entry, model, "left")["input_ids"])
    return generate(entry, model, input_ids=None, inputs_embeds=vectors)


def _every_output(entry: Entry, model: PreTrainedModel) -> Any:
    with kernel(model, "eager"):
        return generate(
            entry, model, output_attentions=True, output_hidden_states=True, output_logits=True, use_cache=True
        )


def _two_turns(entry: Entry, model: PreTrainedModel) -> Any:
    """A second call that goes on with the cache of the first."""
    first = generate(entry, model, 1)
    if not first.past_key_values:
        raise TypeError("generate returns no past_key_values")
    ids = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)
    mask = torch.ones_like(ids)
    return generate(entry, model, 1, input_ids=ids, attention_mask=mask, past_key_values=first.past_key_values)


def _with_cache(make: Callable[[PreTrainedModel], Any]) -> Run:
    def run(entry: Entry, model: PreTrainedModel) -> Any:
        cache = make(model)
        if model.config.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
        return generate(entry, model, past_key_values=cache)

    return run


def _only(row: int, ids: torch.Tensor) -> list[int]:
    """The tokens that may come next: three, which depend on the last one."""
    return [5 + (int(ids[-1]) * 7 + step) % 80 for step in range(3)]


_SAMPLE = {"do_sample": True, "top_k": 20, "temperature": 1.3}

ROWS = (
    Behaviour("hidden states", _hidden_states, variants=EVERY, quick=True),
    Behaviour("attentions", _attentions, quick=True),
    Behaviour("tuple", lambda e, m: outputs(e, m, return_dict=False), BODIES),
    Behaviour("left padding", lambda e, m: outputs(e, m, "left"), variants=("layernorm", "lora")),
    Behaviour("no padding", lambda e, m: outputs(e, m, None), BODIES),
    Behaviour("long", lambda e, m: outputs(e, m, length=56), ("base", *GENERATING), prepare=lambda model: model),
    Behaviour("inputs_embeds", _embeddings, BODIES),
    Behaviour("later tokens", _later_tokens, ("base", *GENERATING)),
    Behaviour("loss", _loss, tuple(ROLES)[:-1], quick=True),
    Behaviour("training", _training(), variants=("layernorm", "lora", "sum"), quick=True),
    Behaviour("checkpointing", _training({"use_reentrant": False}), quick=True),
    Behaviour("reentrant checkpointing", _training({"use_reentrant": True}), BODIES),
    Behaviour("sdpa", _with_kernel("sdpa"), BODIES),
    Behaviour("flex_attention", _with_kernel("flex_attention"), BODIES),
    Behaviour("bfloat16", outputs, prepare=_to(torch.bfloat16), quick=True),
    Behaviour("float16", outputs, BODIES, prepare=_to(torch.float16)),
    Behaviour("reloaded", outputs, prepare=_reloaded),
    Behaviour("resized", outputs, BODIES, prepare=_resized, quick=True),
    Behaviour("greedy", _generation(), GENERATING, variants=EVERY, quick=True),
    Behaviour("greedy, every output", _every_output, GENERATING),
    Behaviour("greedy without cache", _generation(use_cache=False), GENERATING),
    Behaviour("greedy in bfloat16", _generation(), GENERATING, prepare=_to(torch.bfloat16)),
    Behaviour("greedy after resizing", _generation(), GENERATING, prepare=_resized),
    Behaviour("greedy from embeddings", _from_embeddings, GENERATING),
    Behaviour("greedy, penalised", _generation(repetition_penalty=1.5, no_repeat_ngram_size=2), GENERATING),
    Behaviour("greedy, constrained", _generation(prefix_allowed_tokens_fn=_only), GENERATING, quick=True),
    Behaviour("greedy, guided", _generation(guidance_scale=1.5), ("causal",)),
    Behaviour("greedy in two turns", _two_turns, GENERATING, quick=True),
    Behaviour("greedy, prefill in chunks", _generation(prefill_chunk_size=3), GENERATING),
    Behaviour("sample", _generation(**_SAMPLE), GENERATING, quick=True),
    Behaviour("sample, three of each", _generation(**_SAMPLE, num_return_sequences=3), GENERATING),
    Behaviour("beams", _generation(num_beams=3, num_return_sequences=2), GENERATING, quick=True),
    Behaviour("beams, constrained", _generation(num_beams=2, prefix_allowed_tokens_fn=_only), GENERATING),
    Behaviour("beam sampling", _generation(**_SAMPLE, num_beams=3), GENERATING),
    Behaviour("assisted", _assisted, GENERATING, quick=True),
    Behaviour("assisted by the prompt", _generation(1, prompt_lookup_num_tokens=2, output_scores=False), GENERATING),
    Behaviour("static cache", _generation(cache_implementation="static"), GENERATING, quick=True),
    Behaviour("beams, static cache", _generation(num_beams=2, cache_implementation="static"), GENERATING),
    Behaviour("dynamic cache given", _with_cache(lambda m: DynamicCache(config=m.config)), GENERATING),
    Behaviour(
        "static cache given",
        _with_cache(lambda m: StaticCache(config=m.config.get_text_config(decoder=True), max_cache_len=20)), GENERATING,
    ),
    Behaviour("quantised cache", _with_cache(lambda m: QuantizedCache("fp8", m.config)), GENERATING),
)  # fmt: skip

BEHAVIOURS = {row.name: row for row in ROWS}


def seed() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def prepared(row: Behaviour, entry: Entry) -> PreTrainedModel:
    """A new model for a behaviour that wants one of its own."""
    assert row.prepare is not None
    model = build(entry)
    seed()
    return row.prepare(model)


def results(row: Behaviour, entry: Entry, model: PreTrainedModel) -> dict[str, Any]:
    """What a behaviour gives, flat, after every random generator was seeded."""
    seed()
    return flat(row.run(entry, model))


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """The tensors and numbers inside any nesting of outputs, tuples and caches, by their places."""
    if isinstance(value, torch.Tensor):
        return {place: value}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {place: value}
    if isinstance(value, Mapping):
        parts = dict(value)
    elif isinstance(value, (list, tuple)):
        parts = dict(enumerate(value))
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        parts = {name: part for name, part in vars(value).items() if _holds(part)}
    else:
        return {place: type(value).__name__}
    leaves: dict[str, Any] = {}
    for name, part in parts.items():
        leaves |= flat(part, f"{place}.{name}" if place else str(name))
    return leaves


def _holds(value: Any) -> bool:
    """Whether an attribute of a cache is what it holds, not a configuration or a function."""
    if isinstance(value, (list, tuple)):
        return all(map(_holds, value))
    plain = (torch.Tensor, bool, int, float, str, dict)
    return isinstance(value, plain) or type(value).__module__.startswith("transformers.cache_utils")


def unequal(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """The places at which two results differ in any bit, NaN being equal to NaN, with the largest difference."""
    lines = [f"{place}: only in one of both" for place in one.keys() ^ two.keys()]
    for place in one.keys() & two.keys():
        a, b = one[place], two[place]
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or (a != b and a == a):
                lines.append(f"{place}: {a!r} and {b!r}")
        elif a.shape != b.shape or a.dtype != b.dtype:
            lines.append(f"{place}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}")
        elif not ((a == b) | ((a != a) & (b != b))).all():
            lines.append(f"{place}: differs by {(a.double() - b.double()).abs().nan_to_num().max().item():.3g}")
    return sorted(lines)
