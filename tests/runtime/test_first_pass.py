"""X-LoRA: low ranks that a classifier of the hidden states of a first pass weighs."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import deltune
from tables.families import FAMILIES
from tables.specimens import build, stir

IDS = torch.tensor([[3, 7, 8, 4, 5], [1, 1, 5, 6, 9], [7, 8, 3, 4, 5]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS != 1).long()}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"xlora_depth": 3, "xlora_size": 7, "layerwise_scalings": True, "softmax_temperature": 0.5},
    {"enable_softmax": False, "enable_softmax_topk": True, "top_k_lora": 2, "global_scaling_weight": 1.5},
    {"scaling_pass_value": 0.5, "layerwise_scalings": True, "top_k_lora": 2},
)
NAMES = {
    "xlora_depth": "depth", "xlora_size": "width", "layerwise_scalings": "by_place", "enable_softmax": "softmax",
    "softmax_temperature": "temperature", "enable_softmax_topk": "softmax_top_k", "top_k_lora": "top_k",
    "scaling_pass_value": "first", "global_scaling_weight": "scale",
}  # fmt: skip


def differences(options: dict[str, Any], folder: Path) -> tuple[float, float]:
    """The greatest differences of outputs and of the classifier's gradients from PEFT's, by the greatest entry."""
    import peft

    model = build(FAMILIES["llama"], "causal")
    model.config.use_cache = False
    folders = {}
    for number in range(3):
        config = peft.LoraConfig(
            r=2 + number, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(
            folders.setdefault(str(number), folder / str(number))
        )
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=model.config.hidden_size, adapters={n: str(f) for n, f in folders.items()},
        **options,
    )  # fmt: skip
    peer = peft.get_peft_model(copy.deepcopy(model), config).double().eval()
    peer.internal_xlora_classifier.dtype = torch.float64  # of the constant weights of its first pass
    for number, of in folders.items():
        tuned = deltune.load(model, of, name=f"e{number}", use=False)
    arguments = ", ".join(f"{NAMES[name]}={value!r}" for name, value in options.items())
    tuned.combine("mix(e0, e1, e2)", name="m", mixing=f"xlora({arguments})" if arguments else "xlora")
    linears = [module for module in peer.internal_xlora_classifier.layers if isinstance(module, torch.nn.Linear)]
    loras = [n for n, module in peer.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    paths = {key: edit.place.target.path for key, edit in tuned.delta("m").named_edits()}
    pairs = []
    for name, parameter in tuned.delta("m").named_parameters():
        _, owner, leaf = name.split(".")
        if leaf in ("down", "up"):
            continue
        kind, _, layer = leaf.partition("_")
        rows = slice(None)
        if owner in paths:
            (place,) = (i for i, lora in enumerate(loras) if lora.endswith(paths[owner]))
            rows = slice(3 * place, 3 * place + 3)
        theirs = getattr(linears[int(layer)], kind)
        with torch.no_grad():
            parameter.copy_(theirs[rows])
        pairs.append((parameter, theirs, rows))
    assert {id(p) for p, *_ in pairs} == {id(p) for p in tuned.trainable_parameters()}
    assert tuned.count(name="m").method == sum(p.numel() for p in peer.internal_xlora_classifier.parameters())
    outputs = [one(**INPUTS).logits for one in (model, peer)]
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for output in outputs:
        (output * weights).sum().backward()
    gradients = [(p.grad, theirs.grad[rows]) for p, theirs, rows in pairs]
    assert all(theirs.abs().max() > 0 for _, theirs in gradients)
    return tuple(
        max(float((one - two).abs().max() / two.abs().max()) for one, two in some)
        for some in ([tuple(output.detach() for output in outputs)], gradients)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("options", OPTIONS, ids=[" ".join(o) or "defaults" for o in OPTIONS])
def test_xlora_is_pefts(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="no PEFT: pip install -e '.[peers]' -c constraints.txt")
    outputs, gradients = differences(options, tmp_path)
    assert outputs < 1e-12 and gradients < 1e-12


def tuned_llama() -> tuple[Any, deltune.Tuned]:
    model = build(FAMILIES["llama"], "causal")
    return model, stir(deltune.attach(model, "xlora(number=3, rank=2, depth=2, width=4, by_place=True)"), size=0.5)


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**(inputs or INPUTS)).logits
    return result


def test_a_first_pass_has_a_cache_of_its_own() -> None:
    """With a cache, beams, a copied and a shortened one too, a text is generated as without one."""
    model, tuned = tuned_llama()
    stir(deltune.attach(model, "lora(rank=2)", name="other"), seed=3)
    tuned.use("default")
    options = {
        "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 1, "output_scores": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    for rows in (["default"] * 3, ["default", None, "other"]):
        for beams in (1, 3):
            with tuned.rows(rows):
                cached, whole = (
                    model.generate(**INPUTS, **options, num_beams=beams, use_cache=cache) for cache in (True, False)
                )
            assert torch.equal(cached.sequences, whole.sequences)
            scores = [torch.stack(one.scores).nan_to_num(neginf=0) for one in (cached, whole)]
            assert torch.allclose(*scores, rtol=1e-9)
    whole = logits(model, input_ids=IDS)
    with torch.no_grad():
        begun = model(input_ids=IDS[:, :3], use_cache=True)
        ended = model(input_ids=IDS[:, 3:], past_key_values=begun.past_key_values)
        again = copy.deepcopy(ended.past_key_values)
        again.crop(-2)
        repeated = model(input_ids=IDS[:, 3:], past_key_values=again).logits
        with tuned.disable():
            of_base = model(input_ids=IDS[:, :3], use_cache=True).past_key_values
        with pytest.raises(deltune.DeltuneError, match="holds 3 tokens, of which no first pass"):
            model(input_ids=IDS[:, 3:], past_key_values=of_base)
    assert torch.allclose(torch.cat([begun.logits, ended.logits], 1), whole, rtol=1e-10)
    assert torch.equal(repeated, ended.logits)


def test_first_passes_of_rows_and_threads_are_their_own() -> None:
    model, tuned = tuned_llama()
    alone = logits(model)
    stir(deltune.attach(model, "lora(rank=2)", name="other"), seed=3)
    other = logits(model)
    with tuned.rows(["default", None, "other"]):
        mixed = logits(model)
    with tuned.disable():
        base = logits(model)
    assert torch.allclose(mixed, torch.stack([alone[0], base[1], other[2]]), rtol=1e-10)
    tuned.use(["default", "other"])
    joint = logits(model)
    assert not torch.allclose(joint, alone) and not torch.allclose(joint, other)
    tuned.use("default")
    answers: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: answers.append(logits(model))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 3 and all(torch.equal(answer, alone) for answer in answers)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_first_pass_runs_once_for_what_is_computed_again(use_reentrant: bool) -> None:
    model, tuned = tuned_llama()
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        model.train()(**INPUTS, labels=IDS).loss.backward()
        return [parameter.grad.clone() for parameter in tuned.trainable_parameters()]

    plain = gradients()
    assert calls == [False, True]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    calls.clear()
    again = gradients()
    assert len(calls) == 3
    assert all(torch.allclose(one, two, rtol=1e-9) for one, two in zip(plain, again, strict=True))


@pytest.mark.parametrize("failing", [1, 2], ids=["the first pass", "the pass after it"])
def test_a_compiled_pass_that_fails_leaves_no_states_behind(failing: int) -> None:
    model, _ = tuned_llama()
    expected = logits(model)
    calls: list[None] = []

    @torch.compiler.disable
    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) == failing:
            raise MemoryError

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    torch.compiler.reset()
    with torch.no_grad(), pytest.raises(MemoryError):
        torch.compile(model, backend="eager")(IDS.flip(1), use_cache=False)
    hook.remove()
    torch.compiler.reset()
    with torch.no_grad():
        again = torch.compile(model, backend="eager")(**INPUTS, use_cache=False).logits
    assert torch.allclose(again, expected, rtol=1e-10)


def test_where_no_first_pass_can_be() -> None:
    with pytest.raises(deltune.DeltuneError, match="a model with one stack of layers"):
        deltune.attach(build(FAMILIES["t5"], "seq2seq"), "xlora")
    model = build(FAMILIES["llama"], "causal")
    deltune.attach(model, "xlora(number=2) + prompt(length=2)")
    with pytest.raises(deltune.DeltuneError, match="without a prompt"):
        logits(model)
    model = build(FAMILIES["llama"], "causal")
    for name, at in (("a", "'query'"), ("b", "'value', layers=(1,)")):
        tuned = deltune.attach(model, f"lora(rank=2, at={at})", name=name)
    with pytest.raises(deltune.DeltuneError, match="one classifier for all places"):
        tuned.combine("mix(a, b)", name="m", mixing="xlora")
    with pytest.raises(deltune.DeltuneError, match="top_k=3: there are 2 low ranks"):
        tuned.combine("mix(a, b)", name="m", mixing="xlora(top_k=3)")
