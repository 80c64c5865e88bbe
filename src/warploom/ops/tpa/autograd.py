"""Tensor-product attention as PyTorch operators: ``torch.ops.warploom.tpa_attention``, its backward, ``tpa_decode``."""

from __future__ import annotations

import torch

from warploom.layout import empty_in_order_of
from warploom.ops.tpa import launchers

Tensor = torch.Tensor

_FACTORS = "Tensor? aq, Tensor ak, Tensor av, Tensor bq, Tensor bk, Tensor bv"
_SCALES = "float scale, float scale_q, float scale_k, float scale_v"
_library = torch.library.Library("warploom", "FRAGMENT")
_library.define(f"tpa_decode({_FACTORS}, Tensor? cache_seqlens, str strategy, {_SCALES}) -> Tensor")


def _decode_fake(aq: Tensor | None, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor, *rest: object) -> Tensor:
    return empty_in_order_of(bq if aq is None else aq, bv.shape[-1])


for _device in ("CUDA", "CPU"):  # on a CPU the kernels run in Triton's interpreter
    _library.impl("tpa_decode", launchers.decode, _device)
torch.library.register_fake("warploom::tpa_decode", _decode_fake, lib=_library)


def decode(
    aq: Tensor | None, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor,
    cache_seqlens: Tensor | None, strategy: str, scale: float, scale_q: float, scale_k: float, scale_v: float,
) -> Tensor:  # fmt: skip
    """Run decoding on the Triton kernels by the shortest way that this call allows."""
    arguments = (aq, ak, av, bq, bk, bv, cache_seqlens, strategy, scale, scale_q, scale_k, scale_v)
    if is_plain_eager(aq, ak, av, bq, bk, bv):
        return launchers.decode(*arguments)
    return torch.ops.warploom.tpa_decode(*arguments)  # type: ignore[no-any-return]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Whether nothing watches this call: no compiler, no tensor subclass, no mode, no transform."""
    return (
        not torch.compiler.is_compiling()
        and all(t is None or (type(t) in _PLAIN and not t.is_meta) for t in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )
