"""opacus: gradients of single samples, by its own hooks where it can, and by one backward pass for any method."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import deltune
from deltune.errors import DeltuneError
from tables.families import FAMILIES
from tables.specimens import batch, build, stir

opacus = pytest.importorskip("opacus")
LABELS = torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize("method", ["lora(rank=2)", "prefix(length=2)", "adapter(rank=2)", "layernorm"])
def test_gradients_of_samples(method: str) -> None:
    model = build(FAMILIES["bert"], "sequence", torch.float32).train()
    tuned = stir(deltune.attach(model, method))
    inputs, parameters = batch(model, rows=4), list(tuned.trainable_parameters())
    single = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses_of(model, inputs)]
    loader = torch.utils.data.DataLoader(range(4), batch_size=4)  # type: ignore[arg-type]

    def private(mode: str) -> None:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=1e6,
            poisson_sampling=False, grad_sample_mode=mode,
        )[1].attach_step_hook(lambda _: False)  # fmt: skip

    if method == "layernorm":  # the model's own modules are called
        private("hooks")
        losses_of(model, inputs).mean().backward()
        samples = [p.grad_sample for p in parameters]  # type: ignore[attr-defined]
    else:
        with pytest.raises(DeltuneError, match=r'grad_sample_mode="no_op"'):
            private("hooks")
        private("no_op")
        losses = losses_of(model, inputs)
        samples = list(torch.autograd.grad(losses, parameters, torch.eye(4), is_grads_batched=True))
    for row, expected in enumerate(single):
        for sample, gradient in zip(samples, expected, strict=True):
            torch.testing.assert_close(sample[row], gradient, rtol=1e-4, atol=1e-5)


def losses_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(**inputs).logits, LABELS, reduction="none")
