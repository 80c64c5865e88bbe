"""What tensors hold is checked before any kernel runs: on a CPU always, on a GPU where that is asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import Change, Wrong, assert_refused, no_kernels, ones

import warploom
from warploom import (
    ArgumentError,
    flash_attention,
    linear_attention,
    lrpe_cosine,
    lrpe_rotate,
    tpa_attention,
    tpa_decode,
)
from warploom.runtime.backend import HAS_TRITON

DECAY, USED, WHOLE = "decay", "seqused_k", (0, 1, 2, 3, 4, -(2**60))
PACKED: Change = {name: ones(1, 6, 2, 4) for name in "qkv"}
KEYS: Change = {**{name: ones(2, 5, 2, 4) for name in "qkv"}}
PAGED: Change = {"q": ones(2, 1, 2, 4), "k": ones(3, 2, 2, 4), "v": ones(3, 2, 2, 4)}
ENCODED: Change = {"x": ones(1, 6, 2, 4), "theta": ones(2)}
FACTORS: Change = {"aq": ones(1, 6, 2, 1), "bq": ones(1, 6, 1, 4)}
FACTORS |= {name: ones(1, 6, 2) for name in ("ak", "av")} | {name: ones(1, 6, 4) for name in ("bk", "bv")}


def integers(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


BOUNDS = (
    (integers(1, 6), "first number 0", "1"),
    (integers(-1, 6), "first number 0", "-1"),
    (integers(0, 4, 2, 6), "do not decrease", "4, 2"),
    (integers(0, 7).int(), " = 6", "7"),
)
PACKING: tuple[tuple[Callable[..., Any], Change, str], ...] = (
    (flash_attention, PACKED, "cu_seqlens"),
    (flash_attention, PACKED, "cu_seqlens_q"),
    (flash_attention, PACKED, "cu_seqlens_k"),
    (lrpe_rotate, ENCODED, "cu_seqlens"),
    (lrpe_cosine, ENCODED, "cu_seqlens"),
    (linear_attention, PACKED, "cu_seqlens"),
    (tpa_attention, FACTORS, "cu_seqlens"),
)
WRONG: tuple[tuple[Callable[..., Any], Change, Wrong], ...] = (
    *(
        (function, good, ({argument: bounds}, ArgumentError, argument, expected, got))
        for function, good, argument in PACKING
        for bounds, expected, got in BOUNDS
    ),
    (
        flash_attention,
        KEYS,
        ({USED: integers(5, 6)}, ArgumentError, USED, "between 0 and M = 5", "6"),
    ),
    (flash_attention, KEYS, ({USED: integers(-1, 2)}, ArgumentError, USED, "between 0", "-1")),
    *(
        (
            flash_attention,
            PAGED,
            ({"seqused_k": integers(*used), "block_table": table(*pages)}, ArgumentError, argument, expected, got),
        )
        for used, pages, argument, expected, got in (
            ((5, 1), ([0, 1], [2, 0]), "seqused_k", "between 0 and M = 4", "5"),
            ((3, 1), ([0, 3], [2, 0]), "block_table", "pages between 0 and 2", "3"),
            ((1, 2), ([0, 9], [-1, 9]), "block_table", "pages between 0 and 2", "-1"),
        )
    ),
    (
        tpa_decode,
        FACTORS,
        ({USED: integers(7)}, ArgumentError, USED, "between 0 and M = 6", "7"),
    ),
    (tpa_decode, FACTORS, ({USED: integers(-1)}, ArgumentError, USED, "between 0", "-1")),
    (
        linear_attention,
        PACKED,
        ({DECAY: torch.tensor([-1.0, 0.5])}, ArgumentError, DECAY, "logarithms ≤ 0", "0.5"),
    ),
    (linear_attention, PACKED, ({DECAY: ones(1, 6, 2)}, ArgumentError, DECAY, "logarithms ≤ 0", "1.0")),
    (linear_attention, PACKED, ({"offset": integers(2**53 + 1)}, ArgumentError, "offset", "2**53", f"{2**53 + 1}")),
    (lrpe_rotate, ENCODED, ({"offset": integers(2**53 + 1)}, ArgumentError, "offset", "2**53", f"{2**53 + 1}")),
    (
        lrpe_rotate,
        ENCODED,
        (
            {"position_ids": integers(0, 1, 2, 3, 4, -(2**60))},
            ArgumentError,
            "position_ids",
            "2**53",
            f"{-(2**60)}",
        ),
    ),
)


@pytest.fixture
def checked_everywhere(device: torch.device) -> Any:
    if device.type == "cuda":
        warploom.check_values(True)
    yield
    warploom.check_values(False)


@pytest.mark.parametrize("backend", ["torch", "triton"] if HAS_TRITON else ["torch"])
@pytest.mark.usefixtures("checked_everywhere")
def test_bad_values_are_refused_in_every_call(backend: str, device: torch.device) -> None:
    for function, good, wrong in WRONG:
        assert_refused(function, {**good, "backend": backend}, wrong, device)


@pytest.mark.parametrize("backend", ["torch", "triton"] if HAS_TRITON else ["torch"])
@pytest.mark.usefixtures("checked_everywhere")
def test_a_known_call_with_other_values_is_checked(backend: str, device: torch.device) -> None:
    call = {name: x.to(device) for name, x in PACKED.items()}
    bounds = integers(0, 2, 6).to(device)
    flash_attention(**call, cu_seqlens_q=bounds, backend=backend)
    bounds[2] = 7
    with no_kernels(), pytest.raises(ArgumentError, match="cu_seqlens_q must be of numbers up to N = 6; got 7"):
        flash_attention(**call, cu_seqlens_q=bounds, backend=backend)


def test_values_that_cannot_be_read_are_not_looked_at() -> None:
    call = {name: x.to("meta") for name, x in KEYS.items()}
    assert flash_attention(**call, seqused_k=integers(9, 9).to("meta")).is_meta
    used = integers(2, 3)
    found = torch.compile(flash_attention, backend="eager", fullgraph=True)(**KEYS, seqused_k=used)
    assert torch.equal(found, flash_attention(**KEYS, seqused_k=used))
    seen = torch.func.vmap(lambda used: flash_attention(**KEYS, seqused_k=used))(used.expand(2, 2))
    assert torch.equal(seen[1], found)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.usefixtures("unchecked_values")
@pytest.mark.parametrize("tokens", [1, 80], ids=["decoding", "many queries"])
@pytest.mark.parametrize("page_size", [3, 32])
def test_pages_and_lengths_that_are_not_there_are_not_read(
    tokens: int, page_size: int, device: torch.device
) -> None:
    """As nobody looks at them: pages count as the nearest that there is, lengths as the nearest that can be."""
    q, k = torch.randn(3, tokens, 2, 16, device=device), torch.randn(4, page_size, 2, 16, device=device)
    pages = table([0, 2**31 - 1], [-(2**31), 4], [3, 1]).to(device)
    used = integers(2 * page_size, 2**31 - 1, -1).to(device)
    options = {"seqused_k": used, "block_table": pages, "causal": tokens == 1}
    found = flash_attention(q, k, k, **options, backend="triton")
    options |= {"seqused_k": integers(2 * page_size, 2 * page_size, 0).to(device)}
    options |= {"block_table": table([0, 3], [0, 3], [3, 1]).to(device)}
    torch.testing.assert_close(found, flash_attention(q, k, k, **options, backend="torch"))
