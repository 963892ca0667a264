"""Weights in 8 bits, with a scale for each channel."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from test_model import make
from test_precision import adapted
from test_rollout import environment, generator_of, group_of, moved

from fast.eightbit import FLOAT8, LARGEST, form_of, naive_rounded, pack, take
from methods.lora import merged
from rollout import generate
from runtime.mailbox import Mailbox

ROOT = Path(__file__).parent.parent
EIGHT = "float8_e4m3fn"
MATRICES = ("qkv", "attention_out", "gate_up", "mlp_out")


def trained(seed: int = 3, **shape):
    """A model whose channels have very different sizes, as those of trained models have."""
    model = make("dsa indexer", **shape)
    random = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        sizes = torch.randn(p.shape[-1], generator=random).exp()
        p.data.copy_(0.02 * torch.randn(p.shape, generator=random) * sizes)
    return model


def rounded(model, flat=None) -> torch.Tensor:
    """Weights [P] as a generator computes with them."""
    into = torch.empty_like(model.flat)
    take(into, model.flat if flat is None else flat, form_of(model, EIGHT))
    return into


def summed_axis(name: str) -> int:
    """Of the model's own matrices [in, out] the first, of torch's [out, in] the second."""
    return 0 if name.rpartition(".")[2] in MATRICES else 1


def test_all_weights_are_rounded_as_the_naive_form_rounds_each_matrix():
    model = trained()
    twin = copy.deepcopy(model)
    twin.flat.copy_(rounded(model))
    kinds = set()
    for (name, p), (_, q) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        kinds.add((p.dim(), name.rpartition(".")[2]))
        if p.dim() == 1:
            assert torch.equal(p, q), f"{name} is a vector"
        else:
            wanted = naive_rounded(p.detach(), summed_axis(name))
            assert torch.equal(q, wanted) and not torch.equal(q, p), name
    assert {(2, "qkv"), (2, "weight"), (1, "attention_norm"), (1, "bias")} <= kinds


def test_an_output_channel_can_be_taken_out_of_the_sum():
    """x @ W with rounded W is (x @ codes) * scale: why a scale may not differ along the sum."""
    W, x = trained().layers[0].gate_up.detach(), torch.randn(5, 16)
    scale = W.abs().amax(0) / LARGEST
    codes = (W / scale).to(FLOAT8).float()
    torch.testing.assert_close(x @ naive_rounded(W, 0), x @ codes * scale)
    assert codes.abs().amax(0).eq(LARGEST).all()


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(worst):
    """In its whole channel, and nowhere else; channels of zeros stay zeros."""
    model = trained()
    model.layers[0].qkv.data[3, 5] = worst
    model.layers[1].mlp_out.data[:, 2] = 0.0
    model.layers[1].mlp_out.data[:, 3] *= 1e-41 / model.layers[1].mlp_out.data[:, 3].abs().max()
    wanted = model.flat.isnan()
    model.flat.copy_(rounded(model))
    qkv = model.layers[0].qkv
    assert qkv[:, 5].isnan().all() and model.flat.isnan().sum() == len(qkv) >= wanted.sum()
    assert (model.layers[1].mlp_out[:, 2:4] == 0).all()
    W = torch.zeros(4, 3)
    assert torch.equal(naive_rounded(W, 0), W)


def test_a_mailbox_sends_a_byte_for_a_weight_and_the_scales():
    model = trained()
    form = form_of(model, EIGHT)
    mailbox = Mailbox(model.flat, form=form)
    reader = Mailbox(model.flat, mailbox.place, form)
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() == 2]
    scales = sum(p.shape[1 - summed_axis(name)] for name, p in matrices)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    weights = sum(p.numel() for _, p in matrices)
    assert mailbox.buffers[0].nbytes == weights + 4 * scales + 4 * vectors
    mailbox.publish(3, model.flat)
    version, packed = reader.read()
    assert version == 3 and packed.dtype == torch.uint8
    assert packed.nbytes == mailbox.buffers[0].nbytes
    assert torch.equal(rounded(model, packed), rounded(model))
    with pytest.raises(RuntimeError):
        mailbox.publish(4, model.flat[1:])
    reader.close()
    mailbox.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_or_not_a_generator_computes_with_the_same_weights(dtype):
    """Packed, as the mailbox gives them; exact, as a replay gives them; and not rounded twice."""
    model = make().on("cpu", dtype)
    new, found = moved(model).to(dtype), []
    for offered in (new, pack(new, form_of(model, EIGHT))):
        by = generator_of(copy.deepcopy(model), size=2, rollout_weights=EIGHT)
        by.set_weights(1, offered)
        (group,) = generate(by, [group_of(0, start=1)])
        found.append((by.model.flat, [t.logprobs for t in group.trajectories]))
        wanted = rounded(by.model, new)
        assert torch.equal(by.model.flat, wanted) and not torch.equal(wanted, new)
    (a, logprobs), (b, others) = found
    assert torch.equal(a, b) and all(map(np.array_equal, logprobs, others))


def test_adapters_are_added_up_and_then_rounded():
    model = adapted()
    by = generator_of(model, environment(), rollout_weights=EIGHT)
    by.set_weights(1, moved(model, 0.05))
    by._adopt()
    whole = merged(by.policy)
    assert torch.equal(by.policy.flat, moved(adapted(), 0.05)), "adapters themselves stay exact"
    assert torch.equal(by.model.flat, rounded(whole)) and not torch.equal(by.model.flat, whole.flat)
