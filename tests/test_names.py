"""Arguments under the names of other libraries, and layouts of theirs: what to write here is said."""

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import warploom
from warploom import (
    ArgumentError,
    DtypeError,
    LayoutWarning,
    UnknownArgumentError,
    append_kv,
    delta_attention,
    flash_attention,
    linear_attention,
    lrpe_cosine,
    lrpe_rotate,
    nn,
    short_convolution,
    tpa_attention,
    tpa_decode,
)
from warploom.distributed import (
    context_parallel_attention,
    context_parallel_delta_attention,
    context_parallel_linear_attention,
    context_parallel_short_convolution,
)
from warploom.nn import TransformerConfig
from warploom.runtime.names import OTHER_NAMES

QKV: Any = torch.randn(3, 1, 3, 2, 4)
CALLS: dict[Any, tuple[Any, ...]] = {
    flash_attention: (*QKV,),
    linear_attention: (*QKV,),
    delta_attention: (*QKV, QKV[0, ..., 0]),
    lrpe_cosine: (QKV[0], torch.ones(4)),
    lrpe_rotate: (QKV[0], torch.ones(2)),
    short_convolution: (QKV[0, ..., 0], torch.ones(2, 2)),
    tpa_attention: (*QKV,) * 2,
    tpa_decode: (*QKV,) * 2,
    context_parallel_attention: (*QKV, None),
    context_parallel_linear_attention: (*QKV, None),
    context_parallel_delta_attention: (*QKV, QKV[0, ..., 0], None),
    context_parallel_short_convolution: (QKV[0, ..., 0], torch.ones(2, 2), None),
}


def message(function: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(TypeError) as caught:
        function(*arguments, **named)
    assert type(caught.value) is UnknownArgumentError
    return str(caught.value)


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_unknown_arguments_say_what_to_write(function: Any) -> None:
    own = inspect.signature(function).parameters
    assert not {"_others", "_unknown"} & set(own)
    for other in {other for other, *_ in OTHER_NAMES} - set(own):
        said = message(function, *CALLS[function], **{other: None})
        meant = [(name, about) for o, name, about in OTHER_NAMES if o == other and (not name or name in own)]
        name, about = meant[0] if meant else ("", "there are " + ", ".join(own))
        close = "" if meant else re.search(r"did you mean (\w+)\?$", said)
        expected = f"did you mean {close[1]}?" if close else f"here it is {name}: {about}" if name else about
        assert said == f"{function.__name__}: there is no argument {other}; {expected}"
    last = list(own)[-1]
    assert message(function, *CALLS[function], **{last + "s": 1}).endswith(f"did you mean {last}?")
    assert str(len(CALLS[function]) + 1) in message(function, *CALLS[function], True) or "theta" in own


REQUIRED = {
    function: tuple(name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty)
    for function in (*CALLS, append_kv)
}


@pytest.mark.parametrize("function", REQUIRED, ids=lambda function: function.__name__)
def test_missing_arguments_are_named_and_other_names_come_first(function: Any) -> None:
    given: dict[str, Any] = dict.fromkeys(REQUIRED[function], QKV[0])
    for name in ("mesh",) if "mesh" in given else REQUIRED[function]:
        lacking = {key: value for key, value in given.items() if key != name}
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) missing a required argument: '{name}'"):
            function(**lacking)
        assert f"did you mean {name}?" in message(function, **lacking, **{f"{name}_x": QKV[0]}) or len(name) < 5
    with pytest.raises(TypeError, match="missing a required argument"):
        function()


def test_other_names_of_required_arguments_say_what_to_write() -> None:
    x, *caches = torch.randn(5, 1, 3, 2, 4)
    said = message(append_kv, x, *caches[:3], cache_seqlens=torch.tensor([3]))
    assert said.endswith("here it is seqused_k: keys of each batch entry, new ones included")
    assert "here it is theta" in message(lrpe_rotate, x, cos=x, sin=x)
    assert "here it is theta" in message(lrpe_cosine, x, freqs=x)


def test_arguments_by_position_say_what_to_write() -> None:
    assert message(flash_attention, *QKV, True) == (
        "flash_attention: q, k, v are given by position, and others by name, as in causal=True; got 4 by position"
    )
    cos, sin = torch.ones(2, 3, 2)
    assert message(lrpe_rotate, QKV[0], cos, sin).endswith("are not needed: lrpe_rotate(x, theta)")


UNTYPED: Any = nn
CONFIG = TransformerConfig(vocab_size=16, context_length=8, d_model=8, d_ff=8, layers=1, heads=2)
LAYERS: dict[str, tuple[Any, tuple[Any, ...], dict[str, str]]] = {
    "Attention": (
        nn.Attention,
        (8, 2),
        {"embed_dim": "d_model", "is_causal": "causal", "num_kv_heads": "kv_heads"},
    ),
    "DeltaAttention": (nn.DeltaAttention, (8, 2), {"num_heads": "heads", "num_key_heads": "key_heads"}),
    "LinearAttention": (nn.LinearAttention, (8, 2), {"num_heads": "heads", "rope_theta": "base"}),
    "TensorProductAttention": (nn.TensorProductAttention, (8, 2), {"hidden_size": "d_model", "rank_qq": "rank_q"}),
    "Block": (nn.Block, (8, 8, torch.nn.Identity()), {"intermediate_size": "d_ff", "rms_norm_eps": "norm_eps"}),
    "SwiGLU": (nn.SwiGLU, (8, 8), {"hidden_dim": "d_ff", "d_inner": "d_model, d_ff"}),
    "RotaryEmbedding": (nn.RotaryEmbedding, (8,), {"dim": "head_dim", "rope_scaling": "scaling"}),
    "LRPE": (nn.LRPE, (2, 8), {"n_head": "heads", "axis": "axes"}),
    "TransformerConfig": (TransformerConfig, (), {"n_layers": "layers", "block_size": "context_length"}),
    "KVCache": (nn.KVCache, (), {"length": "capacity"}),
    "PageTable": (nn.PageTable, (4,), {"num_pages": "pages"}),
    "PagedKVCache": (nn.PagedKVCache, (nn.PageTable(4),), {"page_table": "table"}),
    "TransformerLM": (
        nn.TransformerLM,
        (CONFIG,),
        {"configuration": "config", "attention": "a `TransformerConfig`", "vocab_size": "config"},
    ),
}


MASKED = ("Attention", "Block", "TransformerLM")
"""Layers with a mask."""


@pytest.mark.parametrize("name", LAYERS)
def test_arguments_of_layers_say_what_to_write(name: str) -> None:
    layer, sizes, others = LAYERS[name]
    for other, own in others.items():
        said = message(layer, *sizes, **{other: 1})
        assert said.startswith(f"{name}: there is no argument {other}; ")
        assert own in said.partition("; ")[2]
    positional = [p for p in inspect.signature(layer).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert f"got {len(positional) + 1} by position" in message(layer, *[1] * (len(positional) + 1))
    made = layer(*sizes)
    if isinstance(made, torch.nn.Module):
        x = torch.randint(16, (1, 3)) if name == "TransformerLM" else torch.randn(1, 3, 8)
        expected = "here it is mask:" if name in MASKED else "there is no mask;"
        assert message(made, x, attn_mask=None).startswith(f"{name}: there is no argument attn_mask; {expected}")
        assert "by position" in message(made, *[x] * 5)


def test_arguments_of_sampling_say_what_to_write() -> None:
    model = nn.TransformerLM(CONFIG)
    prompt = torch.zeros(1, 2, dtype=torch.int64)
    for function in (model.generate, model.stream):
        said = message(function, prompt, 2, eos_token_id=3)
        unknown = f"TransformerLM.{function.__name__}: there is no argument eos_token_id"
        assert said == f"{unknown}; here it is stop: tokens that end a sequence"
        assert "here it is prompt" in message(function, input_ids=prompt)


@pytest.mark.parametrize(
    ("text", "call"),
    {
        "Attention: d_model must be an int; got '8'": lambda: UNTYPED.Attention("8", 2),
        "Attention: kv_heads must be an int; got 2.0": lambda: UNTYPED.Attention(8, 2, kv_heads=2.0),
        "Attention: x must be a tensor; got list": lambda: UNTYPED.Attention(8, 2)([1.0]),
        "Attention: x must be a tensor of float16, bfloat16, float32, float64; got int64": lambda: (
            UNTYPED.Attention(8, 2)(torch.zeros(1, 2, 8, dtype=torch.int64))
        ),
        "Attention: context must be a tensor; got int": lambda: UNTYPED.Attention(8, 2, context_dim=8)(
            torch.zeros(1, 2, 8), context=3
        ),
        "LinearAttention: layer must be an int; got '0'": lambda: UNTYPED.LinearAttention(8, 2, layer="0"),
        "Block: attention must be a layer; got str": lambda: UNTYPED.Block(8, 8, "flash"),
        "SwiGLU: d_ff must be an int; got 8.0": lambda: UNTYPED.SwiGLU(8, 8.0),
        "RotaryEmbedding: head_dim must be an int; got None": lambda: UNTYPED.RotaryEmbedding(None),
        "RotaryEmbedding: base must be a number; got 'ten'": lambda: UNTYPED.RotaryEmbedding(8, base="ten"),
        "LRPE: axes must be an int; got True": lambda: UNTYPED.LRPE(2, 8, axes=True),
        "PageTable: pages must be an int; got 4.5": lambda: UNTYPED.PageTable(4.5),
        "TransformerConfig: norm_eps must be a number; got None": lambda: UNTYPED.TransformerConfig(norm_eps=None),
        "TransformerLM: config must be a TransformerConfig; got str": lambda: UNTYPED.TransformerLM("sm"),
        "TransformerLM: tokens must be an integer tensor; got list": lambda: UNTYPED.TransformerLM(CONFIG)([[1]]),
    }.items(),
    ids=lambda value: value.partition(";")[0] if isinstance(value, str) else "",
)
def test_wrong_types_in_layers_are_named(text: str, call: Any) -> None:
    with pytest.raises(DtypeError, match=f"^{re.escape(text)}$"):
        call()


def test_tokens_that_are_in_no_vocabulary_are_named() -> None:
    model = nn.TransformerLM(CONFIG)
    tokens = torch.tensor([[3, 15]])
    assert model(tokens, torch.tensor([[0, -100]])).loss is not None
    for wrong in (16, -1):
        bad = torch.tensor([[3, wrong]])
        for argument, call in (
            ("tokens", lambda: model(bad)),  # noqa: B023
            ("tokens", lambda: model.generate(bad, 2)),  # noqa: B023
            ("targets", lambda: model(tokens, bad)),  # noqa: B023
        ):
            with pytest.raises(
                ArgumentError, match=f"{argument} must be of tokens ≥ 0 and below vocab_size = 16; got {wrong}"
            ):
                call()


@pytest.mark.gpu
def test_tokens_on_a_gpu_are_checked_on_request(device: torch.device) -> None:
    model, bad = nn.TransformerLM(CONFIG).to(device), torch.tensor([[16]], device=device)
    warploom.check_values(True)
    try:
        with pytest.raises(ArgumentError, match="tokens must be of tokens ≥ 0 and below vocab_size = 16; got 16"):
            model(bad)
    finally:
        warploom.check_values(False)


def test_the_guide_has_the_names() -> None:
    text = (Path(__file__).parents[1] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`: )?(.*) \|$", text.partition("<!-- names:")[2], re.MULTILINE)
    assert tuple(rows[: len(OTHER_NAMES)]) == OTHER_NAMES


def test_heads_before_tokens_are_warned_of_once_a_line() -> None:
    q, k = torch.randn(2, 8, 30, 4), torch.randn(2, 2, 30, 4)  # (B, H, N, D)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            flash_attention(q, k, k, causal=True)
        flash_attention(q, k, k, causal=True)
    assert [(w.category, w.filename) for w in seen] == [(LayoutWarning, __file__)] * 2
    assert "flash_attention: 8 tokens of 30 heads on 2 keys of 30 heads" in str(seen[0].message)
    assert "x.transpose(1, 2)" in str(seen[0].message)


def heads_first(heads: int, tokens: int, *, dense: bool = True) -> torch.Tensor:
    """Returns ``(B, H, N, D)``, in memory too or as the view that models make of ``(B, N, H, D)``."""
    return torch.randn(1, heads, tokens, 4) if dense else torch.randn(1, tokens, heads, 4).transpose(1, 2)


@pytest.mark.parametrize("dense", [True, False])
def test_heads_before_tokens_are_seen_by_sizes_and_strides(dense: bool) -> None:
    tokens = 256 if dense else 30
    x, key = heads_first(12, tokens, dense=dense), heads_first(3, tokens, dense=dense)
    for causal in (True, False):
        with pytest.warns(LayoutWarning, match=rf"flash_attention: 12 tokens of {tokens} heads look like"):
            flash_attention(x, x, x, causal=causal)
        with pytest.warns(LayoutWarning, match="12 tokens .* on 3 keys"):
            flash_attention(x, key, key, causal=causal)
        with pytest.warns(LayoutWarning, match="linear_attention"):
            linear_attention(x, x, x, causal=causal)
    with pytest.warns(LayoutWarning, match="delta_attention"):
        delta_attention(x, x, x, torch.rand(x.shape[:3]))
    for encode in (lrpe_rotate, lrpe_cosine):
        with pytest.warns(LayoutWarning, match=rf"{encode.__name__}: 12 tokens of {tokens} heads look like"):
            encode(x, torch.ones(2))


def test_short_sequences_with_heads_first_are_seen_by_the_number_of_heads() -> None:
    for shape in ((2, 8, 64, 32), (1, 12, 49, 4), (1, 31, 128, 4)):
        x = torch.randn(shape)
        with pytest.warns(LayoutWarning, match=f"{shape[1]} tokens of {shape[2]} heads"):
            flash_attention(x, x, x)


@pytest.mark.filterwarnings("error")
def test_tokens_before_heads_are_not_warned_of() -> None:
    for heads, tokens in ((8, 30), (48, 5), (128, 32), (12, 256), (128, 1), (3, 3)):
        x = torch.randn(1, tokens, heads, 4)
        key = torch.randn(1, 300, heads, 4)
        first = heads_first(heads, tokens)  # as PyTorch's own attention takes it
        flash_attention(x, x, x, causal=True)
        flash_attention(x, key, key, causal=True)
        flash_attention(x, key, key, seqused_k=torch.tensor([3]))
        flash_attention(x, key[:, :, :1], key[:, :, :1])
        linear_attention(x, x, x)
        linear_attention(x, x, x, initial_state=torch.zeros(1, heads, 4, 4))
        lrpe_rotate(x, torch.ones(2))
        if tokens >= heads or tokens == 1:
            flash_attention(*(first.transpose(1, 2),) * 3, causal=True)
            lrpe_rotate(first.transpose(1, 2), torch.ones(2))
    x = torch.randn(1, 5, 128, 4)
    linear_attention(x, x, x)
    lrpe_rotate(x, torch.ones(2))
    x = heads_first(12, 256)
    lrpe_rotate(x, torch.ones(2), position_ids=torch.arange(12))
    lrpe_rotate(x, torch.ones(256, 2))  # a theta for each head
    flash_attention(torch.randn(1, 1, 256, 4), *torch.randn(2, 1, 30, 1, 4))  # queries as heads of one key head
    lrpe_rotate(torch.randn(1, 1, 144, 4), torch.ones(2))  # queries and keys together


@pytest.mark.filterwarnings("error")
def test_layers_that_transpose_are_not_warned_of() -> None:
    from warploom.integrations.transformers.attention import attention

    x = torch.randn(1, 32, 5, 4)
    attention(torch.nn.Module(), x, x, x, None)
    with pytest.warns(LayoutWarning):
        flash_attention(*(x.transpose(1, 2),) * 3)  # a short prompt that looks the same, and is right


def test_backends_that_cannot_run_name_no_argument_of_another_function() -> None:
    for function, arguments in CALLS.items():
        if function.__module__.startswith("warploom.ops"):
            doubles = [x.double() for x in arguments]
            if function in (tpa_attention, tpa_decode):
                a, b = torch.ones(1, 3, 2, 1).double(), torch.ones(1, 3, 1, 4).double()
                doubles = [a, a, a, b, b, b]
            with pytest.raises(warploom.BackendError, match=r"the tensors are float64|Triton is not installed"):
                function(*doubles, backend="triton")
