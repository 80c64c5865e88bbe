"""Flash attention's kernels for Hopper: which calls take them, and that these are right there."""

import functools
import itertools
from typing import Any

import pytest
import seeds
import torch
from flash_cases import KEEPING_THE_OUTPUT, LAYOUTS, assert_right, random_inputs, run
from launches import ON_GPU, assert_for_hopper_alone, choose_as_on, large
from planned_calls import forget_plans

from warploom import flash_attention
from warploom.ops.flash_attention import reference
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import draw_like
from warploom.testing.poison import poison_allocations

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

Tensor = torch.Tensor


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as on an H100, wherever the test runs."""
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper

    choose_as_on(90, launchers_hopper, monkeypatch)
    monkeypatch.setattr(launchers_hopper, "programs_at_once", lambda device: 132)


def suits(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float = 0.1, **mask: Any) -> bool:
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.triton import launch as launchers

    shape = launchers.Shape.of(q, k, v)
    return launchers_hopper.obstacle(name, shape, launchers.MaskSpec(**mask), scale, q, k, v) is None


def empty(n: int = 70, heads: int = 30, d: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(2, n, heads, d, dtype=dtype)


def test_the_calls_that_suit(hopper: None) -> None:
    x = empty()
    assert suits("forward", x, x, x, right=0)
    assert suits("forward", x, x, x)
    assert suits("forward", *(empty(dtype=torch.float16) for _ in range(3)))
    assert suits("forward", empty(heads=60), x, x)  # grouped queries
    assert suits("forward", empty(d=80), empty(d=80), empty(d=128))
    for name in ("forward", "key", "query"):
        assert suits(name, *(empty(heads=60, d=256) for _ in range(3)))
        assert suits(name, empty(heads=60, d=192), empty(heads=60, d=192), empty(heads=60, d=128))
    assert suits("forward", *(empty().transpose(1, 2).contiguous().transpose(1, 2) for _ in range(3)))
    assert suits("forward", *(torch.empty(2, 70, 3, 30, 64, dtype=torch.bfloat16)[:, :, i] for i in range(3)))
    assert suits("forward", x, x, x, left=3)
    assert suits("forward", x, x, x, left=3, right=0, seqused_k=torch.tensor([3, 70]))


@pytest.mark.parametrize(
    ("d", "e", "expected"), [(192, 128, True), (136, 8, True), (137, 128, False), (192, 12, False)]
)
def test_rows_come_in_pieces_where_eights_of_features_are_whole(d: int, e: int, expected: bool) -> None:
    """One query on padded keys: its gradient may be copied whatever its features, since no row follows it."""
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.triton import launch as launchers

    q, k, v = (torch.empty(1, n, 1, features) for n, features in ((1, d), (2100, d), (2100, e)))
    shape = launchers.Shape.of(q, k, v)
    for name in ("forward", "key", "query"):
        assert launchers_hopper._in_pieces(name, shape) is expected


def test_the_calls_that_do_not(hopper: None) -> None:
    x = empty()
    used, table = torch.tensor([3, 70]), torch.zeros(2, 1, dtype=torch.int32)
    assert not suits("forward", x, x, x, seqused_k=used, block_table=table)
    assert not suits("forward", x, x, x, cu_seqlens_q=torch.tensor([0, 70]))
    assert not suits("forward", x, x, x, -0.1)
    assert not suits("forward", x, x, x, 0.0)
    for d in (16, 32, 129, 257, 264):
        assert not suits("forward", *(empty(d=d) for _ in range(3))), d
    assert not suits("forward", *(empty(d=68) for _ in range(3))), "rows of 136 bytes"
    assert not suits("forward", *(empty(dtype=torch.float32) for _ in range(3)))
    assert not suits("forward", x, x[:1].expand(2, -1, -1, -1), x), "a stride of zero"
    assert not suits("forward", x, empty(d=128)[..., ::2], x)


@pytest.mark.parametrize("name", ["forward", "key", "query"])
def test_long_loops_of_few_heads_are_split(name: str, hopper: None) -> None:
    def parts(batch: int, n: int, heads: int, **mask: Any) -> int:
        from warploom.ops.flash_attention.hopper import launch as launchers_hopper
        from warploom.ops.flash_attention.triton import launch as launchers

        x = torch.empty(batch, n, heads, 64, dtype=torch.bfloat16, device="meta")
        return launchers_hopper.splits_of(name, launchers.Shape.of(x, x, x), launchers.MaskSpec(**mask), x.device)

    assert parts(4, 2048, 16) == parts(4, 2048, 16, right=0) == 1
    assert parts(1, 128, 1) == parts(1, 128, 1, right=0) == 1
    assert parts(1, 8192, 1) > 1
    assert parts(1, 8192, 1, right=0) > 1
    assert parts(1, 2**20, 1, right=0) == 1, "even without"


@pytest.mark.parametrize(
    ("name", "heads", "key_heads", "n", "causal", "section"),
    [
        ("forward", 9, 9, 8192, True, 5),  # 8 fit
        ("backward", 9, 9, 8192, True, 3),  # 4 fit, with sums of gradients
        ("forward", 40, 40, 2048, True, 20),
        ("forward", 24, 6, 16384, True, 12),  # 4 key heads fit, of 4 heads each
        ("forward", 64, 64, 1024, True, 32),  # all fit, but not with the first tiles
        ("forward", 64, 64, 1024, False, 64),
        ("forward", 32, 32, 1024, True, 32),
    ],
)
def test_sections_of_heads_are_equally_large(
    name: str, heads: int, key_heads: int, n: int, causal: bool, section: int
) -> None:
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.problem import MaskSpec, Shape

    q, k = (torch.empty(1, n, rows, 128, device="meta") for rows in (heads, key_heads))
    shape, mask = Shape.of(q, k, k), MaskSpec(right=0 if causal else None)
    tiles = launchers_hopper._tiles(name, shape, mask)
    assert launchers_hopper._schedule(name, shape, mask, tiles, 1, 2).section == section


def test_nothing_suits_another_gpu(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper

    x = empty()
    assert_for_hopper_alone(launchers_hopper, lambda: suits("forward", x, x, x), monkeypatch)


# ----------------------------------------------------------------------------------------------------------
# On a Hopper GPU and, what is small, in an interpreter
# ----------------------------------------------------------------------------------------------------------


FEW_QUERIES = 16  # up to here the forward has a kernel of its own


def kernels_for(features: int, together: bool = False) -> list[str]:
    """The kernels that take a call with so many features, forward and backward, in the order of the alphabet."""
    if together and features <= 128:
        return ["hopper_backward_kernel", "hopper_forward_kernel"]
    keys = "hopper_shared_key_kernel" if features > 128 else "hopper_key_kernel"
    return sorted(["hopper_forward_kernel", keys, "hopper_query_kernel"])


@pytest.fixture(params=[False, True], ids=["two kernels", "one kernel"])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether one kernel forms all gradients, up to 128 features."""
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper

    monkeypatch.setattr(launchers_hopper, "_FUSED", 0 if request.param else 2**31)
    return bool(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "heads", "key_heads", "d", "e"),
    [
        large(1000, 1000, 24, 24, 64, 64),
        large(1000, 1000, 24, 24, 128, 128),
        large(700, 1500, 32, 8, 128, 128),
        large(1500, 700, 32, 8, 64, 64),
        large(1, 2000, 133, 133, 64, 64),  # of one more head than `kernels_few` takes
        large(2000, 3, 66, 66, 128, 128),
        large(385, 257, 40, 40, 80, 96),
        large(129, 640, 60, 20, 40, 128),
        (65, 63, 3, 1, 128, 72),
        large(1000, 1000, 24, 24, 256, 256),
        large(700, 1500, 32, 8, 256, 64),
        large(1500, 700, 32, 8, 136, 248),
        large(1, 2000, 67, 67, 192, 128),
        large(1000, 1000, 24, 24, 192, 128),
        (385, 257, 3, 1, 64, 256),
        (300, 257, 3, 1, 192, 128),
        (260, 385, 2, 2, 136, 40),
    ],
)
def test_many_tiles(
    n: int, m: int, heads: int, key_heads: int, d: int, e: int, causal: bool, dtype: torch.dtype,
    together: bool, launched: list[str], device: torch.device,
) -> None:  # fmt: skip
    inputs = random_inputs(device, n, m, heads=heads, key_heads=key_heads, d=d, e=e, causal=causal, dtype=dtype)
    with poison_allocations():
        assert_right(inputs, "triton")
    assert set(launched) >= {"hopper_forward_kernel" if n > FEW_QUERIES else "decode_kernel"}
    # On a GPU so few short loops are split, which leaves them to the kernels for every GPU.
    if together and max(d, e) <= 128 and (heads > 3 or device.type == "cpu"):
        assert "hopper_backward_kernel" in launched


@pytest.mark.parametrize("options", [{}, {"window": (None, 3)}, {"cu_seqlens_q": [0, 70, 151]}], ids=str)
@pytest.mark.parametrize(("dtype", "logit"), [(torch.float16, -20.0), (torch.bfloat16, -150.0)])
@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.seldom(3, 4)
def test_places_behind_the_last_key_have_no_weight(
    d: int, dtype: torch.dtype, logit: float, options: dict[str, Any], together: bool, launched: list[str],
    monkeypatch: pytest.MonkeyPatch, device: torch.device,
) -> None:  # fmt: skip
    """They are zeros, and so are their logits. Where all others are far below, the exponential of the difference is
    more than the dtype holds, and infinity times zero is NaN.
    """
    from warploom.ops.flash_attention.hopper import launch_varlen as packed

    monkeypatch.setattr(packed, "LEAST_MEAN", {name: {128: 0} for name in packed.LEAST_MEAN})
    inputs = random_inputs(device, 151, 151, heads=24, d=d, e=min(d, 128), dtype=dtype)
    with torch.no_grad():
        inputs["k"][..., 0] = 1.0
        inputs["q"][..., 0] = logit * d**0.5
    inputs |= {name: torch.tensor(x, device=device) if name == "cu_seqlens_q" else x for name, x in options.items()}
    if "cu_seqlens_q" in inputs:
        inputs |= {name: inputs[name].detach()[:1].requires_grad_() for name in "qkv"}
    assert_right(inputs, "triton")
    assert together is ("hopper_backward_kernel" in launched) or d > 128 or device.type == "cuda"


@pytest.mark.parametrize(
    ("n", "m", "mask", "together"),
    [
        (8192, 8192, {"right": 0}, False),  # 512 tiles of keys, of 528
        (4096, 8192, {"right": 0}, True),  # half of the keys are seen by all queries
        (8192, 4096, {}, True),
        (8192, 4096, {"right": 0}, False),
        (2048, 8192, {"right": 0, "left": 1000}, False),
    ],
)
def test_which_calls_form_all_gradients_together(
    n: int, m: int, mask: dict[str, int], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.triton import launch as launchers

    monkeypatch.setattr(launchers_hopper, "programs_at_once", lambda device: 132)
    q, k = (torch.empty(1, length, 8, 128, dtype=torch.bfloat16, device="meta") for length in (n, m))
    call = launchers.Call.of(q, k, k, launchers.MaskSpec(**mask), 0.1)
    assert launchers_hopper.is_fused_faster(call.shape, call.mask, call.device) is together


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("n", "heads", "d"), [(400, 2, 64), (300, 1, 128), large(16384, 32, 128)])
def test_a_chunk_has_the_results_of_the_whole(
    n: int, heads: int, d: int, together: bool, launched: list[str], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As long as it takes the same kernels: attention over several GPUs asks for those of the whole."""
    from warploom.ops.flash_attention.engine import backward, forward
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.problem import MaskSpec
    from warploom.runtime.plans import Plans

    monkeypatch.setattr(launchers_hopper, "splits_of", lambda *arguments: 1)
    inputs = random_inputs(device, n, n, heads=heads, key_heads=max(heads // 4, 1), d=d, e=d, dtype=torch.bfloat16)
    q, k, v = (inputs[name].detach()[:1] for name in "qkv")
    grad, found = torch.randn_like(q), {}
    for begin, end in ((0, n), (0, n // 5), (n // 5, 3 * n // 4)):
        chunk = q[:, begin:end], k[:, :end], v[:, :end]
        plans, of = Plans(), (MaskSpec(None, 0), 0.1, None)
        out, lse, statistics = forward(*chunk, *of, plans)
        results = tuple(map(torch.empty_like, chunk))
        backward(grad[:, begin:end], None, *chunk, out, statistics, *of, plans, results=results, fused=together)
        found[begin, end] = out, lse.transpose(1, 2), results[0]
    whole = found.pop((0, n))
    for (begin, end), chunk in found.items():
        for one, every in zip(chunk, whole):
            assert torch.equal(one, every[:, begin:end])
    assert together is ("hopper_backward_kernel" in launched)


@pytest.mark.seldom(4, 5)
@pytest.mark.sample(6)
@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "heads", "key_heads", "d", "e", "dtype"),
    [
        large(1000, 1000, 1, 1, 64, 64, torch.bfloat16),
        large(1000, 1000, 1, 1, 128, 128, torch.bfloat16),
        large(700, 1500, 4, 2, 128, 80, torch.float16),
        large(1500, 700, 4, 2, 64, 40, torch.float16),
        large(20, 2000, 1, 1, 64, 64, torch.bfloat16),
        large(2000, 3, 2, 1, 128, 128, torch.bfloat16),
        large(1000, 1000, 1, 1, 256, 256, torch.bfloat16),
        large(700, 1500, 4, 2, 192, 256, torch.float16),
        (200, 300, 2, 1, 64, 40, torch.float16),
        (150, 300, 2, 1, 128, 128, torch.bfloat16),
        (100, 200, 1, 1, 192, 256, torch.float16),
        (200, 300, 2, 1, 192, 128, torch.bfloat16),
    ],
)
def test_few_tiles_whose_loops_are_split(
    n: int, m: int, heads: int, key_heads: int, d: int, e: int, dtype: torch.dtype, causal: bool, parts: int,
    launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.triton import launch as launchers
    from warploom.ops.flash_attention.triton import launch_small as launchers_small

    monkeypatch.setattr(launchers_hopper, "splits_of", lambda *arguments: parts)
    monkeypatch.setattr(launchers_hopper, "_FUSED", 2**31)  # one kernel's loops are whole
    monkeypatch.setattr(launchers_hopper, "_SHORT", 0)  # short loops too
    monkeypatch.setattr(launchers_small, "suits_backward", lambda *arguments: False)  # small problems too
    monkeypatch.setattr(launchers, "is_small_for", lambda *arguments: False)
    options = {"heads": heads, "key_heads": key_heads, "d": d, "e": e, "causal": causal, "dtype": dtype}
    inputs = random_inputs(device, n, m, return_lse=True, **options)
    with poison_allocations():
        assert_right(inputs, "triton")
        first, second = run(inputs, "triton"), run(inputs, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert sorted(set(launched)) == kernels_for(max(d, e))


OPTIONS: list[dict[str, Any]] = [
    {"softcap": 2.0},
    {"softcap": 50.0, "causal": True, "size": 3.0},
    {"softcap": 60.0, "causal": True, "size": 5.0},  # logits of which many are near the cap
    {"sink": True, "causal": True},
    {"lengths": True},
    {"lengths": True, "causal": True},
    {"window": (100, None)},
    {"window": (300, None), "causal": True},
    {"window": (0, 0)},
    {"window": (70, 170)},
    {"window": (0, None), "lengths": True},
    {"window": (129, 1), "sink": True, "lengths": True},
    {"window": (64, None), "causal": True, "softcap": 50.0, "sink": True, "lengths": True},
    {"window": (None, 65), "softcap": 30.0, "sink": True, "lengths": True},
]
"""What a call may ask for; ``lengths`` of entries: none, one, all, and any."""


def with_options(
    device: torch.device, n: int, m: int, *, causal: bool = False, draw: int = 0, **options: Any
) -> dict[str, Any]:
    """Random inputs; what lies behind the lengths of entries is NaN."""
    sink, lengths = options.pop("sink", False), options.pop("lengths", False)
    inputs = random_inputs(device, n, m, batch=4, causal=causal, draw=draw, return_lse=True, **options)
    generator = seeds.generator(6 + 100 * draw)
    if sink:
        inputs["sink"] = (2 * torch.randn(options["heads"], generator=generator)).to(device).requires_grad_()
    if lengths:
        used = [0, 1, m, int(torch.randint(m, (), generator=generator))]
        inputs["seqused_k"] = torch.tensor(used, device=device)
        with torch.no_grad():
            for entry, length in enumerate(used):
                inputs["k"][entry, length:] = torch.nan
                inputs["v"][entry, length:] = torch.nan
    return inputs


MORE_DRAWS = 7
"""Judged besides where the first draw is beyond its budget: that of a sink for two heads, say, has two numbers."""


def assert_options_right(device: torch.device, n: int, m: int, **options: Any) -> dict[str, Any]:
    """Results of `with_options`, which come back, are right."""
    more = functools.partial(_more_draws, device, n, m, **options)
    inputs = with_options(device, n, m, **options)
    with poison_allocations():
        assert_right(inputs, "triton", more, KEEPING_THE_OUTPUT)
    return inputs


def _more_draws(device: torch.device, n: int, m: int, **options: Any) -> list[dict[str, Any]]:
    return [with_options(device, n, m, draw=1 + draw, **options) for draw in range(MORE_DRAWS)]


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels for Hopper take short loops and few rows as well, whatever plans there are."""
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.triton import launch as launchers
    from warploom.ops.flash_attention.triton import launch_decode as launchers_decode
    from warploom.ops.flash_attention.triton import launch_small as launchers_small

    monkeypatch.setattr(launchers_hopper, "FEW", 0)
    monkeypatch.setattr(launchers_decode, "suits", lambda call: False)
    monkeypatch.setattr(launchers_hopper, "_SHORT", 0)
    monkeypatch.setattr(launchers_small, "suits_backward", lambda *arguments: False)
    monkeypatch.setattr(launchers, "is_small_for", lambda *arguments: False)
    forget_plans()


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    ("n", "m", "heads", "key_heads", "d", "e", "dtype"),
    [
        (300, 450, 4, 2, 64, 64, torch.bfloat16),
        (450, 300, 2, 2, 128, 128, torch.float16),
        (300, 300, 6, 2, 80, 128, torch.bfloat16),
        (130, 200, 2, 1, 256, 192, torch.bfloat16),
        (130, 200, 2, 1, 192, 128, torch.bfloat16),
        (200, 130, 4, 2, 136, 40, torch.float16),
        (20, 640, 2, 1, 40, 64, torch.float16),
    ],
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(
    options: dict[str, Any], n: int, m: int, heads: int, key_heads: int, d: int, e: int, dtype: torch.dtype,
    tiled: None, together: bool, launched: list[str], device: torch.device,
) -> None:  # fmt: skip
    shape = {"heads": heads, "key_heads": key_heads, "d": d, "e": e, "dtype": dtype}
    inputs = assert_options_right(device, n, m, **shape, **options)
    with poison_allocations():
        first, second = run(inputs, "triton"), run(inputs, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert set(launched) >= set(kernels_for(max(d, e), together))
    assert not {"forward_kernel", "key_kernel", "query_kernel"} & set(launched)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (256, 256), (192, 128)])
@pytest.mark.parametrize("options", [OPTIONS[i] for i in (1, 4, 7, 9, 11, 12)], ids=str)
@pytest.mark.seldom(3, 3)
def test_options_where_loops_are_split(
    options: dict[str, Any], d: int, e: int, tiled: None, launched: list[str], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper

    monkeypatch.setattr(launchers_hopper, "splits_of", lambda *arguments: 3)
    monkeypatch.setattr(launchers_hopper, "_FUSED", 2**31)  # one kernel's loops are whole
    n, m = (260, 330) if ON_GPU or d < 192 else (100, 170)  # tiles of wide heads are smaller, and take the longer
    assert_options_right(device, n, m, heads=2, key_heads=1, d=d, e=e, dtype=torch.bfloat16, **options)
    assert set(launched) >= set(kernels_for(d))
    assert not {"forward_kernel", "key_kernel", "query_kernel"} & set(launched)


@pytest.mark.gpu
def test_large_tiles_with_options(tiled: None, launched: list[str], device: torch.device) -> None:
    """Three groups of warps, which long loops of many queries get."""
    options = {"heads": 40, "key_heads": 8, "d": 64, "dtype": torch.bfloat16}
    for more in ({}, {"causal": True, "window": (4100, None), "sink": True}):
        inputs = with_options(device, 500, 4200, **options, **more, lengths=True)
        with torch.no_grad():
            assert_right({name: x.detach() if isinstance(x, Tensor) else x for name, x in inputs.items()}, "triton")
    assert "hopper_forward_kernel" in launched
    assert "forward_kernel" not in launched


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"softcap": 50.0}, {"sink": True}, {"window": (40, None)}], ids=str)
def test_decoding_with_options_has_a_kernel_of_its_own(
    options: dict[str, Any], launched: list[str], device: torch.device
) -> None:
    inputs = with_options(
        device, 2, 5000, heads=8, key_heads=2, d=64, dtype=torch.bfloat16, causal=True, lengths=True, **options
    )
    with torch.no_grad():
        flash_attention(**inputs, backend="triton")
    assert "decode_kernel" in launched
    assert "hopper_forward_kernel" not in launched


@pytest.mark.parametrize("causal", [False, True])
def test_the_last_section_of_heads_is_narrower(
    causal: bool, together: bool, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are taken in sections that fit in the L2 cache: here those of two key heads, and there are three."""
    from warploom.ops.flash_attention import problem
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.triton import launch as launchers
    from warploom.ops.flash_attention.triton import launch_small as launchers_small

    n, d = 700, 64
    monkeypatch.setattr(problem, "L2_SHARE", 2 * (n * 2 * d * torch.bfloat16.itemsize))
    monkeypatch.setattr(launchers_hopper, "splits_of", lambda *arguments: 1)
    monkeypatch.setattr(launchers_hopper, "_SHORT", 0)  # short loops too
    monkeypatch.setattr(launchers_small, "suits_backward", lambda *arguments: False)  # small problems too
    monkeypatch.setattr(launchers, "is_small_for", lambda *arguments: False)
    forget_plans()  # none but those of this test
    options = {"heads": 3, "batch": 1, "d": d, "causal": causal, "return_lse": True}
    with poison_allocations():
        assert_right(random_inputs(device, n, dtype=torch.bfloat16, **options), "triton")
    assert sorted(set(launched)) == kernels_for(d, together)


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (256, 256), (192, 128)])
def test_many_tiles_give_the_same_bits_twice(d: int, e: int, launched: list[str], device: torch.device) -> None:
    inputs = random_inputs(device, 1500, heads=32, key_heads=16, d=d, e=e, causal=True, dtype=torch.bfloat16)
    first, second = run(inputs, "triton"), run(inputs, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert sorted(set(launched)) == kernels_for(d)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_programs_that_add_in_order_give_the_same_bits(
    d: int, causal: bool, launched: list[str], device: torch.device
) -> None:
    inputs = random_inputs(device, 4096, batch=3, heads=8, d=d, causal=causal, dtype=torch.bfloat16)
    first = run(inputs, "triton")
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, run(inputs, "triton")))
    assert sorted(set(launched)) == kernels_for(d, together=True)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_programs_that_add_in_order_run_beside_others(
    causal: bool, launched: list[str], device: torch.device
) -> None:
    """Of a product on another stream, which holds multiprocessors as long as it runs."""
    inputs = random_inputs(device, 4096, batch=3, heads=8, d=128, causal=causal, dtype=torch.bfloat16)
    first = run(inputs, "triton")
    x = torch.randn(8192, 8192, device=device)
    other = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    for _ in range(10):
        with torch.cuda.stream(other):
            for rows in (1000, 8192):
                x[:rows] @ x
        assert all(torch.equal(a, b) for a, b in zip(first, run(inputs, "triton")))
    torch.cuda.synchronize(device)
    assert "hopper_backward_kernel" in launched


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 256])
def test_a_window_to_the_right(d: int, launched: list[str], device: torch.device) -> None:
    inputs = random_inputs(device, 500, 600, heads=40, d=d, dtype=torch.bfloat16, window=(None, 37))
    assert_right(inputs, "triton")
    assert sorted(set(launched)) == kernels_for(d)


@pytest.mark.gpu
def test_other_batches_and_heads_do_not_matter(launched: list[str], device: torch.device) -> None:
    inputs = random_inputs(device, 600, heads=40, d=128, causal=True, dtype=torch.bfloat16)
    with torch.no_grad():
        clean = flash_attention(inputs["q"], inputs["k"], inputs["v"], causal=True)
        for name in ("q", "k", "v"):
            inputs[name][1] = torch.nan
            inputs[name][0, :, 7:] = torch.nan
        out = flash_attention(inputs["q"], inputs["k"], inputs["v"], causal=True)
    assert torch.equal(out[0, :, :7], clean[0, :, :7])
    assert launched == ["hopper_forward_kernel"] * 2


@pytest.mark.gpu
def test_an_address_that_cannot_be_described(launched: list[str], device: torch.device) -> None:
    """The same shapes and strides, one element further: plans are for addresses that suit, or for any."""
    storage = torch.randn(3, 2 * 300 * 30 * 64 + 8, device=device, dtype=torch.bfloat16)
    results = []
    for start in (0, 1, 8):
        q, k, v = (row[start : start + 2 * 300 * 30 * 64].view(2, 300, 30, 64) for row in storage)
        assert_right({"q": q.requires_grad_(), "k": k, "v": v, "causal": True}, "triton")
        results.append(any(name.startswith("hopper") for name in launched))
        launched.clear()
    assert results == [True, False, True]


@pytest.mark.gpu
def test_a_graph_replays(launched: list[str], device: torch.device) -> None:
    q, k, v = (torch.randn(2, 700, 32, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    flash_attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, v, causal=True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    graph.replay()
    assert torch.equal(out, flash_attention(q, k, v, causal=True))
    assert set(launched) == {"hopper_forward_kernel"}


@pytest.mark.sample(8)
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("n", "m", "heads", "key_heads", "d"),
    [
        large(1000, 1000, 2, 2, 64),
        large(700, 1500, 4, 2, 128),
        large(1500, 700, 2, 1, 128),
        (65, 63, 3, 1, 64),
        (20, 200, 2, 2, 128),
    ],
)
def test_gradients_of_float32_factors_in_terms(
    n: int, m: int, heads: int, key_heads: int, d: int, causal: bool, precision: str, parts: int,
    launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.triton import launch as launchers

    any_length = dict.fromkeys(("forward", "backward"), dict.fromkeys((16, 32, 64, 128), 1))
    monkeypatch.setattr(launchers, "LONG", {"3-term": any_length, "2-term": any_length})
    monkeypatch.setattr(launchers_hopper, "_splits_of_terms", lambda *arguments: parts)
    forget_plans()  # none but those of this test
    options = {"heads": heads, "key_heads": key_heads, "d": d, "causal": causal, "float32_precision": precision}
    inputs = random_inputs(device, n, m, return_lse=True, **options)
    with poison_allocations():
        assert_right(inputs, "triton")
        first, second = run(inputs, "triton"), run(inputs, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not {"key_kernel", "query_kernel"} & set(launched)
    assert set(launched) >= {"hopper_shared_key_kernel", "hopper_shared_query_kernel"}


def test_the_results_that_kernels_for_terms_write(hopper: None) -> None:
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.triton import launch as launchers

    def suits_terms(x: Tensor) -> bool:
        shape = launchers.Shape.of(x, x, x)
        return launchers_hopper.terms_obstacle(shape, 3, x.device, [x]) is None

    x = torch.empty(1, 300, 2, 128)
    assert suits_terms(x)
    assert suits_terms(x.transpose(1, 2).contiguous().transpose(1, 2))
    assert not suits_terms(torch.empty(1, 300, 2, 256)[..., ::2])
    assert not suits_terms(torch.empty(1, 300, 2, 32))
    assert not suits_terms(torch.empty(1, device="meta").as_strided((1, 300, 2, 128), (0, 2**23, 128, 1)))


# ----------------------------------------------------------------------------------------------------------
# Packed sequences, whose rows are spread
# ----------------------------------------------------------------------------------------------------------

PACKINGS = {
    "equal": ([140, 128, 1, 0, 3, 28], [140, 128, 1, 0, 3, 28]),
    "fewer keys": ([130, 0, 60, 110], [40, 20, 0, 140]),
    "more keys": ([5, 100, 0], [129, 100, 71]),
    "around tiles": ([63, 64, 0, 65, 127, 1, 128, 129, 20], [129, 63, 65, 0, 127, 128, 64, 1, 20]),
}
"""Lengths of sequences: of queries, and of keys."""


@pytest.fixture
def spread(tiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of short sequences be spread."""
    from warploom.ops.flash_attention.hopper import launch_varlen as packed

    monkeypatch.setattr(packed, "LEAST_MEAN", {name: {128: 0} for name in packed.LEAST_MEAN})


def packed_inputs(device: torch.device, packing: str, *, draw: int = 0, **options: Any) -> dict[str, Any]:
    """Random inputs of sequences of a packing."""
    sink = options.pop("sink", False)
    lengths = [torch.tensor([0, *each]) for each in PACKINGS[packing]]
    tokens, keys = (int(each.sum()) for each in lengths)
    inputs = random_inputs(device, tokens, keys, batch=1, draw=draw, return_lse=True, **options)
    if sink:
        generator = seeds.generator(6 + 100 * draw)
        inputs["sink"] = (2 * torch.randn(options["heads"], generator=generator)).to(device).requires_grad_()
    bounds = (each.cumsum(0).to(device, torch.int32) for each in lengths)
    return inputs | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds))


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    ("heads", "key_heads", "d", "e", "dtype"),
    [(4, 2, 64, 64, torch.bfloat16), (2, 1, 128, 128, torch.float16), (1, 1, 80, 128, torch.bfloat16)],
)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True}, {"window": (70, None), "causal": True}, {"window": (30, 20)}, {"window": (None, 65)},
        {"window": (129, 1), "sink": True, "softcap": 30.0}, {"causal": True, "sink": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.seldom(3, 5)
def test_packed_sequences(
    options: dict[str, Any], packing: str, heads: int, key_heads: int, d: int, e: int, dtype: torch.dtype,
    spread: None, together: bool, launched: list[str], device: torch.device,
) -> None:  # fmt: skip
    shape = {"heads": heads, "key_heads": key_heads, "d": d, "e": e, "dtype": dtype}

    def draw(number: int) -> dict[str, Any]:
        return packed_inputs(device, packing, draw=number, **shape, **options)

    def more() -> list[dict[str, Any]]:
        return [draw(number) for number in range(1, 1 + MORE_DRAWS)]

    inputs = draw(0)
    with poison_allocations():
        assert_right(inputs, "triton", more, KEEPING_THE_OUTPUT)
        first, second = run(inputs, "triton"), run(inputs, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    backward = {"hopper_backward_kernel"} if together else {"hopper_key_kernel", "hopper_query_kernel"}
    assert set(launched) >= {"hopper_forward_kernel", "units_kernel", "spread_kernel"} | backward


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nothing_reaches_another_sequence(
    name: str, spread: None, together: bool, launched: list[str], device: torch.device
) -> None:
    """What is not finite stays in its own: tiles hold rows of one sequence alone."""
    inputs = packed_inputs(device, "equal", heads=2, d=64, dtype=torch.bfloat16, causal=True)
    expected = run(inputs, "triton")
    with torch.no_grad():
        inputs[name][:, 140:268] = torch.nan
    found = run(inputs, "triton")
    assert "hopper_forward_kernel" in launched
    for one, other in zip(found, expected):
        tokens = one.dim() - 1 if one.dim() == 3 else 1  # lse (1, H, N)
        for rows in (slice(0, 140), slice(268, 300)):
            index = (slice(None),) * (2 if one.dim() == 3 else 1) + (rows,)
            assert one.shape[tokens] == 300
            assert torch.equal(one[index], other[index])


def test_rows_behind_the_last_sequence_are_of_none(
    spread: None, together: bool, launched: list[str], device: torch.device
) -> None:
    """They are zero whatever they hold, other rows are as without them, and the sink never sees them."""
    ends, rows = (90, 60), (150, 100)
    options = {"return_lse": True, "causal": True, **({"window": (40, None)} if together else {})}
    inputs = random_inputs(device, *rows, batch=1, heads=1, d=64, dtype=torch.bfloat16, **options)
    inputs["sink"] = torch.randn(1, generator=seeds.generator(6)).to(device).requires_grad_()
    bounds = {"cu_seqlens_q": [0, 70, 70, ends[0]], "cu_seqlens_k": [0, 20, 25, ends[1]]}
    inputs |= {name: torch.tensor(x, device=device, dtype=torch.int32) for name, x in bounds.items()}
    grads = draw_like((inputs["q"], torch.empty(1, 1, rows[0], device=device)))
    leaves = [inputs[name] for name in ("q", "k", "v", "sink")]
    places = [(1, ends[0], 0), (2, ends[0], -torch.inf), (1, ends[0], 0), (1, ends[1], 0), (1, ends[1], 0)]
    outs = reference.flash_attention(**inputs)
    expected = [*outs, *torch.autograd.grad(outs, leaves, grads)]
    with torch.no_grad():
        for x, (dim, end, _) in zip((*grads, *leaves[:3]), places):
            x.narrow(dim, end, x.shape[dim] - end).fill_(torch.nan)
    with poison_allocations():
        outs = flash_attention(**inputs, backend="triton")
        found = [*outs, *torch.autograd.grad(outs, leaves, grads)]
    backward = {"hopper_backward_kernel"} if together else {"hopper_key_kernel", "hopper_query_kernel"}
    assert set(launched) >= {"hopper_forward_kernel", "units_kernel", "spread_kernel"} | backward
    for one, other, (dim, end, fill) in zip(found, expected, places):
        assert (one.narrow(dim, end, one.shape[dim] - end) == fill).all()
        torch.testing.assert_close(one.narrow(dim, 0, end), other.narrow(dim, 0, end), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[5], expected[5], rtol=2e-2, atol=2e-2)


@pytest.mark.sample(12)
@pytest.mark.parametrize("layout", [None, "heads_first", "slice_of_qkv"])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("heads", "key_heads", "d", "e", "dtype"),
    [(4, 2, 64, 64, torch.bfloat16), (2, 1, 128, 128, torch.float16), (2, 2, 128, 72, torch.bfloat16)],
)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True}, {"causal": True, "sink": True}, {"causal": True, "softcap": 30.0}, {"softcap": 90.0},
        {"window": (70, None), "causal": True}, {"window": (30, 20), "sink": True},
        {"window": (3, 9), "softcap": 30.0},
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_neighbours_do_not_reach_a_forward(
    options: dict[str, Any], heads: int, key_heads: int, d: int, e: int, dtype: torch.dtype, fill: float,
    layout: str | None, spread: None, launched: list[str], device: torch.device,
) -> None:  # fmt: skip
    """Tiles hold rows of other sequences, before and behind, and store none of theirs."""
    shape = {"heads": heads, "key_heads": key_heads, "d": d, "e": e, "dtype": dtype}
    inputs = packed_inputs(device, "around tiles", **shape, **options)
    inputs |= {name: x.detach() for name, x in inputs.items() if isinstance(x, Tensor)}
    if layout is not None:
        inputs |= {name: LAYOUTS[layout](inputs[name]) for name in ("q", "k", "v")}
    with poison_allocations():
        assert_right(inputs, "triton")
        out, lse = flash_attention(**inputs, backend="triton")
    assert set(launched) == {"units_kernel", "hopper_forward_kernel"}, "nothing is copied"
    rows, keys = (
        [slice(*each) for each in itertools.pairwise(inputs[f"cu_seqlens_{name}"].tolist())] for name in "qk"
    )
    for first in (0, 1):
        poisoned = {name: inputs[name].clone() for name in ("q", "k", "v")}
        for own, name in [(rows, "q"), (keys, "k"), (keys, "v")]:
            for each in own[first::2]:
                poisoned[name][:, each] = fill
        with poison_allocations():
            found = flash_attention(**{**inputs, **poisoned}, backend="triton")
        for each in rows[1 - first :: 2]:
            assert torch.equal(found[0][:, each], out[:, each])
            assert torch.equal(found[1][..., each], lse[..., each])


def test_few_rows_in_many_sequences_stay_with_the_other_kernels(hopper: None) -> None:
    """They would take more room than their tensors do, or more tiles."""
    from warploom.ops.flash_attention.hopper import launch_varlen as packed
    from warploom.ops.flash_attention.triton import launch as launchers

    def suits(tokens: int, sequences: int, name: str = "backward", key_heads: int = 2) -> bool:
        q, k = (torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (2, key_heads))
        bounds = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
        call = launchers.Call.of(q, k, k, launchers.MaskSpec(0, 0, bounds, bounds), 0.1)
        return packed.suits(name, call, q, k)

    for name, mean in (("forward", 128), ("backward", 256)):
        assert suits(16 * mean, 16, name)
        assert not suits(16 * mean, 17, name)
    assert suits(16 * 256, 32, key_heads=1)
    assert not suits(16 * 128, 17, "forward", key_heads=1)
    assert not suits(2**24, 2**13)
    assert not suits(2048, 0)
