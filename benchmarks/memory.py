"""Peak memory of a step against PEFT's and against one without a head, and what APET's N costs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import deltune
from deltune.methods.memory import peak_bytes
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


LANGUAGE = ((256, 32_000), (512, 32_000), (1024, 32_000), (256, 128_256))
"""Widths and words of the decoders whose steps are measured with and without their heads."""
TUNED = ("lora(rank=8)", "prefix(length=16) + layernorm", "adapter(rank=8)", "dora(rank=8)", "full")


def language(width: int, words: int, methods: tuple[str, ...] = TUNED, tokens: int = 1024) -> list[Row]:
    """The peak of a step with `causal_loss` beside a step that has no head at all, but for the gradient of a head that
    is trained; for LoRA also the model's own loss, with PEFT's layers and with ours."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4, num_attention_heads=4, vocab_size=words,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    like, ids = LlamaForCausalLM(config), torch.randint(0, words, (4, tokens // 4))
    rows = []

    def of(model: PreTrainedModel, loss: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]) -> float:
        loss(model, ids[:1, :8]).backward()  # what is made once
        model.zero_grad()
        top = peak(lambda: loss(model, ids).backward()) / MIB
        model.zero_grad()
        return top

    def plain_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    for method in methods:
        model = copy.deepcopy(like).train()
        deltune.attach(model, method)
        mine = of(model, lambda model, ids: deltune.causal_loss(model, {"input_ids": ids, "labels": ids}))
        least = of(model, lambda model, ids: model.base_model(input_ids=ids)[0].mean())
        least += 4 * width * words / MIB if method == "full" else 0
        note = f"{mine:.1f} and {least:.1f} MiB"
        if method == TUNED[0]:
            import peft

            options = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
            other: Any = peft.get_peft_model(copy.deepcopy(like), options).train()
            whole = [of(each, plain_loss) for each in (model, other)]
            note += f"; {whole[0]:.1f} with the model's own loss, {whole[1]:.1f} with it and PEFT"
        name = f"peak of a step / without a head: {method}; Llama {width}, {words:,} words, 4 × {tokens // 4}"
        rows.append(Row(name, round(mine / least, 3), Target(1.05 if words < 100_000 else 1.3), note=note))
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
    return [*both, Piece("memory: apet", partial(drawn, encoder, 7), 10.0), *heads]
