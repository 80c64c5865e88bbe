"""The definition of flash attention, once more, one query and one key at a time."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from flash_cases import random_inputs

from warploom.ops.flash_attention import reference
from warploom.testing.conformance import compute_gradients, draw_like

Tensor = torch.Tensor


def attend_slowly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float = torch.inf,
    sink: Tensor | None = None,
    used: Sequence[int] | None = None,
) -> Any:
    batch, tokens, heads, _ = q.shape
    out, lse = q.new_zeros(batch, tokens, heads, v.shape[3]), q.new_full((batch, heads, tokens), -torch.inf)
    sinks = lse[0, :, 0].clone() if sink is None else sink
    left, right = window
    for b, i, h in itertools.product(range(batch), range(tokens), range(heads)):
        keys = k.shape[1] if used is None else used[b]
        place, g = i + keys - tokens, h * k.shape[2] // heads
        seen = [
            j
            for j in range(keys)
            if not (causal and j > place)
            and (left is None or j >= place - left)
            and (right is None or j <= place + right)
        ]
        logits = k[b, seen, g] @ q[b, i, h] * q.shape[3] ** -0.5
        if softcap < torch.inf:
            logits = softcap * (logits / softcap).tanh()
        lse[b, h, i] = torch.cat((logits, sinks[h, None])).logsumexp(0)
        if seen:
            out[b, i, h] = (logits - lse[b, h, i]).exp() @ v[b, seen, g]
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (2, None), (None, 1), (1, 3), (0, 0)])
@pytest.mark.parametrize(("n", "m"), [(5, 5), (3, 7), (7, 3)])
def test_the_definition(n: int, m: int, window: tuple[int | None, int | None], causal: bool) -> None:
    inputs = random_inputs(torch.device("cpu"), n, m, heads=4, key_heads=2, d=3, e=2, dtype=torch.float64)
    expected = attend_slowly(inputs["q"], inputs["k"], inputs["v"], causal, window)
    found = reference.flash_attention(**inputs, causal=causal, window=window, return_lse=True)
    torch.testing.assert_close(found, expected)
    wanted = compute_gradients(expected, inputs, draw_like(expected))
    torch.testing.assert_close(compute_gradients(found, inputs, draw_like(found)), wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.7},
        {"sink": torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)},
        {"seqused_k": torch.tensor([5, 2])},
        {"seqused_k": torch.tensor([0, 4]), "sink": torch.full((4,), 1.5, dtype=torch.float64), "softcap": 2.0},
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.parametrize("window", [(None, None), (2, 1)])
def test_the_definition_of_caps_sinks_and_lengths(window: Any, options: dict[str, Any]) -> None:
    inputs = random_inputs(torch.device("cpu"), 4, 6, heads=4, key_heads=2, d=3, e=2, dtype=torch.float64, size=2)
    inputs |= {name: x.clone().requires_grad_() for name, x in options.items() if name == "sink"}
    slowly = {"softcap": options.get("softcap", torch.inf), "used": options.get("seqused_k")}
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    expected = attend_slowly(q, k, v, True, window, sink=inputs.get("sink"), **slowly)
    found = reference.flash_attention(**{**options, **inputs}, causal=True, window=window, return_lse=True)
    torch.testing.assert_close(found, expected)
    out_only = (expected[0], expected[1].masked_fill(expected[1] == -torch.inf, 0.0))
    wanted = compute_gradients(out_only, inputs, draw_like(expected))
    found = (found[0], found[1].masked_fill(found[1] == -torch.inf, 0.0))
    torch.testing.assert_close(compute_gradients(found, inputs, draw_like(found)), wanted)


def test_the_definition_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(torch.device("cpu"), 19, 11, dtype=torch.float64, causal=True, return_lse=True)
    whole = reference.flash_attention(**inputs)
    monkeypatch.setattr(reference, "BLOCK_WEIGHTS", 200)
    blocks = reference.flash_attention(**inputs)
    torch.testing.assert_close(blocks, whole)
    grads = draw_like(whole)
    torch.testing.assert_close(compute_gradients(blocks, inputs, grads), compute_gradients(whole, inputs, grads))


def test_operations_of_values_that_are_narrower() -> None:
    from warploom.ops.flash_attention.bench import traffic

    case = {"batch": 2, "heads": 3, "n": 4, "head_dim": 192, "value_dim": 128, "dtype": "bfloat16", "causal": True}
    pairs = 2 * 3 * 10
    assert traffic(case, "fwd").flops == 2 * pairs * (192 + 128)
    assert traffic(case, "bwd").flops == 2 * pairs * (192 + 128 + 128 + 192 + 192)
    equal = {name: value for name, value in case.items() if name != "value_dim"}
    assert traffic(equal, "fwd_bwd").flops == 14 * pairs * 192
