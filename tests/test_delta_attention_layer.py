"""The delta attention layer: what it computes, and its state; `test_attention_layers` has the rest."""

import pytest
import torch
from torch.nn import functional as F

from warploom import ArgumentError
from warploom.nn import DeltaAttention, StateCache
from warploom.ops.delta_attention import reference

Tensor = torch.Tensor
decays = pytest.mark.parametrize("decay", ["none", "head", "feature"])


def layer(device: torch.device, **keywords: object) -> DeltaAttention:
    options = {"key_heads": 2, "head_dim": 6, "value_dim": 5, "backend": "torch"} | keywords
    return DeltaAttention(24, 4, **options).to(device)


@decays
@pytest.mark.parametrize("position", ["none", "rotate"])
def test_it_is_a_recurrence_on_convolved_tokens(decay: str, position: str, device: torch.device) -> None:
    module = layer(device, decay=decay, position=position).double()
    x = torch.randn(2, 11, 24).to(device).double()
    padded = F.pad(module.qkv(x).mT, (3, 0))
    mixed = F.silu(F.conv1d(padded, module.convolution[:, None], groups=padded.shape[1])).mT
    q, k, v = (t.unflatten(-1, (h, -1)) for t, h in zip(mixed.split((12, 12, 20), -1), (2, 2, 4)))
    theta = None if module.position is None else module.position.theta
    place = {"theta": theta, "encoding": position, "interleaved": False, "offset": 0, "normalize": True}
    q, k = (reference.features(t, **place).repeat_interleave(2, 2) for t in (q, k))
    g = torch.zeros(2, 11, 4, 1, device=device, dtype=torch.float64)
    if module.decay is not None:
        steps = F.softplus(module.decay(module.decay_in(x)) + module.dt_bias).unflatten(-1, (4, -1))
        g = -module.A_log.exp()[:, None] * steps
    rows = (t.transpose(1, 2) for t in (q, k, v, module.beta(x).sigmoid()[..., None], g))
    start = torch.zeros(2, 4, 6, 5, device=device, dtype=torch.float64)
    values, _ = reference.recurrence(*rows, start)
    values = F.rms_norm(values.transpose(1, 2) * 6**-0.5, (5,), eps=1e-5)
    expected = module.out(values.flatten(2) * F.silu(module.gate(x)))
    torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_the_cache_has_both_states(device: torch.device) -> None:
    cache = StateCache()
    assert (cache.state, cache.inputs) == (None, None)
    layer(device)(torch.randn(2, 9, 24).to(device), cache)
    assert cache.state is not None
    assert cache.inputs is not None
    assert (cache.state.shape, cache.inputs.shape) == ((2, 4, 6, 5), (2, 44, 3))


def test_the_state_dict_is_as_documented(device: torch.device) -> None:
    shapes = {name: tuple(value.shape) for name, value in layer(device, decay="feature").state_dict().items()}
    assert shapes == {
        "qkv.weight": (44, 24),
        "convolution": (44, 4),
        "beta.weight": (4, 24),
        "gate.weight": (20, 24),
        "out.weight": (24, 20),
        "norm.weight": (5,),
        "decay_in.weight": (6, 24),
        "decay.weight": (24, 6),
        "A_log": (4,),
        "dt_bias": (24,),
    }
    assert "decay_in.weight" not in layer(device).state_dict()
    assert "A_log" not in layer(device, decay="none").state_dict()


@pytest.mark.parametrize(
    "wrong",
    [{"value_dim": 0}, {"key_heads": 3}, {"decay": "token"}, {"position": "cosine"}, {"taps": 1}, {"taps": 0}],
)
def test_wrong_sizes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        DeltaAttention(8, 2, **wrong)
