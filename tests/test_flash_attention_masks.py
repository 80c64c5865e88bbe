"""Attention with masks by tiles, biases and slopes, against the definition and float64."""

from typing import Any

import pytest
import torch
from flash_cases import backends

import warploom
from warploom import BlockMask, block_mask, flash_attention
from warploom.ops.flash_attention import patterns
from warploom.ops.flash_attention.block_mask import of_dense

SIZES = ((1, 1, 300, 413), (2, 3, 128, 130), (2, 1, 1, 700), (1, 2, 384, 256))


def random_mask(*shape: int, seed: int = 0) -> torch.Tensor:
    """A mask with tiles that see all, some and nothing, and a row that sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < 0.5
    mask[..., :128, :128] = True
    mask[..., 128:256] = False
    mask[..., -1, :] = False
    return mask


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("compact", [True, False])
def test_a_tensor_comes_back_from_its_tiles(shape: tuple[int, ...], compact: bool) -> None:
    mask = random_mask(*shape)
    made = of_dense(mask, compact)
    assert made.shape == shape
    assert torch.equal(made.dense(), mask)
    some = int((made.tiles >= 0).sum())
    assert made.bits.shape[0] == (some if compact else made.tiles.numel())


@pytest.mark.parametrize("shape", SIZES)
def test_lists_name_the_tiles_that_see_something_in_order(shape: tuple[int, ...]) -> None:
    made = block_mask(random_mask(*shape))
    rows = made.tiles.shape[2]
    lists_of_columns = made.column_lists.split((1 + rows, rows), 3)
    lists_of_rows, whole_first = made.row_lists.chunk(2, 3)
    for states, (count, *listed) in zip(made.tiles.flatten(0, 2).tolist(), whole_first.flatten(0, 2).tolist()):
        kinds = [(state == -2) * 2 + (state >= 0) for state in states]
        assert listed == sorted(range(len(states)), key=lambda i: (kinds[i], i))
        assert count == kinds.count(0)
    for tiles, lists in ((made.tiles, lists_of_rows), (made.tiles.transpose(2, 3), lists_of_columns[0])):
        for states, (count, *listed) in zip(tiles.flatten(0, 2), lists.flatten(0, 2).tolist()):
            assert listed[:count] == [i for i, state in enumerate(states.tolist()) if state != -2]
            assert sorted(listed) == list(range(len(states)))
    before = (made.tiles != -2).cumsum(3) - (made.tiles != -2).int()
    expected = before.transpose(2, 3).gather(3, lists_of_columns[0][..., 1:].long())
    assert torch.equal(lists_of_columns[1], expected.int())


def test_a_function_is_called_for_every_query_and_key() -> None:
    document = torch.arange(300) // 110

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[i] == document[j]) & (j <= i + h) | (b == 1)

    made = block_mask(visible, B=2, H=3, N=300, M=300)
    i, j = torch.arange(300)[:, None], torch.arange(300)
    for b in range(2):
        for h in range(3):
            expected = (document[i] == document[j]) & (j <= i + h) | torch.tensor(b == 1)
            assert torch.equal(made.dense()[b, h], expected)
    assert torch.equal(block_mask(lambda b, h, i, j: True, N=130, M=7).dense(), torch.ones(1, 1, 130, 7).bool())


def test_masks_of_flex_attention_are_taken() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    made = flex.create_block_mask(lambda b, h, i, j: (j <= i) & (j > i - 200), 2, 1, 512, 384, device="cpu")
    i, j = torch.arange(512)[:, None], torch.arange(384)
    assert torch.equal(block_mask(made).dense(), ((j <= i) & (j > i - 200)).expand(2, 1, 512, 384))
    counts, listed = (
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32),
    )
    blocks = flex.BlockMask.from_kv_blocks(
        counts, listed, BLOCK_SIZE=128, seq_lengths=(256, 256)
    )  # without a function
    assert torch.equal(block_mask(blocks).dense()[0, 0], (i[:256] // 128) != (j[:256] // 128))


def test_a_picture_shows_tiles() -> None:
    made = block_mask(lambda b, h, i, j: j <= i, N=384, M=384)
    assert repr(made).splitlines()[1:] == ["▒··", "█▒·", "██▒"]
    assert "3 see all, 3 some" in repr(made)
    assert len(repr(block_mask(lambda b, h, i, j: j <= i, N=9000, M=9000)).splitlines()) <= 33
    assert made.to("meta").device.type == "meta"
    assert "meta" in repr(made.to("meta"))


def draw(dtype: torch.dtype = torch.float64, tokens: int = 300, keys: int = 333) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, tokens, 4, 16), (2, keys, 2, 16), (2, keys, 2, 24))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def by_hand(
    q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None, alibi: Any = None, causal: bool = False
) -> Any:
    """Attention in a few lines, of all that the options mean."""
    tokens, keys = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    distance = torch.arange(keys) - torch.arange(tokens)[:, None] - (keys - tokens)
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) * q.shape[-1] ** -0.5
    if alibi is not None:
        logits = logits + alibi.to(q.dtype).reshape(-1, alibi.shape[-1], 1, 1) * distance
    if bias is not None:
        logits = logits + bias.to(q.dtype)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if causal:
        logits = logits.masked_fill(distance > 0, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("bhnm,bmhe->bnhe", weights, v), lse


MASK = random_mask(2, 4, 300, 333)
OPTIONS: dict[str, dict[str, Any]] = {
    "tensor": {"mask": MASK},
    "mask for all": {"mask": MASK[:1, :1]},
    "mask by tiles": {"mask": MASK[:, :1], "tiles": True},
    "expanded": {"mask": MASK[:1, :1].expand(2, 4, -1, -1), "causal": True},
    "bias": {"bias": torch.randn(2, 4, 300, 333), "causal": True},
    "bias of keys": {"bias": torch.randn(1, 1, 1, 333).masked_fill(torch.arange(333) % 3 == 0, -torch.inf)},
    "bias of heads": {"bias": torch.randn(4, 333, 300).transpose(1, 2)[None], "mask": MASK},
    "slopes": {"alibi": torch.tensor([0.5, 0.25, 0.0, 2.0]), "causal": True},
    "all": {"alibi": torch.rand(2, 4), "mask": MASK, "bias": torch.randn(2, 1, 1, 1).expand(2, 1, 300, 333)},
}


def call(options: dict[str, Any], *tensors: torch.Tensor, **more: Any) -> Any:
    """Attention with options of `OPTIONS`."""
    options = {**options, **more}
    if options.pop("tiles", False):
        options["mask"] = block_mask(options["mask"])
    return flash_attention(*tensors, return_lse=True, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_options_mean_what_they_say(options: dict[str, Any], backend: Any) -> None:
    tensors = [x.requires_grad_() for x in draw()]
    bias = options.get("bias")
    if bias is not None:
        bias = bias.detach().double().requires_grad_()
    options = {**options, **({} if bias is None else {"bias": bias})}
    wanted = [*tensors, *([] if bias is None else [bias])]
    rest = {name: value for name, value in options.items() if name != "tiles"}
    results = []
    for out, lse in (call(options, *tensors, backend=backend), by_hand(*tensors, **rest)):
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + finite.cos().sum(), wanted)))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected.nan_to_num(0.0) if found is not results[0][1] else expected)


def small_mask(*shape: int) -> torch.Tensor:
    """A mask of several tiles whose second column of tiles sees nothing, and the first of the second row all."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[..., 128:256] = False
    mask[..., 128:, :128] = True
    mask[..., 5, :] = False
    return mask


def random_bias(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


SLOPES = torch.tensor([[0.5, 0.25, 0.0, 2.0], [1.0, 0.125, -0.5, 0.25]])
ON_KERNELS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "heads": (140, 270, {"mask": small_mask(2, 4, 140, 270), "causal": True}),
    "all heads": (
        140,
        260,
        {"mask": small_mask(1, 1, 140, 260), "window": (100, 9), "sink": SLOPES[0], "tiles": True},
    ),
    "entries": (
        20,
        270,
        {"mask": small_mask(2, 1, 20, 270), "seqused_k": torch.tensor([265, 13]), "alibi": SLOPES},
    ),
    "bias": (33, 50, {"bias": random_bias(2, 50, 4, 33).permute(0, 2, 3, 1), "causal": True}),
    "bias of keys": (70, 40, {"bias": random_bias(1, 1, 1, 40).masked_fill(torch.arange(40) % 3 == 0, -torch.inf)}),
    "bias of heads": (
        40,
        33,
        {"bias": random_bias(1, 4, 40, 33), "softcap": 2.0, "alibi": SLOPES[0], "scale": -0.3},
    ),
    "expanded": (
        17,
        140,
        {"bias": random_bias(2, 1, 1, 1).expand(2, 1, 17, 140), "mask": small_mask(1, 4, 17, 140)},
    ),
}


@pytest.mark.parametrize("case", ON_KERNELS.values(), ids=ON_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@backends
def test_kernels_agree_with_the_definition(
    backend: Any, dtype: torch.dtype, case: tuple[int, int, dict[str, Any]], device: torch.device
) -> None:
    tokens, keys, options = case
    results = []
    for wide in (False, True):
        tensors = [x.to(device).requires_grad_() for x in draw(dtype, tokens, keys)]
        given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        if wide:
            tensors = [x.detach().double().requires_grad_() for x in tensors]
        wanted = list(tensors)
        for name in ("bias", "sink"):
            if name in given:
                given[name] = (given[name].double() if wide else given[name]).detach().requires_grad_()
                wanted.append(given[name])
        out, lse = call(given, *tensors, backend="torch" if wide else backend)
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        grads = torch.autograd.grad(out.double().square().sum() + finite.double().cos().sum(), wanted)
        results.append((out, lse, *grads))
    for found, expected in zip(*results):
        size = expected.detach().abs()
        bound = (3e-2 if dtype == torch.bfloat16 else 2e-6) * float(size[size.isfinite()].max())
        torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@backends
def test_a_row_of_the_smallest_numbers_has_equal_weights(
    backend: Any, dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v = (x.to(device) for x in draw(dtype, 20, 33))
    bias = torch.zeros(1, 1, 20, 33, device=device, dtype=dtype)
    bias[..., 7, :] = torch.finfo(dtype).min
    group, bound = q.shape[2] // k.shape[2], 1e-2 if dtype == torch.bfloat16 else 1e-6
    out = flash_attention(q, k, v.requires_grad_(), bias=bias, backend=backend)
    mean = v.float().mean(1).repeat_interleave(group, 1)
    torch.testing.assert_close(out[:, 7].float(), mean, atol=bound, rtol=0.0)
    (gradient,) = torch.autograd.grad(out[:, 7].float().sum(), v)
    expected = torch.full_like(gradient, group / 33).float()
    torch.testing.assert_close(gradient.float(), expected, atol=bound, rtol=0.0)


@backends
def test_gradients_of_a_bias_have_the_same_bits_twice(backend: Any, device: torch.device) -> None:
    q, k, v = (x.to(device) for x in draw(torch.float32, 40, 33))
    bias = random_bias(1, 1, 40, 33).to(device).requires_grad_()
    found = []
    for _ in range(2):
        out = flash_attention(q, k, v, bias=bias, causal=True, backend=backend)
        found.append(torch.autograd.grad(out.sin().sum(), bias)[0])
    assert torch.equal(*found)


@backends
def test_hidden_numbers_reach_nothing_on_kernels(backend: Any, device: torch.device) -> None:
    """Keys and values that nothing sees, and queries that see nothing, in tiles that others see."""
    mask = small_mask(1, 1, 40, 140).to(device)
    mask[..., 20:31] = False
    results = []
    for poison in (0.0, torch.nan, torch.inf):
        q, k, v = (x.to(device) for x in draw(torch.float32, 40, 140))
        if poison:
            q[:, 5], k[:, 20:25], v[:, 22:31] = poison, poison, poison
        tensors = [x.requires_grad_() for x in (q, k, v)]
        bias = torch.zeros(1, 1, 40, 140, device=device).masked_fill(~mask, poison or 1.0).requires_grad_()
        out, lse = flash_attention(*tensors, mask=mask, bias=bias, return_lse=True, backend=backend)
        results.append((out, lse, *torch.autograd.grad(out.sin().sum(), [*tensors, bias])))
    for found in results[1:]:
        for each, expected in zip(found, results[0]):
            torch.testing.assert_close(each, expected)


def without_gaps(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@backends
def test_masks_and_what_was_saved_may_have_any_memory(backend: Any, device: torch.device) -> None:
    """Autograd may keep tensors elsewhere and bring them back without gaps; plans must see that."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, 2, 16, generator=generator).to(device).requires_grad_() for n in (40, 70, 70))
    bias = torch.randn(1, 1, 1, 70, generator=generator).to(device).expand(1, 2, 40, 70).requires_grad_()
    mask = block_mask(random_mask(1, 2, 40, 70)).to(device)
    strided = BlockMask(mask.shape, *(torch.stack((x, x), -1)[..., 0] for x in mask[1:]))
    found = []
    move = torch.autograd.graph.saved_tensors_hooks
    for own, pack in ((mask, lambda x: x), (strided, lambda x: x), (mask, without_gaps)):
        with move(pack, lambda x: x):
            out = flash_attention(q, k, v, mask=own, bias=bias, backend=backend)
        found.append((out, *torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out))))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@backends
def test_nothing_to_attend_to(backend: Any, device: torch.device) -> None:
    q = torch.randn(2, 0, 4, 16, device=device)
    k = torch.randn(2, 5, 2, 16, device=device, requires_grad=True)
    bias = torch.zeros(1, 1, 1, 5, device=device, requires_grad=True)
    out = flash_attention(q, k, k, bias=bias, backend=backend)
    out.sum().backward()
    assert out.shape == (2, 0, 4, 16)
    assert not k.grad.any()
    assert not bias.grad.any()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_rows_that_see_nothing_are_zero(backend: Any) -> None:
    q, k, v = draw(torch.float32)
    mask = torch.zeros(1, 1, 300, 333, dtype=torch.bool)
    out, lse = flash_attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_what_a_mask_hides_from_all_reaches_nothing() -> None:
    q, k, v = draw(torch.float32)
    mask = MASK.clone()
    mask[..., 100:120] = False
    expected = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    poisoned = [q.clone(), k.clone(), v.clone()]
    poisoned[0][:, -1], poisoned[1][:, 100:110], poisoned[2][:, 105:120] = torch.nan, torch.inf, torch.nan
    results = []
    for tensors in (expected, [x.requires_grad_() for x in poisoned]):
        out, lse = flash_attention(*tensors, mask=mask, return_lse=True, backend="torch")
        results.append((out, lse, *torch.autograd.grad(out.sum(), tensors)))
    for found, there in zip(*results):
        torch.testing.assert_close(found, there)


Q = torch.randn(1, 8, 2, 16)
PYTORCHS = type("BlockMask", (), {"kv_num_blocks": None, "mask_mod": None})()
WRONG: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"mask": torch.ones(1, 1, 8, 9).bool()}, warploom.ShapeError, "mask must be"),
    ({"mask": torch.ones(8, 8).bool()}, warploom.ShapeError, "Hq or 1"),
    ({"mask": PYTORCHS}, warploom.DtypeError, "of PyTorch's BlockMask by block_mask(mask); got BlockMask"),
    ({"mask": block_mask(lambda b, h, i, j: i >= j, N=1, M=8)}, warploom.ShapeError, "(1, 2, 8, 8); got"),
    ({"mask": torch.ones(1, 1, 8, 8)}, warploom.DtypeError, "boolean"),
    ({"mask": torch.ones(1, 1, 8, 8, device="meta").bool()}, warploom.DeviceError, "device of q"),
    ({"mask": lambda b, h, i, j: i >= j}, warploom.DtypeError, "block_mask(mask, N=8, M=8"),
    ({"mask": block_mask(lambda b, h, i, j: i >= j, N=9, M=8)}, warploom.ShapeError, "(1, 2, 8, 8)"),
    ({"bias": torch.ones(1, 3, 8, 8)}, warploom.ShapeError, "bias must be"),
    ({"bias": torch.ones(1, 1, 8, 8).bool()}, warploom.DtypeError, "bias"),
    ({"alibi": torch.ones(3)}, warploom.ShapeError, "alibi"),
    ({"alibi": torch.ones(2, requires_grad=True)}, warploom.ArgumentError, "slopes do not have"),
    ({"bias": torch.ones(1, 1, 8, 7)}, warploom.ShapeError, "(B or 1, Hq or 1, N or 1, M) = (1, 2, 8, 8)"),
    ({"bias": torch.ones(2, 8, 8)}, warploom.ShapeError, "bias must be"),
    ({"bias": torch.ones(1, 1, 8, 8).long()}, warploom.DtypeError, "bias"),
    ({"bias": 1.0}, warploom.DtypeError, "bias"),
    ({"bias": torch.ones(1, 1, 8, 8, device="meta")}, warploom.DeviceError, "device of q"),
    ({"alibi": torch.ones(2, 1, 2)}, warploom.ShapeError, "(Hq,) or (B, Hq)"),
    ({"alibi": torch.ones(2, device="meta")}, warploom.DeviceError, "device of q"),
    ({"alibi": torch.ones(2).int()}, warploom.DtypeError, "alibi"),
    ({"bias": torch.ones(1, 1, 1, 8), "out": torch.empty(1, 8, 2, 16)}, warploom.ArgumentError, "with out"),
    (
        {
            "bias": torch.ones(1, 1, 1, 8, requires_grad=True),
            "cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32),
            "seqused_k": torch.tensor([8], dtype=torch.int32),
        },
        warploom.ArgumentError,
        "bias must be None with queries packed on a cache",
    ),
    (
        {
            "alibi": torch.ones(2),
            "block_table": torch.zeros(1, 1, dtype=torch.int32),
            "seqused_k": torch.ones(1, dtype=torch.int32),
        },
        warploom.ArgumentError,
        "alibi must be None with block_table",
    ),
    (
        {
            "bias": torch.ones(1, 1, 1, 8, requires_grad=True),
            "block_table": torch.zeros(1, 1, dtype=torch.int32),
            "seqused_k": torch.ones(1, dtype=torch.int32),
        },
        warploom.ArgumentError,
        "None with block_table",
    ),
)


@pytest.mark.parametrize(("options", "error", "text"), WRONG, ids=range(len(WRONG)))
def test_wrong_options_raise(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text.replace("(", r"\(").replace(")", r"\)")):
        flash_attention(Q, Q, Q, **options)


PARTS: dict[str, tuple[Any, type[Exception], str]] = {
    "other tiles": (block_mask(torch.ones(1, 1, 300, 8).bool())[1], warploom.ShapeError, r"\(1, 1, 1, 1\)"),
    "other type": (torch.zeros(1, 1, 1, 1), warploom.DtypeError, "tiles of mask must be of int32"),
    "a place of no bits": (
        torch.full((1, 1, 1, 1), 7, dtype=torch.int32),
        warploom.ArgumentError,
        "-2 and 0; got 7",
    ),
    "no state": (torch.full((1, 1, 1, 1), -3, dtype=torch.int32), warploom.ArgumentError, "-2 and 0; got -3"),
}


@pytest.mark.parametrize("part", PARTS)
@backends
def test_a_mask_that_was_changed_is_refused(backend: Any, part: str, device: torch.device) -> None:
    """No kernel reads outside of its bits."""
    tiles, error, text = PARTS[part]
    made = block_mask(torch.ones(1, 1, 8, 8).bool().tril())._replace(tiles=tiles).to(device)
    q = Q.to(device)
    warploom.check_values(True)
    try:
        with pytest.raises(error, match=text):
            flash_attention(q, q, q, mask=made, backend=backend)
    finally:
        warploom.check_values(False)


@pytest.mark.parametrize("part", ["row_lists", "column_lists", "column_bits"])
@pytest.mark.parametrize("in_place", [False, True])
def test_lists_that_were_changed_are_refused(part: str, in_place: bool, device: torch.device) -> None:
    """Where values are not checked too: kernels that own keys wait for the tiles that lists count."""
    q = Q.to(device)
    for number in (-1, 2):
        made = block_mask(torch.ones(1, 1, 8, 8).bool().tril()).to(device)
        flash_attention(q, q, q, mask=made)
        if in_place:
            getattr(made, part).fill_(number)
        else:
            made = made._replace(**{part: torch.full_like(getattr(made, part), number)})
        with pytest.raises(warploom.ArgumentError, match=f"{part} of mask must be of its tiles"):
            flash_attention(q, q, q, mask=made)


def test_a_mask_made_by_hand_is_taken(device: torch.device) -> None:
    made = block_mask(random_mask(2, 3, 300, 200).to(device))
    other = made._replace(**{name: getattr(made, name).clone() for name in made._fields[1:]})
    q, k = torch.randn(2, 300, 3, 16, device=device), torch.randn(2, 200, 3, 16, device=device)
    for _ in range(2):
        assert torch.equal(flash_attention(q, k, k, mask=other), flash_attention(q, k, k, mask=made))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"tiles": None}, warploom.DtypeError, "tiles of mask must be a tensor"),
        ({"bits": None}, warploom.DtypeError, "bits of mask must be a tensor"),
        ({"tiles": torch.zeros(3, 1, 1, 1, dtype=torch.int32)}, warploom.ShapeError, "tiles of mask"),
        ({"bits": torch.zeros(1, 128, 4)}, warploom.DtypeError, "bits of mask must be of int32"),
        ({"row_lists": torch.zeros(1, 1, 1, 3, dtype=torch.int32)}, warploom.ShapeError, "row_lists of mask"),
        (
            {"column_bits": torch.zeros(1, 1, 1, 4, dtype=torch.int32, device="meta")},
            warploom.DeviceError,
            "column_bits of mask",
        ),
    ],
    ids=str,
)
def test_parts_that_are_not_a_masks_are_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    made = block_mask(torch.ones(1, 1, 8, 8).bool().tril())._replace(**change)
    with pytest.raises(error, match=text):
        flash_attention(Q, Q, Q, mask=made)


def test_sharded_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warploom.ops.flash_attention.api.is_sharded", lambda tensors: True)
    for options in ({"mask": torch.ones(1, 1, 8, 8).bool()}, {"alibi": torch.ones(2)}):
        with pytest.raises(warploom.BackendError, match="sharded over a mesh"):
            flash_attention(Q, Q, Q, **options)


def test_packed_sequences_with_masks_run_in_pytorch() -> None:
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    out = flash_attention(Q, Q, Q, cu_seqlens=bounds, alibi=torch.ones(2))
    torch.testing.assert_close(out[:, :3], flash_attention(Q[:, :3], Q[:, :3], Q[:, :3], alibi=torch.ones(2)))
    with pytest.raises(warploom.BackendError, match="have no kernels"):
        flash_attention(Q, Q, Q, cu_seqlens=bounds, alibi=torch.ones(2), backend="triton")


@pytest.mark.parametrize("how", ["mask", "tiles", "bias"])
@backends
def test_all_rows_hidden(backend: Any, how: str, device: torch.device) -> None:
    """Outputs and gradients are 0, and lse is −∞, or the sink, of which it is the whole sum."""
    q, k, v = (x.to(device).requires_grad_() for x in draw(torch.float32, 20, 140))
    seen = torch.zeros(1, 1, 20, 140, dtype=torch.bool, device=device)
    bias = torch.zeros(1, 1, 20, 140, device=device).requires_grad_()
    options: dict[str, Any] = {"mask": block_mask(seen) if how == "tiles" else seen, "bias": bias}
    if how == "bias":
        options = {"bias": torch.full((1, 1, 1, 140), -torch.inf, device=device).requires_grad_()}
    sink = torch.tensor([0.5, -1.0, 0.0, 3.0], device=device)
    for own in (None, sink):
        out, lse = flash_attention(q, k, v, sink=own, **options, return_lse=True, backend=backend)
        assert not out.any()
        expected = torch.full_like(lse, -torch.inf) if own is None else own[:, None].expand_as(lse)
        torch.testing.assert_close(lse, expected)
        for grad in torch.autograd.grad(out.sum(), (q, k, v, options["bias"])):
            assert not grad.any()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"mask": lambda b, h, i, j: i - j, "N": 4, "M": 4}, warploom.DtypeError, "returns booleans"),
        ({"mask": lambda b, h, i, j: 1.0, "N": 4, "M": 4}, warploom.DtypeError, "boolean tensor"),
        ({"mask": lambda b, h, i, j: (i >= j)[None], "N": 4, "M": 4}, warploom.ShapeError, "no axes"),
        ({"mask": lambda b, h, i, j: i >= j, "N": 4}, warploom.ArgumentError, "M must be given"),
        ({"mask": 3, "N": 4, "M": 4}, warploom.DtypeError, "function"),
        ({"mask": torch.ones(1, 1, 4, 4)}, warploom.DtypeError, "boolean"),
        ({"mask": torch.ones(4, 4).bool()}, warploom.ShapeError, "each at least 1"),
        ({"mask": torch.ones(1, 1, 4, 4).bool(), "N": 5}, warploom.ShapeError, "that of the mask"),
        ({"mask": torch.ones(1, 1, 4, 4).bool(), "block": (64, 64)}, warploom.ArgumentError, "128"),
        ({"mask": lambda b, h, i, j: i >= j, "N": 0, "M": 4}, warploom.ArgumentError, "at least 1"),
        ({"mask": lambda b, h, i, j: i >= j, "N": 4.0, "M": 4}, warploom.DtypeError, "an int"),
        (
            {"mask": lambda i, j: i >= j, "N": 4, "M": 4},
            warploom.DtypeError,
            r"\(b, h, q_idx, kv_idx\); got one of \(i, j\)",
        ),
        ({"mask": lambda b, h, i, j: i >= j and j > 1, "N": 4, "M": 4}, warploom.ArgumentError, "`&`, `|`"),
        (
            {"mask": lambda b, h, i, j: i >= j, "Q_LEN": 4},
            warploom.UnknownArgumentError,
            "here it is N: the number of q",
        ),
        ({"N": 4, "M": 4}, TypeError, "missing a required argument: 'mask'"),
    ],
)
def test_wrong_masks_raise(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        block_mask(**arguments)


@pytest.mark.parametrize(
    ("argument", "shape", "widen"),
    [
        ("mask", (6, 7), "mask[None, None]"),
        ("mask", (2, 7), "mask[:, None, None].expand(-1, -1, 6, -1)"),
        ("mask", (2, 1, 1, 7), "mask.expand(-1, -1, 6, -1)"),
        ("mask", (2, 6, 7), "mask[:, None]"),
        ("bias", (6, 7), "bias[None, None]"),
        ("bias", (2, 7), "bias[:, None, None]"),
    ],
)
def test_other_axes_of_masks_are_widened_as_errors_say(argument: str, shape: tuple[int, ...], widen: str) -> None:
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 7, 2, 8)
    numbers = torch.rand(shape)
    given: Any = {argument: numbers > 0.3 if argument == "mask" else numbers}
    with pytest.raises(warploom.ShapeError) as caught:
        flash_attention(q, k, k, **given)
    assert f", as {widen} is; got {shape}" in str(caught.value)
    wide: Any = eval(widen, {}, given)
    axes = numbers.dim() == 2 and shape[0] == 6
    meant: Any = given[argument] if axes or numbers.dim() == 4 else given[argument].view(2, 1, -1, 7)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), attn_mask=meant, enable_gqa=True
    )
    torch.testing.assert_close(flash_attention(q, k, k, **{argument: wide}), theirs.transpose(1, 2).nan_to_num())


def test_a_mask_is_pickled_and_moved() -> None:
    import pickle

    made = block_mask(MASK)
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again.to("cpu"), BlockMask)
    assert torch.equal(again.dense(), MASK)


@pytest.mark.sample(2)
@backends
@pytest.mark.seldom(4, 22)
def test_masks_and_biases_are_compiled(backend: Any, device: torch.device, fresh_dynamo: None) -> None:
    """Other sizes than the first are other graphs or the same, and give what eager calls do."""

    def run(q: Any, k: Any, v: Any, mask: Any, bias: Any) -> Any:
        return flash_attention(q, k, v, mask=mask, bias=bias, causal=True, backend=backend)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for tokens, keys in ((40, 33), (50, 43)):
        tensors = [x.to(device).requires_grad_() for x in draw(torch.float32, tokens, keys)]
        bias = random_bias(1, 4, tokens, keys).to(device).requires_grad_()
        dense = small_mask(1, 1, tokens, keys).to(device)
        for mask in (dense, block_mask(dense)):
            results = []
            for function in (compiled, run):
                out = function(*tensors, mask, bias)
                results.append((out, *torch.autograd.grad(out.sin().sum(), [*tensors, bias])))
            torch.testing.assert_close(*results)


PATTERNS = ("causal", "documents", "prefix", "sliding + global", "tree", "random 30 %")


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_the_bench(name: str) -> None:
    """FlexAttention reads the same masks, and operations are those of tiles that see something."""
    n, m = (300, 300) if name != "tree" else (40, 300)
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    pattern = patterns.make_pattern(name, n, m, "cpu")
    made = block_mask(pattern, N=n, M=m)
    assert torch.equal(block_mask(flex.create_block_mask(pattern, None, None, n, m, "cpu")).dense(), made.dense())
    rows, columns = (torch.tensor([min(128, size - i) for i in range(0, size, 128)]) for size in (n, m))
    pairs = (made.tiles[0, 0] != -2) * rows[:, None] * columns
    assert patterns.count_pairs(name, n, m) == int(pairs.sum())
    assert made.dense().any(-1).all()
    case = {"batch": 2, "n": n, "m": m, "heads": 4, "head_dim": 64, "dtype": "bfloat16", "pattern": name}
    assert patterns.masked_traffic(case, "fwd").flops == 2 * 4 * 4 * 64 * int(pairs.sum())


def test_a_tree_of_the_bench_sees_the_cache_and_its_path() -> None:
    seen = block_mask(patterns.make_pattern("tree", 7, 20, "cpu"), N=7, M=20).dense()[0, 0]
    assert seen[:, :13].all()
    assert [row.nonzero().flatten().tolist() for row in seen[:, 13:]] == [
        [0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 1, 5], [0, 1, 6]
    ]  # fmt: skip
