"""Peak memory of a step against PEFT's and against one without a head, and what APET's N costs."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import deltune
from deltune.compat import TorchDispatchMode
from deltune.methods.memory import peak_bytes
from deltune.models import packaged_minilm
from deltune.studies.jobs.timed_model import TimedModel, time_interleaved

from .frame import Piece
from .peers import PAIRS, ours, theirs
from .rows import Row, Target, compared, missing
from .shapes import Shape, build, minilm

MIB = 2**20
DRAWN = (100, 1_000, 10_000)
"""N of APET; a LoRA of rank 8 at MiniLM's shape has 73,728 scalars."""


def peak(work: Callable[[], object]) -> int:
    """Greatest number of bytes in use at once during the work, beyond those in use before it, on a CPU."""
    return peak_bytes(work, torch.device("cpu"))


def of_step(turn: TimedModel) -> tuple[int, int]:
    """Bytes of a step at its peak, and bytes that stay between steps: trained values and the optimiser's state. The
    frozen weights are not counted."""
    assert turn.optimiser is not None
    turn.step()  # the optimiser's state is made in the first
    trained = [p for group in turn.optimiser.param_groups for p in group["params"]]
    state = [v for tensors in turn.optimiser.state.values() for v in tensors.values() if isinstance(v, torch.Tensor)]
    gc.collect()
    return peak(turn.step), sum(t.nbytes for t in (*trained, *state))


def beside(shape: Shape) -> list[Row]:
    """Every method beside PEFT's."""
    like, rows = build(shape), []
    for pair in PAIRS:
        name = f"peak memory / PEFT's: {pair.name}; {shape}"
        other = theirs(pair, shape, like)
        if other is None:
            rows.append(missing(name, "PEFT cannot"))
            continue
        mine, yours = sum(of_step(ours(pair.ours, shape, like))), sum(of_step(other))
        # to a thousandth, which is what the table shows: below are single numbers, such as a step's count
        rows.append(Row(name, round(mine / yours, 3), Target(1.0), note=f"{mine / MIB:.1f} and {yours / MIB:.1f} MiB"))
    return rows


def ladder(shape: Shape) -> list[Row]:
    """A step of a network beside the model, by one of LoRA, whose gradients go through the model."""
    like = build(shape)
    side, through = (sum(of_step(ours(method, shape, like))) for method in ("ladder", "lora(rank=8)"))
    name, note = f"peak memory / LoRA's: ladder; {shape}", f"{side / MIB:.1f} and {through / MIB:.1f} MiB"
    return [Row(name, round(side / through, 3), Target(0.5), note=note)]


LANGUAGE = ((256, 32_000), (512, 32_000), (1024, 32_000), (256, 128_256))
"""Widths and words of the decoders whose steps are measured with and without their heads."""
TUNED = ("lora(rank=8)", "prefix(length=16) + layernorm", "adapter(rank=8)", "dora(rank=8)", "full")


Loss = Callable[[PreTrainedModel, torch.Tensor], Any]


class _Kernels(TorchDispatchMode):
    """Counts the operations that compute: what is a view, or memory without values, is none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [one.alias_info for one in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in returned)
        self.count += not view and "empty" not in func._schema.name
        return func(*args, **(kwargs or {}))


def counts(work: Callable[[], object]) -> tuple[int, int]:
    """Kernels that the work dispatches, and its floating-point operations."""
    with _Kernels() as kernels:
        work()
    with FlopCounterMode(display=False) as flops:
        work()
    return kernels.count, flops.get_total_flops()


def plain_loss(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    return model(input_ids=ids, labels=ids).loss


def our_loss(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    return deltune.causal_loss(model, {"input_ids": ids, "labels": ids})


def step_of_trainer(kind: Any, arguments: TrainingArguments, model: Any, ids: torch.Tensor, **more: Any) -> Any:
    """Make a Trainer of a model, and return what takes a step's forward and backward pass in it."""
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids.tolist()])
    trainer = kind(model, arguments, train_dataset=rows, **more)
    trainer.current_gradient_accumulation_steps = 1  # which its train() sets

    def step(ids: torch.Tensor) -> Any:
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        return trainer.training_step(trainer.model, batch)

    return step


def language(width: int, words: int, methods: tuple[str, ...] = TUNED, tokens: int = 1024) -> list[Row]:
    """The peak of a step with `causal_loss` beside a step that has no head at all, but for the gradient of a head that
    is trained; for LoRA also what PEFT's layers take with the model's own loss, in a Trainer, and in TRL's with its
    fused head, which has no Triton on a CPU, and the kernels and floating-point operations of each."""
    import peft
    import trl

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4, num_attention_heads=4, vocab_size=words,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    like, ids = LlamaForCausalLM(config), torch.randint(0, words, (4, tokens // 4))
    shape, rows = f"Llama {width}, {words:,} words, 4 × {tokens // 4}", []

    def of(model: PreTrainedModel, step: Callable[[torch.Tensor], Any]) -> tuple[float, int, int]:
        step(ids[:1, :8])  # what is made once
        model.zero_grad()
        top = peak(lambda: step(ids)) / MIB
        model.zero_grad()
        kernels, flops = counts(lambda: step(ids))
        model.zero_grad()
        return top, kernels, flops

    def by_hand(model: PreTrainedModel, loss: Loss) -> tuple[float, int, int]:
        return of(model, lambda batch: loss(model, batch).backward())

    def with_peft() -> Any:
        options = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(copy.deepcopy(like), options).train()

    measures: dict[str, tuple[float, int, int]] = {}
    for method in methods:
        model = copy.deepcopy(like).train()
        deltune.attach(model, method)
        mine = by_hand(model, our_loss)
        least = by_hand(model, lambda model, ids: model.base_model(input_ids=ids)[0].mean())[0]
        least += 4 * width * words / MIB if method == "full" else 0
        note = f"{mine[0]:.1f} and {least:.1f} MiB"
        name = f"peak of a step / without a head: {method}; {shape}"
        rows.append(Row(name, round(mine[0] / least, 3), Target(1.05 if words < 100_000 else 1.3), note=note))
        if method == TUNED[0]:
            measures["ours"] = mine
    other = with_peft()
    measures["PEFT"] = by_hand(other, plain_loss)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = dict(output_dir=folder, report_to=[], use_cpu=True, activation_checkpointing=False)
        step = step_of_trainer(Trainer, TrainingArguments(**options), other, ids)
        measures["Trainer + PEFT"] = of(other, step)
        other, tokenizer = with_peft(), AutoTokenizer.from_pretrained(packaged_minilm())
        arguments = trl.SFTConfig(**options, max_length=None, eos_token=tokenizer.sep_token)
        step = step_of_trainer(trl.SFTTrainer, arguments, other, ids, processing_class=tokenizer)
        measures["TRL + PEFT"] = of(other, step)
    for name, (top, kernels, flops) in measures.items():
        rows.append(Row(f"peak of a step of {TUNED[0]}: {name}; {shape}", round(top, 1), unit="MiB"))
        for what, figure, of_peft in (("kernels", kernels, measures["PEFT"][1]), ("flops", flops, measures["PEFT"][2])):
            limit = Target(1.0) if name == "ours" else None
            note = f"{figure:,} and {of_peft:,}"
            rows.append(Row(f"{what} / PEFT's: {name}; {shape}", round(figure / of_peft, 3), limit, note=note))
    return rows


def drawn(shape: Shape, rounds: int, counts: tuple[int, ...] = DRAWN) -> list[Row]:
    """APET: what stays between steps grows with N and with nothing else; time and peak beside the method's own."""
    like, method = build(shape), "lora(rank=8)"
    whole = ours(method, shape, like)
    sides = {count: ours(f"apet({method}, parameters={count})", shape, like) for count in counts}
    sizes = {count: of_step(turn) for count, turn in sides.items()}
    seconds = time_interleaved({0: whole.step, **{count: turn.step for count, turn in sides.items()}}, rounds)
    top, kept = of_step(whole)
    rows = [
        compared(f"apet of {method}, N={count}: step / the method's; {shape}", seconds[count], seconds[0])
        for count in counts
    ]
    for count, (peaked, _) in sizes.items():
        note = f"{peaked / MIB:.1f} and {top / MIB:.1f} MiB"
        rows.append(Row(f"apet of {method}, N={count}: peak memory / the method's; {shape}", peaked / top, note=note))
    few, many = min(counts), max(counts)
    per = (sizes[many][1] - sizes[few][1]) / (many - few)
    rows.append(
        Row(
            f"apet of {method}: kept between steps, bytes for each of N; {shape}", per, Target(12.0), unit="B",
            note=f"a value and AdamW's two moments are 12; {kept / MIB:.2f} MiB for the method itself",
        )
    )  # fmt: skip
    return rows


def pieces() -> list[Piece]:
    encoder, decoder = minilm("encoder", rows=8), minilm("decoder", rows=8)
    both = [Piece(f"memory: {shape}", partial(beside, shape), 10.0) for shape in (encoder, decoder)]
    heads = [Piece(f"memory: head, {w}, {v}", partial(language, w, v), 60.0) for w, v in LANGUAGE]
    beside_model = Piece("memory: ladder", partial(ladder, minilm("encoder", False, 0.0, rows=32)), 10.0)
    return [*both, Piece("memory: apet", partial(drawn, encoder, 7), 10.0), beside_model, *heads]
