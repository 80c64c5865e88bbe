"""Gated delta rules and short convolutions of transformers' models, by warploom's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

import torch

from warploom import delta_attention, short_convolution
from warploom.errors import ArgumentError, fault

Tensor = torch.Tensor


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns outputs (B, N, H, E), and the last state (B, H, D, E) if it is asked for.

    ``g`` are logarithms of decays, (B, N, H) or (B, N, H, D).
    """
    found = delta_attention(
        query, key, value, beta,
        decay=g, normalize=use_qk_l2norm_in_kernel, initial_state=initial_state, return_state=output_final_state,
        cu_seqlens=cu_seq_lens_q if cu_seqlens is None else cu_seqlens,
    )  # fmt: skip
    return found if isinstance(found, tuple) else (found, None)


def convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Returns the causal convolution (B, C, N) of tokens (B, C, N)."""
    if seq_idx is not None and cu_seq_lens_q is None:
        expected = "None, or with cu_seq_lens_q, which say the same"
        raise fault(ArgumentError, "short_convolution", "seq_idx", expected, f"a tensor {tuple(seq_idx.shape)}")
    own = activation in (None, "silu", "swish")
    out = short_convolution(
        hidden_states.mT, weight, bias=bias, activation="silu" if own and activation else "none",
        initial_state=initial_state, cu_seqlens=cu_seq_lens_q,
    ).mT  # fmt: skip
    if own:
        return out
    from transformers.activations import ACT2FN

    result: Tensor = ACT2FN[activation](out)
    return result


def convolve_step(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Returns the causal convolution (B, C, N) of tokens after a state (B, C, K), which is renewed in place."""
    before = conv_state[..., 1 - weight.shape[-1] :]
    out = convolve(hidden_states, weight, bias, activation, initial_state=before)
    conv_state.copy_(torch.cat((conv_state, hidden_states), -1)[..., -conv_state.shape[-1] :])
    return out


RULES = {
    "torch_chunk_gated_delta_rule": 3,
    "torch_recurrent_gated_delta_rule": 3,
    "chunk_kimi_delta_attention": 4,
    "recurrent_kimi_delta_attention": 4,
}
"""The functions of delta rules in the files of models, and the axes of their decays."""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(RULES, delta_rule),
    "causal_conv1d_fn": convolve,
    "causal_conv1d_update": convolve_step,
}


def patch_delta(model: torch.nn.Module) -> int:
    """Let layers of gated delta rules attend and convolve by warploom.

    These are the layers of Qwen3-Next, Qwen3.5, Kimi Linear, OLMo Hybrid and others, of transformers 5 in the form
    that it has since its functions may come from the hub. Every function that a layer calls is first tested on
    random numbers. Packed sequences are those of ``cu_seq_lens_q``. Works with caches, gradient checkpointing and
    ``torch.compile``. A patched model can be copied and pickled.

    Args:
        model: A model of transformers, or a part of it. Changed in place: its layers get another class.

    Returns:
        The number of layers that are patched.

    Raises:
        ArgumentError: A function computes something else than ours. Nothing has been changed then.

    Source: Yang et al., "Gated Delta Networks", 2024, arXiv 2412.06464; Kimi Team, "Kimi Linear", 2025, arXiv
    2510.26692.

    Example:
        ```python
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        from warploom.integrations.transformers import patch_delta

        config = Qwen3NextConfig(hidden_size=64, num_hidden_layers=4, num_experts=4, vocab_size=64)
        patch_delta(Qwen3NextForCausalLM(config))  # 3: every fourth layer has softmax attention
        ```
    """
    layers = [layer for layer in model.modules() if not is_patched(layer) and _names_of(type(layer)) & {*RULES}]
    kinds: dict[Any, Any] = {kind: _patched(kind) for kind in map(type, layers)}
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    return sum(map(is_patched, model.modules()))


def unpatch_delta(model: torch.nn.Module) -> int:
    """Undo `patch_delta`.

    Args:
        model: A model, or the part that was patched. Changed in place.

    Returns:
        The number of layers that are restored.

    Example:
        ```python
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        from warploom.integrations.transformers import patch_delta, unpatch_delta

        config = Qwen3NextConfig(hidden_size=64, num_hidden_layers=4, num_experts=4, vocab_size=64)
        model = Qwen3NextForCausalLM(config)
        patch_delta(model)
        unpatch_delta(model)  # 3
        ```
    """
    layers = list(filter(is_patched, model.modules()))
    for layer in layers:
        layer.__class__ = type(layer).__mro__[1]
    return len(layers)


def is_patched(layer: torch.nn.Module) -> bool:
    """Returns True if `patch_delta` has patched a layer."""
    return "calls_warploom" in vars(type(layer))


def _names_of(kind: Any) -> set[str]:
    """Returns the functions of ours that the forward of a layer calls by name."""
    forward = inspect.unwrap(kind.forward)
    return {*FUNCTIONS} & {*forward.__code__.co_names} if isinstance(forward, FunctionType) else set()


@functools.cache
def _patched(kind: Any) -> Any:
    """Returns a class like a layer's, whose forward calls our functions."""
    forward = inspect.unwrap(kind.forward)
    ours = {name: FUNCTIONS[name] for name in _names_of(kind)}
    for name, function in ours.items():
        theirs = inspect.unwrap(forward.__globals__[name])
        for one, other in zip(_try(name, theirs), _try(name, function), strict=True):
            if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-3, atol=1e-4):
                expected = f"one whose {name} computes what warploom does"
                raise fault(ArgumentError, "patch_delta", "model", expected, kind.__name__)
    methods = {
        "forward": _with_globals(kind.forward, ours),
        "calls_warploom": True,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce_ex__": lambda self, protocol: (_restore, (kind,), self.__dict__.copy()),
    }
    return type(kind.__name__, (kind,), methods)


def _restore(kind: Any) -> Any:
    """Returns a layer that is patched, without attributes, for copies."""
    patched = _patched(kind)
    return patched.__new__(patched)


def _with_globals(function: Any, ours: dict[str, Any]) -> Any:
    """Returns a function with other globals; of one that wraps another, the innermost has them."""
    inner = getattr(function, "__wrapped__", None)
    cells = function.__closure__
    if inner is None:
        scope = {**function.__globals__, **ours}
        scope.pop("__name__", None)  # by which PyTorch's compiler would find the module's own functions
    else:
        scope, new = function.__globals__, _with_globals(inner, ours)
        cells = tuple(CellType(new) if cell.cell_contents is inner else cell for cell in cells or ())
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, function) if inner is None else functools.wraps(new)(made)


@torch.no_grad()
def _try(name: str, function: Callable[..., Any]) -> Iterator[Tensor]:
    """Yield the results of a function on random numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    if name in RULES:
        q, k, v, decay = (normal(2, 5, 3, 4) for _ in range(4))
        g, beta = -(decay if RULES[name] == 4 else decay[..., 0]).abs(), normal(2, 5, 3).sigmoid()
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        yield from function(q, k, v, g=g, beta=beta, initial_state=normal(2, 3, 4, 4), **options)
        return
    x, weight, state = normal(2, 3, 5), normal(3, 4), normal(2, 3, 4)
    if name == "causal_conv1d_fn":
        yield function(x, weight, None, activation="silu")
    else:
        yield function(x[..., :1], state, weight, None, "silu")
        yield state
