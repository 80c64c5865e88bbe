"""Frequencies for longer sequences, against transformers' own."""

import copy
from typing import Any

import pytest
import torch

from warploom import ArgumentError, lrpe_rotate
from warploom.nn import Attention, KVCache, RotaryEmbedding
from warploom.nn.rope_scaling import scale_frequencies

FACTORS = {"short_factor": [1.0 + f / 8 for f in range(32)], "long_factor": [2.0 + f for f in range(32)]}
LENGTH = {"original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 4096},
    "yarn": {"rope_type": "yarn", "factor": 8.0, **LENGTH},
    "yarn of deepseek": {"rope_type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 1.0, **LENGTH},
    "yarn of gpt-oss": {"rope_type": "yarn", "factor": 32, "beta_fast": 20.0, "truncate": False, **LENGTH},
    "yarn by lengths": {"rope_type": "yarn", "max_position_embeddings": 65536, "attention_factor": 1.25, **LENGTH},
    "longrope": {"rope_type": "longrope", "factor": 32.0, **FACTORS, **LENGTH},
    "longrope by lengths": {"rope_type": "longrope", "max_position_embeddings": 131072, **FACTORS, **LENGTH},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH},
}


@pytest.mark.parametrize("length", [None, 100, 20000])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str, length: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = SCALINGS[name]
    kind, longest = scaling["rope_type"], scaling.get("max_position_embeddings", 4096)
    theirs = {key: value for key, value in scaling.items() if key != "max_position_embeddings"}
    if kind == "yarn" and "factor" not in scaling:
        theirs["factor"] = None
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=longest,
        rope_parameters={**theirs, "rope_theta": 500000.0},
    )
    rope = RotaryEmbedding(64, base=500000.0, scaling=scaling, length=length)
    if kind == "default":
        expected, factor = RotaryEmbedding(64, base=500000.0).theta[0], 1.0
    else:
        expected, factor = utils.ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)
    torch.testing.assert_close(rope.theta[0], expected, rtol=2e-6, atol=0.0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    exact, _ = scale_frequencies(scaling, 500000.0, 32, length)
    assert exact.dtype == torch.float64
    assert torch.equal(rope.theta[0], exact.float())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_what_turns_is_multiplied(rotary_dim: int, interleaved: bool, device: torch.device) -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, **LENGTH}
    place = {"rotary_dim": rotary_dim, "interleaved": interleaved, "scaling": scaling}
    rope, x = RotaryEmbedding(8, **place).to(device), torch.randn(2, 5, 2, 8).to(device)
    factor = torch.ones(4)
    factor[: rotary_dim // 2] = rope.attention_factor
    factor = factor.repeat_interleave(2) if interleaved else factor.repeat(2)
    expected = lrpe_rotate(x, rope.theta, interleaved=interleaved) * factor.to(device)
    torch.testing.assert_close(rope(x), expected)
    layer = Attention(16, 2, causal=True, position=rope).to(device)  # by one operator on a GPU, where all turns
    sequence, cache = torch.randn(2, 6, 16).to(device), KVCache()
    with torch.no_grad():
        parts = [layer(sequence[:, start : start + 3], cache=cache) for start in (0, 3)]
        torch.testing.assert_close(layer(sequence), torch.cat(parts, dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learnable", [False, True])
def test_a_checkpoint_keeps_its_frequencies(learnable: bool) -> None:
    trained = RotaryEmbedding(64, scaling=SCALINGS["llama3"], learnable=learnable)
    other = RotaryEmbedding(64, scaling=SCALINGS["yarn"], learnable=learnable)
    state = trained.bfloat16().state_dict()
    assert list(state) == ["theta"]
    assert state["theta"].dtype == torch.float32
    other.load_state_dict(state)
    assert torch.equal(other.theta, trained.theta)
    with torch.device("meta"):
        late = RotaryEmbedding(64, scaling=SCALINGS["yarn"], learnable=learnable)
    late.load_state_dict(state, assign=True)
    assert torch.equal(late.theta, trained.theta)
    assert torch.equal(copy.deepcopy(late).theta, trained.theta)
    assert not RotaryEmbedding(64).state_dict()


def test_frequencies_of_a_length() -> None:
    rope, theta = RotaryEmbedding(64, scaling=SCALINGS["longrope"]), RotaryEmbedding(64).theta
    torch.testing.assert_close(rope.theta[0], theta[0] / torch.tensor(FACTORS["short_factor"]))
    rope.set_length(5000)
    torch.testing.assert_close(rope.theta[0], theta[0] / torch.tensor(FACTORS["long_factor"]))
    rope.set_length(None)
    torch.testing.assert_close(rope.theta[0], theta[0] / torch.tensor(FACTORS["short_factor"]))


def test_the_base_may_be_among_them() -> None:
    scaling = {**SCALINGS["linear"], "rope_theta": 1e6}
    assert RotaryEmbedding(64, scaling=scaling).base == 1e6
    with pytest.raises(ArgumentError, match="base must be left out, or rope_theta"):
        RotaryEmbedding(64, scaling=scaling, base=1e4)


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        ({"rope_type": "mrope"}, "got 'mrope'"),
        ({"rope_type": "linear"}, "with factor for linear; got no factor"),
        ({"rope_type": "dynamic", "factor": 2.0}, "got no max_position_embeddings"),
        ({"rope_type": "yarn", **LENGTH}, "factor or max_position_embeddings for yarn; got neither"),
        ({**SCALINGS["llama3"], "beta_fast": 32}, "got 'beta_fast'"),
        ({**SCALINGS["linear"], "partial_rotary_factor": 0.5}, "see rotary_dim"),
        ({**SCALINGS["longrope"], "long_factor": [1.0]}, "long_factor for each of F = 32 frequencies; got 1"),
    ],
)
def test_a_wrong_scaling_is_refused(scaling: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=f"RotaryEmbedding: scaling .*{text}"):
        RotaryEmbedding(64, scaling=scaling)
