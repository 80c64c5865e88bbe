"""What the operators are, and how far gradients may be off where numbers that nearly cancel are subtracted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["function_of", "reference_of", "statistics_of"]

Tensor = torch.Tensor


def function_of(operator: str) -> Callable[..., Any]:
    """The public function."""
    if operator == "rotary_attention":
        from warploom.nn.rotary_attention import rotary_attention

        return rotary_attention
    from warploom.ops import operators

    return operators()[operator].function


def reference_of(operator: str) -> Callable[..., Any]:
    """The definition, of the function's arguments but ``backend``."""
    return _rotary_attention if operator == "rotary_attention" else _registered(operator)


def statistics_of(operator: str) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """For attention with gradients, what gives the output (B, N, H, E) and lse (B, H, N) of the same arguments."""
    return _STATISTICS.get(operator)


def _registered(name: str) -> Callable[..., Any]:
    from warploom.ops import operators

    return operators()[name].reference


def _rotary_attention(
    qkv: Tensor, theta: Tensor, heads: int, scale: float, interleaved: bool = False, return_lse: bool = False
) -> Any:
    key_heads = (qkv.shape[2] - heads) // 2
    qk, v = qkv.split((heads + key_heads, key_heads), 2)
    turned = _registered("lrpe_rotate")(qk, theta, interleaved=interleaved)
    q, k = turned.split((heads, key_heads), 2)
    return _registered("flash_attention")(q, k, v, causal=True, scale=scale, return_lse=return_lse)


def _statistics_of_flash_attention(**given: Any) -> Any:
    return _registered("flash_attention")(**{**given, "return_lse": True})


def _statistics_of_rotary_attention(**given: Any) -> Any:
    return _rotary_attention(**given, return_lse=True)


def _statistics_of_tpa_attention(**given: Any) -> Any:
    scales = {letter: given.pop(f"scale_{letter}", None) for letter in "qkv"}
    cu_seqlens = given.pop("cu_seqlens", None)
    q, k, v = (_product(given, letter, scales[letter]) for letter in "qkv")
    return _registered("flash_attention")(
        q, k, v, causal=given.get("causal", True), scale=given.get("scale"),
        cu_seqlens_q=cu_seqlens, return_lse=True,
    )  # fmt: skip


def _product(given: Mapping[str, Any], letter: str, scale: float | None) -> Tensor:
    """``scale · A B`` of every token; ``B`` where there is no ``A``."""
    a, b = given[f"a{letter}"], given[f"b{letter}"]
    if a is None:
        return b * (1.0 if scale is None else scale)  # type: ignore[no-any-return]
    a = a.unsqueeze(-1) if a.dim() == 3 else a
    b = b.unsqueeze(-2) if b.dim() == 3 else b
    return (a @ b) * (1 / a.shape[-1] if scale is None else scale)  # type: ignore[no-any-return]


_STATISTICS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "flash_attention": _statistics_of_flash_attention,
    "tpa_attention": _statistics_of_tpa_attention,
    "rotary_attention": _statistics_of_rotary_attention,
}
