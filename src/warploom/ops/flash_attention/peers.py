"""Other implementations of attention: plain PyTorch, its fused kernels, and other libraries'.

All get (B, N, H, D) and none copies it. Nothing here runs a kernel of ours, so that records of these providers
outlast a change to one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from warploom.ops.spec import Case, Unsupported, compile_at_best, need_cuda

Tensor = torch.Tensor
Provider = Callable[..., Tensor]

PACKINGS: dict[str, list[int]] = {
    "two": [100, 156],
    "8 × 4096": [4096] * 8,
    "uneven": [16384, 512, 8192, 3000, 80, 4600],
    "32 × 1024": [1024] * 32,
}
"""Lengths of packed sequences."""
MIXES: dict[str, list[tuple[int, int]]] = {
    "prompt of 70, 3 decoding": [(70, 70), (1, 90), (1, 17), (1, 96)],
    "chunk of 16 on 96": [(16, 96)],
    "prompt of 8k": [(8192, 8192)],
    "8 prompts of 1k": [(1024, 1024)] * 8,
    "chunk of 512 on 32k": [(512, 32768)],
    "64 decoding at 2k": [(1, 2048)] * 64,
    "256 decoding at 1k": [(1, 1024)] * 256,
    "4 decoding at 32k": [(1, 32768)] * 4,
    "prompt of 8k, 63 decoding at 2k": [(8192, 8192), *[(1, 2048)] * 63],
}
"""Batches of a server: of each sequence its queries, the newest, and its used keys with theirs."""


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    float32_precision: str | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Compute attention as one writes it in PyTorch: the whole matrix of weights, in the dtype of the inputs."""
    k, v = (_gather_pages(t, block_table) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device)
    ahead = logits.shape[-1] - logits.shape[-2]  # of the keys' places before those of the queries
    if causal:
        visible = visible.tril(ahead)
    if window is not None and window[0] is not None:
        visible = visible.triu(ahead - window[0])
    if seqused_k is not None:  # of as many queries as keys or of one: where it stands changes nothing
        visible = visible & _mask_of_used(seqused_k, k.shape[2])
    if causal or window is not None or seqused_k is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    if sink is not None:
        rows = sink.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, rows], dim=-1)
    out: Tensor = logits.softmax(-1)[..., : k.shape[2]] @ v
    return out.transpose(1, 2)


def _plain(case: Case) -> Provider:
    _need_no_options(case, but=("window", "softcap", "sink", "seqused_k"))
    return plain


def _gather_pages(x: Tensor, block_table: Tensor | None) -> Tensor:
    """Returns the pages of each batch entry one after the other, where there are pages: (B, M, H, F)."""
    return x if block_table is None else x[block_table.long()].flatten(1, 2)


def _mask_of_used(seqused_k: Tensor, keys: int) -> Tensor:
    """Returns a mask (B, 1, 1, M) of the keys that each batch entry has."""
    return (torch.arange(keys, device=seqused_k.device) < seqused_k[:, None])[:, None, None]


def _decoding(attend: Provider) -> Provider:
    """Returns a decoding step by `attend`, which is called with tensors (B, H, N, D).

    The query heads of a key head are queries of one head: no key is read twice, and no kernel needs to know groups.
    """

    def decode(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> Tensor:
        k, v = (_gather_pages(t, block_table).transpose(1, 2) for t in (k, v))
        queries = q[:, 0].unflatten(1, (k.shape[1], -1))
        out = attend(queries, k, v, None if seqused_k is None else _mask_of_used(seqused_k, k.shape[2]))
        return out.flatten(1, 2)[:, None]

    return decode


def _decode_plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    out: Tensor = logits.softmax(-1) @ v
    return out


def _decode_sdpa(backend: str, case: Case) -> Provider:
    """Returns PyTorch's fused attention with one of its kernels, for one query."""
    need_device_of(backend)

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        return attend_fused(backend, q, k, v, attn_mask=visible)

    return _decoding(attend)


def need_device_of(backend: str) -> None:
    """Raise unless a kernel of PyTorch's can run here: its flash attention alone does on a CPU.

    Raises:
        Unsupported: There is no NVIDIA GPU.
    """
    if backend != "FLASH_ATTENTION":
        need_cuda("the fused kernels")


def attend_fused(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Returns PyTorch's fused attention with one of its kernels, on (B, H, N, D).

    Raises:
        Unsupported: The kernel does not do this.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        try:
            out: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
            return out
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise Unsupported("PyTorch says that the kernel cannot run this case") from error
            raise


def _sdpa(backend: str, case: Case) -> Provider:
    """Returns PyTorch's fused attention with one of its kernels."""
    need_device_of(backend)
    _need_no_options(case)
    grouped = case.get("key_heads", case["heads"]) != case["heads"]
    if case["dtype"] == "float32" and backend != "EFFICIENT_ATTENTION" and torch.cuda.is_available():
        raise Unsupported("the kernel takes float16 and bfloat16 only")
    if grouped and backend == "EFFICIENT_ATTENTION":
        raise Unsupported("the kernel has no grouped-query attention")

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, float32_precision: str | None = None
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attend_fused(backend, q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    return attend


def _need_no_options(case: Case, but: Sequence[str] = ()) -> None:
    known = ("window", "softcap", "sink", "seqused_k", "packing")
    options = [name for name in known if name in case and name not in but]
    if options:
        raise Unsupported(f"it has no {' and no '.join(options)}")


def differentiate_forward(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of q, k, v and their tangents: attention, and its tangent."""

    def differentiated(q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
        out, tangent, *_ = torch.func.jvp(attend, (q, k, v), (dq, dk, dv))
        return out, tangent

    return differentiated


def _math_in_forward_mode(compiled: bool, case: Case) -> Provider:
    """Returns attention as PyTorch computes it in forward mode, by products and softmax."""
    _need_no_options(case)
    group = case["heads"] // case.get("key_heads", case["heads"])

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        logits = (q @ k.transpose(2, 3)).float() * q.shape[3] ** -0.5
        if causal:
            hidden = torch.ones(logits.shape[2:], dtype=torch.bool, device=q.device).triu(1)
            logits = logits.masked_fill(hidden, -torch.inf)
        out: Tensor = logits.softmax(-1).to(v.dtype) @ v
        return out.transpose(1, 2)

    def run(q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, causal: bool = False) -> Any:
        return differentiate_forward(functools.partial(attend, causal=causal))(q, k, v, dq, dk, dv)

    return compile_at_best(run) if compiled else run


FORWARD_MODE: dict[str, Callable[[Case], Provider]] = {
    "torch": functools.partial(_math_in_forward_mode, False),
    "torch_compile": functools.partial(_math_in_forward_mode, True),
}
"""Peers in forward mode."""


def _flex_attention(case: Case) -> Provider:
    """Returns FlexAttention, compiled for the case, with a block mask made once, outside the timing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    need_cuda("the compiled kernel")
    left, cap, used = case.get("window", (None, None))[0], case.get("softcap", 0.0), case.get("seqused_k")
    keys = case.get("m", case["n"])
    ahead = keys - case["n"]
    lengths = None if used is None else torch.tensor(used, dtype=torch.int32, device="cuda")
    sequences = None  # of tokens
    if "packing" in case:
        counts = torch.tensor(PACKINGS[case["packing"]], device="cuda")
        sequences = torch.arange(len(counts), device="cuda").repeat_interleave(counts)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j >= 0
        if case["causal"]:
            seen = seen & (i + ahead >= j)
        if left is not None:
            seen = seen & (i + ahead - j <= left)
        if lengths is not None:
            seen = seen & (j < lengths[b])
        if sequences is not None:
            seen = seen & (sequences[i] == sequences[j])
        return seen

    def bent(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        bound: Tensor = cap * torch.tanh(logit / cap)
        return bound

    mask = None
    if case["causal"] or left is not None or lengths is not None or sequences is not None:
        batch = None if lengths is None else case["batch"]
        mask = create_block_mask(visible, batch, None, case["n"], keys, device="cuda")
    grouped = case.get("key_heads", case["heads"]) != case["heads"]
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": grouped}
    if cap:
        options["score_mod"] = bent

    def whole(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if sink is None:
            out: Tensor = flex_attention(q, k, v, **options)
            return out.transpose(1, 2)
        out, lse = flex_attention(q, k, v, return_lse=True, **options)
        return (out * torch.sigmoid(lse - sink[:, None])[..., None].to(out.dtype)).transpose(1, 2)

    compiled = compile_at_best(whole)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **_: Any) -> Tensor:
        out: Tensor = compiled(q, k, v, sink)
        return out

    return attend


def _torch_varlen(case: Case) -> Provider:
    """Returns PyTorch's attention of packed sequences."""
    need_cuda("the fused kernel")
    _need_no_options(case, but=("packing",))
    if "packing" not in case:
        raise Unsupported("it is for packed sequences")
    try:
        function: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError) as error:
        raise Unsupported("this PyTorch has none") from error
    longest = max(PACKINGS[case["packing"]])
    names = inspect.signature(function).parameters
    options = {"is_causal": case["causal"]} if "is_causal" in names else {"window_size": (-1, 0)}

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, cu_seqlens_q: Tensor | None = None) -> Tensor:
        rows = (x.squeeze(0) for x in (q, k, v))
        out: Tensor = function(*rows, cu_seqlens_q, cu_seqlens_q, longest, longest, **options)
        return out.unsqueeze(0)

    return attend


def _served_by_sequence(case: Case) -> Provider:
    """Returns PyTorch's attention of one sequence after another, with the kernel that PyTorch chooses."""
    from torch.nn.attention.bias import causal_lower_right

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        block_table: Tensor | None = None,
    ) -> Tensor:
        outs, begin = [], 0
        for sequence, (queries, keys) in enumerate(MIXES[case["mix"]]):
            row = slice(sequence, sequence + 1)
            one_k, one_v = (t[row] if block_table is None else _gather_pages(t, block_table[row]) for t in (k, v))
            rows = (q[:, begin : begin + queries], one_k[:, :keys], one_v[:, :keys])
            one_q, one_k, one_v = (t.transpose(1, 2) for t in rows)
            options: dict[str, Any] = {"enable_gqa": q.shape[2] != k.shape[2]}
            if queries == keys:
                options["is_causal"] = True
            elif queries > 1:
                options["attn_mask"] = causal_lower_right(queries, keys)
            out = torch.nn.functional.scaled_dot_product_attention(one_q, one_k, one_v, **options)
            outs.append(out.transpose(1, 2))
            begin += queries
        return torch.cat(outs, 1)

    return attend


def _served_by_varlen(case: Case, num_splits: int | None = None, gathered: bool = False) -> Provider:
    """Returns PyTorch's attention of packed sequences on the cache, dense or in pages.

    With one split of the keys a sequence has the same bits alone and among others. Gathered, the used rows are
    first copied behind each other, in every call and so inside the timing.
    """
    need_cuda("the fused kernel")
    if case["head_dim"] > 256:
        raise Unsupported("the kernel takes 256 features at most")
    try:
        function: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError) as error:
        raise Unsupported("this PyTorch has none") from error
    names = inspect.signature(function).parameters
    needed = [name for name in ("window_size", "enable_gqa") if name not in names]
    if not gathered:
        needed += [name for name in ("seqused_k", "block_table") if name not in names]
    if num_splits is not None and "num_splits" not in names:
        needed.append("num_splits")
    if needed:
        raise Unsupported(f"this PyTorch's varlen_attn has no {' and no '.join(needed)}")
    counts, lengths = zip(*MIXES[case["mix"]])
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": case["key_heads"] != case["heads"]}
    if num_splits is not None:
        options["num_splits"] = num_splits
    # The kernel wants bounds of keys beside a table of pages too, and does not use them then.
    in_rows = not gathered and "page_size" not in case
    bounds = range(0, len(lengths) * case["m"] + 1, case["m"]) if in_rows else [0, *itertools.accumulate(lengths)]
    cu_seqlens_k = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    places = torch.cat([torch.arange(n) for n in lengths]).cuda()
    sequences = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).cuda()

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        block_table: Tensor | None = None,
    ) -> Tensor:
        cache: dict[str, Any] = {}
        if gathered:
            slots = (sequences, places)
            if block_table is not None:
                slots = (block_table[sequences, places // k.shape[1]], places % k.shape[1])
            k, v = k[slots], v[slots]
        else:
            cache = {"seqused_k": seqused_k, "block_table": block_table}
            if block_table is None:
                k, v = k.flatten(0, 1), v.flatten(0, 1)
        try:
            out: Tensor = function(
                q.squeeze(0), k, v, cu_seqlens_q, cu_seqlens_k, max(counts), max(lengths), **cache, **options
            )
        except RuntimeError as error:
            if any(word in str(error).lower() for word in ("page", "paged", "block size", "num_splits")):
                raise Unsupported(f"PyTorch refuses it: {str(error).splitlines()[0]}") from error
            raise
        return out.unsqueeze(0)

    return attend


def _flash_attn_2(case: Case) -> Provider:
    """Returns FlashAttention 2, of the package ``flash_attn``."""
    function = _package("flash_attn", case)
    _need_no_options(case)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, float32_precision: str | None = None
    ) -> Tensor:
        out: Tensor = function(q, k, v, causal=causal)
        return out

    return attend


def _flash_attn_4(deterministic: bool, case: Case) -> Provider:
    """Returns FlashAttention 4, of the package ``flash_attn.cute``."""
    function = _package("flash_attn.cute", case)
    varlen = _package("flash_attn.cute", case, "flash_attn_varlen_func")
    _need_no_options(case, but=("window", "softcap", "sink", "seqused_k", "packing"))
    longest = max(PACKINGS[case["packing"]]) if "packing" in case else None

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        float32_precision: str | None = None,
        window: Sequence[int | None] = (None, None),
        softcap: float = 0.0,
        sink: Tensor | None = None,
        seqused_k: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
    ) -> Tensor:
        if deterministic:
            _need_backward()
        options = {"causal": causal, "window_size": tuple(window), "softcap": softcap, "learnable_sink": sink}
        options["deterministic"] = deterministic
        if cu_seqlens_q is not None:
            rows = (x.squeeze(0) for x in (q, k, v))
            bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_q}
            return _first(varlen(*rows, **bounds, max_seqlen_q=longest, max_seqlen_k=longest, **options))[None]
        if seqused_k is not None:
            return _first(varlen(q, k, v, seqused_k=seqused_k, **options))
        return _first(function(q, k, v, **options))

    return attend


def _first(results: Any) -> Tensor:
    """Returns the output of a function that may return more."""
    out: Tensor = results[0] if isinstance(results, tuple) else results
    return out


def _flash_attn_4_cache(case: Case) -> Provider:
    """Returns FlashAttention 4 on a cache, which it reads where it lies, with as many splits as it chooses."""
    varlen = _package("flash_attn.cute", case, "flash_attn_varlen_func")
    if case["head_dim"] > 256:
        raise Unsupported("on Hopper the kernel takes 256 features at most")
    counts, used = zip(*MIXES[case["mix"]]) if "mix" in case else ((1,), (case["m"],))

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
    ) -> Tensor:
        options: dict[str, Any] = {"seqused_k": seqused_k, "page_table": block_table, "max_seqlen_k": max(used)}
        options |= {"causal": causal, "num_splits": 0}
        if cu_seqlens_q is None:
            return _first(varlen(q, k, v, **options))
        options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max(counts)}
        return _first(varlen(q.squeeze(0), k, v, **options))[None]

    return attend


def _need_backward() -> None:
    """Refuse a call for a provider that differs from another in its backward alone.

    Raises:
        Unsupported: The call keeps nothing for a backward.
    """
    if not torch.is_grad_enabled():
        raise Unsupported("only its backward is another one")


def _cudnn_deterministic(case: Case) -> Provider:
    """Returns CuDNN's deterministic backward, from ``nvidia-cudnn-frontend``: PyTorch does not ask for it."""
    need_cuda("the package")
    _need_no_options(case)
    if case["dtype"] == "float32":
        raise Unsupported("the kernel takes float16 and bfloat16 only")
    try:
        cudnn: Any = importlib.import_module("cudnn")
        handle = cudnn.create_handle()
    except (ImportError, AttributeError) as error:
        raise Unsupported("nvidia-cudnn-frontend is not installed") from error
    options = {
        "attn_scale": case["head_dim"] ** -0.5,
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        "diagonal_band_right_bound": 0 if case["causal"] else None,
    }
    planned: dict[Any, tuple[Any, ...]] = {}

    def plan(operation: str, inputs: Sequence[Tensor], results: Sequence[Tensor], more: dict[str, bool]) -> Any:
        io, precise = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
        if case["dtype"] == "float16":
            io = cudnn.data_type.HALF
        graph = cudnn.pygraph(
            io_data_type=io, intermediate_data_type=precise, compute_data_type=precise, handle=handle
        )
        names = ("q", "k", "v", "o", "dO", "stats")
        given = [graph.tensor_like(x) for x in inputs]
        made = getattr(graph, operation)(**dict(zip(names, given, strict=False)), **options, **more)
        for name, x in zip(made, results, strict=True):
            name.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride()))
            name.set_data_type(precise if x.dtype == torch.float32 else io)
        graph.build([cudnn.heur_mode.A])
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
        return graph, [*given, *made], workspace

    def run(operation: str, inputs: Sequence[Tensor], results: Sequence[Tensor], **more: bool) -> None:
        key = (operation, *(x.stride() for x in inputs))
        if key not in planned:
            planned[key] = plan(operation, inputs, results, more)
        graph, names, workspace = planned[key]
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(dict(zip(names, (*inputs, *results), strict=True)), workspace, handle=handle)

    class CudnnAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.detach().transpose(1, 2) for x in (q, k, v))
            out = torch.empty_like(q)
            stats = torch.empty((*q.shape[:3], 1), dtype=torch.float32, device=q.device)
            run("sdpa", (q, k, v), (out, stats), generate_stats=True)
            ctx.save_for_backward(q, k, v, out, stats)
            return out.transpose(1, 2)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, stats = ctx.saved_tensors
            grads = tuple(torch.empty_like(x) for x in (q, k, v))
            inputs = (q, k, v, out, grad.transpose(1, 2), stats)
            run("sdpa_backward", inputs, grads, use_deterministic_algorithm=True)
            return tuple(x.transpose(1, 2) for x in grads)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, float32_precision: str | None = None
    ) -> Tensor:
        _need_backward()
        out: Tensor = CudnnAttention.apply(q, k, v)
        return out

    return attend


def _package(module: str, case: Case, name: str = "flash_attn_func") -> Callable[..., Any]:
    """Returns a function of a package, its attention.

    Raises:
        Unsupported: It is not installed, or takes no such tensors.
    """
    need_cuda("the package")
    if case["dtype"] == "float32":
        raise Unsupported("the kernel takes float16 and bfloat16 only")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"{module} is not installed") from error
    return function


PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "torch": _plain,
    "torch_compile": lambda case: compile_at_best(_plain(case)),
    "sdpa_cudnn": functools.partial(_sdpa, "CUDNN_ATTENTION"),
    "cudnn_deterministic": _cudnn_deterministic,
    "sdpa_flash": functools.partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa_efficient": functools.partial(_sdpa, "EFFICIENT_ATTENTION"),
    "torch_varlen": _torch_varlen,
    "flex_attention": _flex_attention,
    "flash_attn": _flash_attn_2,
    "flash_attn_4": functools.partial(_flash_attn_4, False),
    "flash_attn_4_deterministic": functools.partial(_flash_attn_4, True),
}
DECODERS: dict[str, Callable[[Case], Provider]] = {
    "torch": lambda case: _decoding(_decode_plain),
    "torch_compile": lambda case: compile_at_best(_decoding(_decode_plain)),
    "sdpa_cudnn": functools.partial(_decode_sdpa, "CUDNN_ATTENTION"),
    "sdpa_flash": functools.partial(_decode_sdpa, "FLASH_ATTENTION"),
    "sdpa_efficient": functools.partial(_decode_sdpa, "EFFICIENT_ATTENTION"),
    "flash_attn_4": _flash_attn_4_cache,
}
"""Peers for one query. For PyTorch's, keys in pages are gathered first: its kernels do not read them in place."""
DECODER_BUDGETS = {"torch": 4.0}
"""Its logits have 16 bits: up to 2.5 times our budget."""
SERVERS: dict[str, Callable[[Case], Provider]] = {
    "torch": _served_by_sequence,
    "torch_varlen": _served_by_varlen,
    "torch_varlen_invariant": functools.partial(_served_by_varlen, num_splits=1),
    "torch_varlen_gathered": functools.partial(_served_by_varlen, gathered=True),
    "flash_attn_4": _flash_attn_4_cache,
}
"""Peers for a server's batch. `torch` and `torch_varlen_gathered` copy the used rows of pages inside the timing."""
BUDGETS = {"sdpa_efficient": 4.0}
"""PyTorch's memory-efficient kernel rounds more than the others: up to 2.5 times our budget in float32."""
