"""Attention by PyTorch's own, where the kernels cannot run: the same results, in memory linear in the length.

PyTorch's attention is causal with the first query at the first key, and knows neither windows nor packed sequences.
So queries are cut: by sequences, by entries of a batch with lengths, and where a window or another alignment needs
a mask into blocks, with the keys that a block sees. It returns no lse, which a second product of queries and keys
gives, block by block. What it does not do at all is left to the definition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from warploom.errors import BackendWarning, warn
from warploom.ops.flash_attention import reference
from warploom.ops.flash_attention.validation import NAME, FlashInputs, FlashOptions, MaskedInputs
from warploom.runtime.modes import is_forward_mode, is_plain_eager, read_bounds

Tensor = torch.Tensor
Results = tuple[Tensor, ...]
"""Attention, and lse if that is wanted."""

BLOCK = 512
"""Queries of a block that has a mask."""
KEPT = 2**24
"""Elements of masks or logits that are kept for the backward; more are made again there."""


def obstacle(inputs: FlashInputs, options: FlashOptions) -> str | None:
    """Returns why PyTorch's own attention does not compute a call, or None."""
    q, k, has_sink = inputs.q, inputs.k, inputs.sink is not None
    if not is_plain_eager(*(x for x in inputs._replace(sink=None) if x is not None)):
        return "has no forward mode" if is_forward_mode() else "is for plain eager calls"
    for option, there in (("sinks", has_sink), ("a cap", options.softcap is not None)):
        if there:
            return f"does not have {option}"
    if options.scale == 0 or 0 in (*q.shape, *k.shape):
        return "does not take a scale or a size of 0"
    if q.is_cuda and (q.dtype == torch.float64 or torch.cuda.is_current_stream_capturing()):
        return "is neither for float64 nor for CUDA graphs"
    return None


def warn_of_definition(name: str, reason: str) -> None:
    """Warn that a call, which the kernels cannot run, is computed by the definition."""
    if not torch.compiler.is_compiling():
        message = f"{name}: the kernels do not run here, and PyTorch's own attention {reason}"
        warn(
            BackendWarning,
            f"{message}; the definition takes several times as long, and memory quadratic in the length",
        )


def define(inputs: FlashInputs, options: FlashOptions, return_lse: bool) -> Any:
    """Returns attention by the definition, of every call: (B, N, Hq, E) [and lse (B, Hq, N)]."""
    cu_seqlens_q, cu_seqlens_k = read_bounds(inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    return reference.flash_attention(
        inputs.q, inputs.k, inputs.v,
        scale=options.scale, window=(options.left, options.right), softcap=options.softcap, sink=inputs.sink,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=inputs.seqused_k,
        block_table=inputs.block_table, float32_precision=options.precision, return_lse=return_lse,
    )  # fmt: skip


def attend(inputs: FlashInputs, options: FlashOptions, return_lse: bool) -> Any:
    """Returns attention of a call without `obstacle`: (B, N, Hq, E) [and lse (B, Hq, N)]."""

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Results:
        results = define(inputs._replace(q=q, k=k, v=v), options, return_lse)
        return results if return_lse else (results,)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Results:
        return _cut(inputs._replace(q=q, k=k, v=v), options, return_lse)

    factors = inputs.q, inputs.k, inputs.v
    if torch.is_grad_enabled() and any(x.requires_grad for x in factors):
        results = _Differentiable.apply(run, definition, *factors)
    else:
        results = run(*factors)
    return results if return_lse else results[0]


def masked_obstacle(inputs: MaskedInputs, options: FlashOptions) -> str | None:
    """Returns why PyTorch's own attention does not compute a call with a mask, a bias or slopes, or None."""
    if reason := obstacle(inputs.unmasked, options):
        return reason
    if not is_plain_eager(*(x for x in inputs if x is not None)):
        return "is for plain eager calls"
    if inputs.cu_seqlens_q is not None or inputs.cu_seqlens_k is not None or inputs.seqused_k is not None:
        return "takes no masks with sequences or lengths"
    if inputs.q.is_cpu and not all(bool(x.isfinite().all()) for x in inputs[:3]):
        return "makes NaN of what a mask hides"
    return None


def define_masked(inputs: MaskedInputs, options: FlashOptions, return_lse: bool) -> Any:
    """Returns attention by the definition, of every call with a mask, a bias or slopes."""
    cu_seqlens_q, cu_seqlens_k = read_bounds(inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    mask = inputs.mask()
    return reference.flash_attention(
        inputs.q, inputs.k, inputs.v,
        scale=options.scale, window=(options.left, options.right), softcap=options.softcap, sink=inputs.sink,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=inputs.seqused_k,
        mask=None if mask is None else mask.dense(), bias=inputs.bias, alibi=inputs.alibi,
        float32_precision=options.precision, return_lse=return_lse,
    )  # fmt: skip


def attend_masked(inputs: MaskedInputs, options: FlashOptions, return_lse: bool) -> Any:
    """Returns attention of a call without `masked_obstacle`, by PyTorch's with a mask for each block of queries."""
    mask = inputs.mask()
    seen = None if mask is None else mask.dense()

    def of(compute: Any) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Results:
            return compute(inputs._replace(q=q, k=k, v=v, bias=bias))  # type: ignore[no-any-return]

        return run

    def defined(inputs: MaskedInputs) -> Results:
        results = define_masked(inputs, options, return_lse)
        return results if return_lse else (results,)

    run = of(lambda inputs: _attend_masked(inputs, seen, options, return_lse))
    factors = inputs.q, inputs.k, inputs.v, *(() if inputs.bias is None else (inputs.bias,))
    if torch.is_grad_enabled() and any(x.requires_grad for x in factors):
        results = _Differentiable.apply(run, of(defined), *factors)
    else:
        results = run(*factors)
    return results if return_lse else results[0]


def _attend_masked(inputs: MaskedInputs, seen: Tensor | None, options: FlashOptions, return_lse: bool) -> Results:
    q, k, v, bias, alibi = inputs.q, inputs.k, inputs.v, inputs.bias, inputs.alibi
    dtype, tokens, keys = q.dtype, q.shape[1], k.shape[1]
    added = bias is not None or alibi is not None
    if added:  # PyTorch would round what is added to the dtype of the factors
        q, k, v = (x.to(_wide(x)) for x in (q, k, v))

    def block(first: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Results:
        rows = slice(first, first + q.shape[1])
        query = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + (keys - tokens)
        distance = torch.arange(keys, device=q.device) - query
        visible = torch.ones_like(distance, dtype=torch.bool)[None, None]
        if options.left is not None:
            visible = visible & (distance >= -options.left)
        if options.right is not None:
            visible = visible & (distance <= options.right)
        if seen is not None:
            visible = visible & seen[:, :, rows]
        logits = None
        if alibi is not None:
            logits = alibi.to(q.dtype).view(-1, alibi.shape[-1], 1, 1) * distance
        if bias is not None:
            some = (bias if bias.shape[2] == 1 else bias[:, :, rows]).to(q.dtype)
            visible = visible & (some != -torch.inf)
            logits = some if logits is None else logits + some
        blind = ~visible.any(-1, keepdim=True)  # they see all, and become 0: of no key some kernels make NaN
        shown = visible | blind
        if logits is not None:
            shown = logits.masked_fill(logits == -torch.inf, 0.0).masked_fill(~shown, -torch.inf)
        heads = q.shape[0], q.shape[2], q.shape[1]
        out = _attend_fused(q, k, v, options.scale, shown.expand(*heads, keys), False)
        blind = blind[..., 0].expand(heads)
        out = out.masked_fill(blind.transpose(1, 2)[..., None], 0.0)
        if not return_lse:
            return (out,)
        wide = q.to(_wide(q)).unflatten(2, (k.shape[2], -1)) * options.scale
        products = torch.einsum("bnhgd,bmhd->bhgnm", wide, k.to(wide.dtype)).flatten(1, 2)
        products = products.masked_fill(~shown, -torch.inf) if logits is None else products + shown
        return out, products.logsumexp(-1).masked_fill(blind, -torch.inf)

    blocks = [(i, q[:, i : i + BLOCK], k, v, bias) for i in range(0, tokens, BLOCK)]
    many = torch.is_grad_enabled() and q.shape[0] * q.shape[2] * tokens * keys > KEPT
    parts = [checkpoint(block, *each, use_reentrant=False) if many else block(*each) for each in blocks]
    out, *lse = (torch.cat(each, dim) for each, dim in zip(zip(*parts), (1, 2)))
    return out.to(dtype), *lse


class Fallback(NamedTuple):
    """Ways to compute calls of a kind without kernels, given their tensors and options."""

    obstacle: Callable[..., str | None]
    define: Callable[..., Any]
    attend: Callable[..., Any]


UNMASKED = Fallback(obstacle, define, attend)
MASKED = Fallback(masked_obstacle, define_masked, attend_masked)
"""Functions of calls with a mask, a bias or slopes."""


class _Differentiable(torch.autograd.Function):
    """PyTorch's attention with its gradients, and the definition's where someone wants a graph of these."""

    @staticmethod
    def forward(ctx: Any, run: Any, definition: Any, *inputs: Tensor) -> Results:
        ctx.inner = [x.detach().requires_grad_(wants) for x, wants in zip(inputs, ctx.needs_input_grad[2:])]
        with torch.enable_grad():
            ctx.results = run(*ctx.inner)
        ctx.definition = definition
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in ctx.results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, results, again = ctx.inner, ctx.results, torch.is_grad_enabled()
        saved = ctx.saved_tensors
        if again:
            inputs, results = saved, ctx.definition(*saved)
        wanted = [x for x, wants in zip(inputs, ctx.needs_input_grad[2:]) if wants]
        given = [(x, grad) for x, grad in zip(results, grads) if grad is not None and x.requires_grad]
        found: Iterable[Tensor] = map(torch.zeros_like, wanted)  # where no query sees a key
        if given:
            outputs, of_outputs = zip(*given)
            options: dict[str, Any] = {"retain_graph": True, "create_graph": again, "materialize_grads": True}
            found = torch.autograd.grad(outputs, wanted, of_outputs, **options)
        gradients = iter(found)
        return None, None, *(next(gradients) if wants else None for wants in ctx.needs_input_grad[2:])


def _cut(inputs: FlashInputs, options: FlashOptions, return_lse: bool) -> Results:
    """Returns the results of a call, taken one sequence or batch entry at a time where it has bounds or lengths."""
    q, k, v, seqused_k, block_table = inputs.q, inputs.k, inputs.v, inputs.seqused_k, inputs.block_table
    cu_seqlens_q, cu_seqlens_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    rest = options, return_lse
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        queries, keys = _spans(cu_seqlens_q, q.shape[1]), _spans(cu_seqlens_k, k.shape[1])
        return _join([_attend(q[:, i], k[:, j], v[:, j], *rest) for i, j in zip(queries, keys)], q)
    if seqused_k is None:
        return _attend(q, k, v, *rest)
    if cu_seqlens_q is None:
        pieces = list(q.split(1))
    else:
        pieces = [q[:, span] for span in _spans(cu_seqlens_q, q.shape[1])]
    size = k.shape[1]
    most = size * (1 if block_table is None else block_table.shape[1])
    parts = []
    for entry, used in enumerate(seqused_k.tolist()):
        used = min(max(used, 0), most)
        if block_table is None:
            own_k, own_v = (x[entry : entry + 1, :used] for x in (k, v))
        else:
            pages = block_table[entry, : -(-used // size)].long().clamp(0, k.shape[0] - 1)
            own_k, own_v = (x[pages].flatten(0, 1)[None, :used] for x in (k, v))
        parts.append(_attend(pieces[entry], own_k, own_v, *rest))
    if cu_seqlens_q is not None:
        return _join(parts, q)
    return tuple(map(torch.cat, zip(*parts)))


def _join(parts: Sequence[Results], q: Tensor) -> Results:
    """Returns the results of packed sequences in one tensor each, with 0 and −inf in rows that belong to none."""
    each = zip(zip(*parts), (1, 2), (0.0, -torch.inf))  # of attention and of lse
    return tuple(reference.with_tail(x, dim, q.shape[1], fill) for x, dim, fill in each)


def _spans(cu_seqlens: Tensor, rows: int) -> Iterator[slice]:
    """Returns the rows of each sequence, and only rows that there are, whatever the bounds say."""
    begin = 0
    for bound in cu_seqlens.tolist()[1:]:
        end = min(max(bound, begin), rows)
        yield slice(begin, end)
        begin = end


def _attend(q: Tensor, k: Tensor, v: Tensor, options: FlashOptions, return_lse: bool) -> Results:
    """Returns attention of one sequence, or of a batch of one length, and lse (B, Hq, N) if that is wanted."""
    left, right, scale = options.left, options.right, options.scale
    tokens, keys = q.shape[1], k.shape[1]
    blind = tokens if keys == 0 else 0  # the first queries, which see no key
    if right is not None and keys:
        blind = min(max(tokens - keys - right, 0), tokens)
    rows = tokens - blind
    # PyTorch's on a CPU makes zeros of NaN in some rows.
    if rows and q.is_cpu and not all(bool(x.isfinite().all()) for x in (q, k, v)):
        defined = reference.flash_attention(q, k, v, scale=scale, window=(left, right), return_lse=True)
        return defined if return_lse else defined[:1]  # type: ignore[return-value]
    left = None if left is None or left >= keys - 1 else left
    right = None if right is None or right >= rows - 1 else right
    queries, window = q[:, blind:], (left, right, scale)
    if rows == 0:
        out = v.new_zeros((q.shape[0], 0, q.shape[2], v.shape[3]))
    elif right == 0 and left is None and rows == keys:
        out = _attend_fused(queries, k, v, scale, None, True)
    elif left is None and right is None:
        out = _attend_fused(queries, k, v, scale, None, False)
    else:
        out = torch.cat(_in_blocks(_block, 1, queries, k, v, *window), 1)
    out = pad(out, (0, 0, 0, 0, blind, 0))
    if not return_lse:
        return (out,)
    blocks = _in_blocks(_block_lse, q.shape[0] * q.shape[2], queries, k, *window)
    lse = torch.cat(blocks, 2) if rows else out.new_zeros((*out.shape[:3:2], 0), dtype=_wide(q))
    return out, pad(lse, (blind, 0), value=-torch.inf)


def _in_blocks(block: Callable[..., Tensor], matrices: int, q: Tensor, k: Tensor, *rest: Any) -> list[Tensor]:
    """Returns what a function makes of queries, block by block; the last query is at the last key.

    It keeps so many ``matrices`` of queries and keys for its backward.
    """
    rows, keys = q.shape[1], k.shape[1]
    arguments = [(keys - rows + i, q[:, i : i + BLOCK], k, *rest) for i in range(0, rows, BLOCK)]
    if torch.is_grad_enabled() and matrices * rows * keys > KEPT:
        return [checkpoint(block, *each, use_reentrant=False) for each in arguments]
    return [block(*each) for each in arguments]


def _block(
    place: int, q: Tensor, k: Tensor, v: Tensor, left: int | None, right: int | None, scale: float
) -> Tensor:  # fmt: skip
    """Returns attention of queries, the first at key ``place``, on the keys that any of them sees."""
    keys, seen = _find_visible(place, q, k, left, right)
    return _attend_fused(q, k[:, keys], v[:, keys], scale, seen, False)


def _block_lse(place: int, q: Tensor, k: Tensor, left: int | None, right: int | None, scale: float) -> Tensor:
    """Returns lse (B, Hq, n) of queries, the first at key ``place``, of the keys that any of them sees."""
    keys, seen = _find_visible(place, q, k, left, right)
    queries = q.to(_wide(q)).unflatten(2, (k.shape[2], -1)) * scale
    logits = torch.einsum("bnhgd,bmhd->bhgnm", queries, k[:, keys].to(_wide(q)))
    return logits.masked_fill(~seen, -torch.inf).logsumexp(-1).flatten(1, 2)


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _find_visible(place: int, q: Tensor, k: Tensor, left: int | None, right: int | None) -> tuple[slice, Tensor]:
    """Returns the keys that a block of queries sees, the first at key ``place``, and which query sees which."""
    end = place + q.shape[1]
    first = 0 if left is None else max(place - left, 0)
    last = k.shape[1] if right is None else min(end + right, k.shape[1])
    distance = torch.arange(first, last, device=q.device) - torch.arange(place, end, device=q.device)[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return slice(first, last), seen


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """Returns PyTorch's attention, which is fused for as many features of keys as of values."""
    features, wanted = v.shape[3], max(q.shape[3], v.shape[3])
    if scale < 0:
        q, scale = -q, -scale
    grouped = q.shape[2] != k.shape[2]
    if q.is_cuda:  # whose kernel for all widths takes multiples of eight, and no groups
        wanted = -(-wanted // 8) * 8
        if grouped:
            k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
            grouped = False
    q, k, v = (pad(x, (0, wanted - x.shape[3])) if x.shape[3] < wanted else x for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
    if not q.is_cuda:
        return scaled_dot_product_attention(q, k, v, **options)[..., :features].transpose(1, 2)
    # Not PyTorch's flash attention, which may be this one: see `warploom.integrations.sdpa`.
    with contextlib.suppress(RuntimeError), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return scaled_dot_product_attention(q, k, v, **options)[..., :features].transpose(1, 2)
    warn(BackendWarning, f"{NAME}: PyTorch has no fused attention for this call, which takes memory quadratic in N")
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, **options)[..., :features].transpose(1, 2)
