"""What tensor-product attention refuses: the message names the argument, what was expected and what came."""

from typing import Any

import pytest
import torch

from warploom import (
    ArgumentError,
    BackendError,
    DeviceError,
    DtypeError,
    ShapeError,
    WarploomError,
    tpa_attention,
    tpa_decode,
)
from warploom.ops.flash_attention.validation import MAX_FEATURES
from warploom.ops.tpa.validation import MAX_RANK

FUNCTIONS = (tpa_decode, tpa_attention)
functions = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


def factors(**changes: Any) -> dict[str, Any]:
    shapes = {
        "aq": (2, 5, 3, 4),
        "ak": (2, 5, 3, 2),
        "av": (2, 5, 3),
        "bq": (2, 5, 4, 8),
        "bk": (2, 5, 2, 8),
        "bv": (2, 5, 6),
    }
    return {name: torch.zeros(shape) for name, shape in shapes.items()} | changes


WRONG: tuple[tuple[str, Any, type[WarploomError], str], ...] = (
    ("aq", [1.0], DtypeError, "list"),
    ("bq", None, DtypeError, "NoneType"),
    ("ak", torch.zeros(2, 5, 3, 2, dtype=torch.int32), DtypeError, "int32"),
    ("bv", torch.zeros(2, 5, 6, dtype=torch.bfloat16), DtypeError, "bfloat16"),
    ("bk", torch.zeros(2, 5, 2, 8, device="meta"), DeviceError, "meta"),
    ("bq", torch.zeros(2, 5, 8), ShapeError, r"\(2, 5, 8\)"),
    ("bq", torch.zeros(2, 5, 4, 0), ShapeError, r"\(2, 5, 4, 0\)"),
    ("aq", torch.zeros(2, 5, 3, 3), ShapeError, r"\(2, 5, 3, 3\)"),
    ("aq", torch.zeros(2, 4, 3, 4), ShapeError, r"\(2, 4, 3, 4\)"),
    ("aq", torch.zeros(2, 5, 0, 4), ShapeError, r"\(2, 5, 0, 4\)"),
    ("ak", torch.zeros(2, 5, 4, 2), ShapeError, r"\(2, 5, 4, 2\)"),
    ("ak", torch.zeros(3, 5, 3, 2), ShapeError, r"\(3, 5, 3, 2\)"),
    ("ak", torch.zeros(2, 5, 3, 0), ShapeError, r"\(2, 5, 3, 0\)"),
    ("bk", torch.zeros(2, 5, 8), ShapeError, "Rk = 2"),
    ("bk", torch.zeros(2, 6, 2, 8), ShapeError, r"\(2, 6, 2, 8\)"),
    ("bk", torch.zeros(2, 5, 2, 7), ShapeError, "D = 8"),
    ("av", torch.zeros(2, 4, 3), ShapeError, r"\(2, 4, 3\)"),
    ("av", torch.zeros(2, 5, 3, 2, 1), ShapeError, r"\(2, 5, 3, 2, 1\)"),
    ("bv", torch.zeros(2, 5, 2, 6), ShapeError, "Rv = 1"),
    ("bv", torch.zeros(2, 5, 0), ShapeError, r"\(2, 5, 0\)"),
    ("scale", "1", DtypeError, "'1'"),
    ("scale_q", True, DtypeError, "True"),
    ("scale_k", float("nan"), ArgumentError, "nan"),
    ("scale_v", float("inf"), ArgumentError, "inf"),
    ("backend", "cuda", ArgumentError, "cuda"),
)


@functions
@pytest.mark.parametrize(("argument", "value", "error", "got"), WRONG)
def test_wrong_arguments_are_named(
    function: Any, argument: str, value: Any, error: type[WarploomError], got: str
) -> None:
    with pytest.raises(error, match=rf"{function.__name__}: {argument} must be .*{got}"):
        function(**factors(**{argument: value}))


@pytest.mark.parametrize(
    ("argument", "value", "error", "got"),
    [
        ("seqused_k", [1, 2], DtypeError, "list"),
        ("seqused_k", torch.zeros(2), DtypeError, "float32"),
        ("seqused_k", torch.zeros(3, dtype=torch.int32), ShapeError, r"\(3,\)"),
        ("seqused_k", torch.zeros(2, dtype=torch.int32, device="meta"), DeviceError, "meta"),
        ("strategy", "split", ArgumentError, "'split'"),
    ],
)
def test_wrong_arguments_of_decoding(argument: str, value: Any, error: type[WarploomError], got: str) -> None:
    with pytest.raises(error, match=rf"tpa_decode: {argument} must be .*{got}"):
        tpa_decode(**factors(**{argument: value}))


@pytest.mark.parametrize(
    ("argument", "value", "error", "got"),
    [
        ("causal", 1, DtypeError, "1"),
        ("cu_seqlens", torch.zeros(3), DtypeError, "float32"),
        ("cu_seqlens", torch.zeros(1, dtype=torch.int32), ShapeError, r"\(1,\)"),
        ("cu_seqlens", torch.zeros(3, dtype=torch.int32, device="meta"), DeviceError, "meta"),
    ],
)
def test_wrong_arguments_of_attention(argument: str, value: Any, error: type[WarploomError], got: str) -> None:
    with pytest.raises(error, match=rf"tpa_attention: {argument} must be .*{got}"):
        tpa_attention(**factors(**{argument: value}))


def test_packed_sequences_are_one_batch_entry_of_as_many_keys_as_queries() -> None:
    bounds = torch.tensor([0, 2, 5])
    with pytest.raises(ShapeError, match="bq must be of batch size 1"):
        tpa_attention(**factors(), cu_seqlens=bounds)
    one = {name: value[:1] for name, value in factors().items()}
    one |= {name: one[name][:, :4] for name in ("aq", "bq")}
    with pytest.raises(ShapeError, match="ak must be of as many keys"):
        tpa_attention(**one, cu_seqlens=bounds)
    with pytest.raises(ArgumentError, match=r"cu_seqlens_q must be None with cu_seqlens, .*both forms"):
        tpa_attention(**one, cu_seqlens=bounds, cu_seqlens_q=bounds)
    with pytest.raises(ArgumentError, match=r"cu_seqlens_k must be None or the tensor .*another tensor"):
        tpa_attention(**one, cu_seqlens_q=bounds, cu_seqlens_k=bounds.clone())


def test_bounds_of_queries_or_keys_are_those_of_both() -> None:
    one, bounds = {name: value[:1] for name, value in factors().items()}, torch.tensor([0, 2, 4])
    one |= {name: value[:, :4] for name, value in one.items()}
    expected = tpa_attention(**one, cu_seqlens=bounds)
    for names in (("cu_seqlens_q",), ("cu_seqlens_k",), ("cu_seqlens_q", "cu_seqlens_k")):
        assert torch.equal(tpa_attention(**one, **dict.fromkeys(names, bounds)), expected)


def test_whole_queries_have_the_heads_of_the_keys() -> None:
    with pytest.raises(ShapeError, match=r"ak must be .*H = 4"):
        tpa_decode(**factors(aq=None))


@pytest.mark.parametrize(
    ("function", "rank", "features"),
    [(tpa_decode, MAX_RANK + 1, 8), (tpa_decode, 2, MAX_FEATURES + 1), (tpa_attention, 2, MAX_FEATURES + 1)],
)
def test_what_the_kernels_cannot_hold_runs_in_pytorch(function: Any, rank: int, features: int) -> None:
    inputs = factors(
        ak=torch.zeros(2, 5, 3, rank),
        bk=torch.zeros(2, 5, rank, features),
        bq=torch.zeros(2, 5, 4, features),
    )
    assert function(**inputs).shape == (2, 5, 3, 6)
    with pytest.raises(BackendError, match=function.__name__):
        function(**inputs, backend="triton")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(2**30, f"{2**30} queries and {2**30} keys"), (2**30 - 2**10, f"{3 * (2**30 - 2**10)} programs")],
)
def test_more_than_kernels_count_is_refused(tokens: int, message: str) -> None:
    one = {name: value[:1, :1] for name, value in factors().items()}
    many = {name: value.expand(1, tokens, *value.shape[2:]) for name, value in one.items()}
    many["aq"], many["ak"], many["av"] = (many[name][:, :, :1] for name in ("aq", "ak", "av"))  # one head
    with pytest.raises(BackendError, match=message):
        tpa_attention(**many, backend="triton")


@functions
def test_float64_is_for_pytorch(function: Any) -> None:
    inputs = {name: value.double() for name, value in factors().items()}
    assert function(**inputs).dtype == torch.float64
    with pytest.raises(BackendError, match="float64"):
        function(**inputs, backend="triton")
