"""A decoder-only Transformer language model: configuration, model, sampling, files.

Shape letters: ``B`` batch, ``N`` tokens, ``V`` vocabulary. Parameters are float32. For lower precision use
`torch.autocast`, which keeps the residual stream, the norms and the loss in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from warploom import BlockMask
from warploom.errors import ArgumentError, BackendError, DtypeError, ShapeError, WarploomError, fault
from warploom.nn.attention import Attention, Implementation
from warploom.nn.block import Block
from warploom.nn.cache import FactorCache, KVCache, StateCache
from warploom.nn.delta_attention import DeltaAttention
from warploom.nn.linear_attention import LinearAttention
from warploom.nn.paged_cache import PagedKVCache, PageTable
from warploom.nn.positions import LRPE, RotaryEmbedding
from warploom.nn.tensor_product_attention import TensorProductAttention
from warploom.ops.linear_attention.validation import Encoding
from warploom.runtime.arguments import as_python, check_choice, check_number, check_tensor, is_int
from warploom.runtime.names import name_arguments
from warploom.runtime.values import check_tokens

Tensor = torch.Tensor
Cache = KVCache | FactorCache | StateCache
"""The cache of a layer."""

SIZES = {
    "sm": {"d_model": 768, "d_ff": 3072, "layers": 12, "heads": 12},
    "md": {"d_model": 1024, "d_ff": 4096, "layers": 24, "heads": 16},
    "lg": {"d_model": 1280, "d_ff": 5120, "layers": 36, "heads": 20},
    "xl": {"d_model": 1600, "d_ff": 6400, "layers": 48, "heads": 25},
    "2.7B": {"d_model": 2560, "d_ff": 10240, "layers": 32, "heads": 32},
}
COUNTS = ("vocab_size", "context_length", "d_model", "d_ff", "layers", "heads", "rank_q", "rank_k", "rank_v")
AttentionName = Literal[Implementation, "tpa", "linear", "delta"]
FACTORS = tuple(f"attention.{factor}.weight" for factor in ("aq", "bq", "ak", "bk", "av", "bv"))
IGNORED = -100
"""The target of a token that takes no part in the loss."""
FORMAT = "warploom.TransformerLM"


# ----------------------------------------------------------------------------------------------------------
# Configuration
# ----------------------------------------------------------------------------------------------------------


@name_arguments
@dataclass(frozen=True)
class TransformerConfig:
    """The configuration of a `TransformerLM`. ``TransformerConfig.size("sm")`` is one of the published sizes.

    Raises:
        ArgumentError: A number is not positive, sizes do not divide each other, or an option is unknown.

    Example:
        ```python
        from warploom.nn import TransformerConfig

        config = TransformerConfig.size("sm", attention="linear", context_length=1024)
        print(config.head_dim)  # 64
        ```
    """

    vocab_size: int = 10_000
    context_length: int = 512
    """The most tokens in a sequence."""
    d_model: int = 768
    d_ff: int = 3072
    """Inner features of SwiGLU, which has three matrices ``d_model × d_ff``."""
    layers: int = 12
    heads: int = 12
    kv_heads: int | None = None
    """Heads of keys and values; as many as ``heads`` by default."""
    position: Encoding = "rotate"
    """``rotate`` (RoPE), ``cosine`` (LRPE, frequencies per head) or ``none``."""
    base: float = 10_000.0
    """Frequencies are ``base ** (-f / F)``."""
    learnable_positions: bool = False
    """True if the frequencies are learned."""
    attention: AttentionName | tuple[AttentionName, ...] = "flash"
    """``flash``, ``sdpa`` or ``plain``, three implementations of softmax attention; ``tpa``, tensor-product
    attention; ``linear``, linear attention, with LRPE and frequencies per head; ``delta``, Gated DeltaNet. Several
    of them are the layers' from the first on, over and over: ``("delta", "delta", "delta", "flash")``."""
    rank_q: int = 6
    """Rank of the queries of tensor-product attention."""
    rank_k: int = 2
    rank_v: int = 2
    tie: bool = False
    """True if the head is the transpose of the embedding."""
    norm_eps: float = 1e-5
    checkpoint: bool = False
    """Keep only each block's input for the backward, and compute the block again there."""

    @classmethod
    def size(cls, name: str, **changes: Any) -> TransformerConfig:
        """Returns one of the published sizes ``sm``, ``md``, ``lg``, ``xl``, ``2.7B``, with other fields changed.

        Raises:
            ArgumentError: There is no such size, or a change is not valid.
        """
        check_choice("TransformerConfig.size", "name", name, tuple(SIZES))
        return cls(**{**SIZES[name], **changes})

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # numbers of numpy's too: a file has Python's
            object.__setattr__(self, name, as_python(value))
        for field in COUNTS:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise fault(ArgumentError, "TransformerConfig", field, "a positive int", repr(value))
        for field in ("base", "norm_eps"):
            check_number("TransformerConfig", field, getattr(self, field))
        given: object = self.attention
        if isinstance(given, list):  # from a file
            object.__setattr__(self, "attention", tuple(given))
        kinds = self.attention if isinstance(self.attention, tuple) else (self.attention,)
        if not kinds or self.layers % len(kinds):
            expected = f"one name, or several whose number divides layers = {self.layers}"
            raise fault(ArgumentError, "TransformerConfig", "attention", expected, repr(self.attention))
        check_choice("TransformerConfig", "position", self.position, get_args(Encoding))
        for kind in kinds:
            check_choice("TransformerConfig", "attention", kind, get_args(AttentionName))
        if self.d_model % self.heads:
            raise fault(
                ArgumentError, "TransformerConfig", "heads", f"a divisor of d_model = {self.d_model}", self.heads
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            expected = f"a divisor of heads = {self.heads}"
            raise fault(ArgumentError, "TransformerConfig", "kv_heads", expected, self.kv_heads)
        if "tpa" in kinds:  # which has its own keys and values, and turns their factors
            for field, only in (("position", "rotate"), ("kv_heads", None), ("learnable_positions", False)):
                if getattr(self, field) != only:
                    expected = f"{only!r} with attention 'tpa'"
                    raise fault(ArgumentError, "TransformerConfig", field, expected, repr(getattr(self, field)))
        if self.kv_heads is not None and not {*kinds} & {*get_args(Implementation)}:
            expected = f"None with attention {kinds[0]!r}"
            raise fault(ArgumentError, "TransformerConfig", "kv_heads", expected, repr(self.kv_heads))
        if "delta" in kinds and self.position == "cosine":
            expected = "'rotate' or 'none' with attention 'delta'"
            raise fault(ArgumentError, "TransformerConfig", "position", expected, repr(self.position))
        if self.position == "rotate" and self.head_dim % 2:
            expected = f"such that d_model / heads is even for position 'rotate' (d_model = {self.d_model})"
            raise fault(ArgumentError, "TransformerConfig", "heads", expected, self.heads)

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.d_model // self.heads

    @property
    def kinds(self) -> tuple[AttentionName, ...]:
        """Attention of each layer."""
        given = self.attention if isinstance(self.attention, tuple) else (self.attention,)
        return given * (self.layers // len(given))


# ----------------------------------------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------------------------------------


class Output(NamedTuple):
    """The output of a `TransformerLM`.

    Example:
        ```python
        import torch
        from warploom.nn import TransformerConfig, TransformerLM

        config = TransformerConfig(vocab_size=64, context_length=32, d_model=32, d_ff=64, layers=1, heads=2)
        logits, loss = TransformerLM(config)(torch.randint(64, (2, 8)))
        print(logits.shape, loss)  # torch.Size([2, 8, 64]) None
        ```
    """

    logits: Tensor
    """``(B, N, V)``."""
    loss: Tensor | None
    """``()`` float32: mean cross-entropy in nats per token, where there are targets."""


def _block(config: TransformerConfig, index: int) -> Block:
    return Block(config.d_model, config.d_ff, _attention(config, index), norm_eps=config.norm_eps)


def _attention(config: TransformerConfig, index: int) -> nn.Module:
    kind = config.kinds[index]
    if kind == "tpa":
        return TensorProductAttention(
            config.d_model,
            config.heads,
            rank_q=config.rank_q,
            rank_k=config.rank_k,
            rank_v=config.rank_v,
            causal=True,
            base=config.base,
        )
    if kind == "delta":
        return DeltaAttention(
            config.d_model,
            config.heads,
            position="none" if config.position == "none" else "rotate",
            base=config.base,
            learnable=config.learnable_positions,
            norm_eps=config.norm_eps,
        )
    if kind == "linear":
        return LinearAttention(
            config.d_model,
            config.heads,
            position=config.position,
            base=config.base,
            learnable=config.learnable_positions,
            layer=index,
            layers=config.layers,
            norm_eps=config.norm_eps,
        )
    return Attention(
        config.d_model,
        config.heads,
        kv_heads=config.kv_heads,
        position=_position(config),
        causal=True,
        implementation=kind,
    )


def _position(config: TransformerConfig) -> RotaryEmbedding | LRPE | None:
    if config.position == "rotate":
        return RotaryEmbedding(config.head_dim, base=config.base, learnable=config.learnable_positions)
    if config.position == "cosine":
        rows = config.kv_heads or config.heads
        return LRPE(rows, config.head_dim, kind="cosine", base=config.base, learnable=config.learnable_positions)
    return None


@name_arguments
class TransformerLM(nn.Module):
    """Decoder-only language model: embedding, pre-norm blocks of attention and SwiGLU, a last norm, a linear head.

    Args:
        config: Its sizes and options.

    Shapes: tokens ``(B, N)`` to logits ``(B, N, V)``.

    Sources: Vaswani et al., 2017, arXiv 1706.03762; pre-RMSNorm, Zhang and Sennrich, 2019, arXiv 1910.07467; rotary
    positions, Su et al., 2021, arXiv 2104.09864; SwiGLU, Shazeer, 2020, arXiv 2002.05202.

    Example:
        ```python
        import torch
        from warploom.nn import TransformerConfig, TransformerLM

        config = TransformerConfig(vocab_size=64, context_length=32, d_model=32, d_ff=64, layers=1, heads=2)
        model = TransformerLM(config)
        tokens = torch.randint(64, (2, 17))
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        continued = model.generate(tokens[:, :8], 4, temperature=0.7)  # (2, 4), the new tokens alone
        ```
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if not isinstance(config, TransformerConfig):
            raise fault(DtypeError, "TransformerLM", "config", "a TransformerConfig", type(config).__name__)
        self.config = config
        self.over_ranks = False  # set by `warploom.distributed.shard_context`
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(_block(config, index) for index in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie:
            self.head.weight = self.embedding.weight
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Draw normal weights of deviation 0.02, smaller for matrices that add to the residual stream.

        Each of the ``2 · layers`` additions then contributes equally, and their sum does not grow with depth
        (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3). The factors of
        tensor-product attention are multiplied with each other, and keep the weights that the layer draws, as do
        convolutions.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not name.endswith(("theta", "convolution", *FACTORS)):
                adds = name.endswith(("attention.out.weight", "mlp.down.weight"))
                deviation = 0.02 / (2 * self.config.layers) ** 0.5 if adds else 0.02
                nn.init.normal_(parameter, std=deviation)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        cache: Sequence[Cache | PagedKVCache] | None = None,
        mask: BlockMask | Tensor | None = None,
        bias: Tensor | None = None,
        alibi: Tensor | None = None,
    ) -> Output:
        """Predict the token after each token.

        Args:
            tokens: ``(B, N)`` int64 or int32 below ``vocab_size``, ``1 ≤ N ≤ context_length``. On a GPU values are
                checked on request alone, see `warploom.check_values`.
            targets: ``(B, N)`` int64, the next tokens. Those of ``-100`` are left out of the loss.
            position_ids: ``(N,)`` or ``(B, N)``, positions of the tokens, as in `Attention`; counted from 0 by
                default. Over ranks (`warploom.distributed.shard_context`) they are those of softmax attention,
                beside which linear and delta rule attention count tokens of all ranks.
            cache: A cache of `make_cache`. The tokens follow those in it, and are added. Needs ``torch.no_grad()``.
                Or one of `make_paged_cache`, with ``B = 1`` and the packed tokens of its table's step.
            mask: The earlier tokens that each token sees, in all layers: what `warploom.block_mask` makes, or a
                boolean tensor ``(B or 1, heads or 1, N, M)``, see `Attention`. For documents in one sequence, or
                the tree of tokens that another model proposes.
            bias: ``(B or 1, heads or 1, N or 1, M)``, added to the logits of all layers.
            alibi: ``(heads,)`` or ``(B, heads)``, slopes in all layers. `generate` has none of these three.

        Returns:
            `Output`: the logits ``(B, N, V)``, and the loss where targets are given.

        Raises:
            ShapeError: Tokens or targets have the wrong shape.
            DtypeError: Tokens or targets are not integers.
            ArgumentError: There are more tokens than ``context_length``, one is not in the vocabulary, or the cache
                has another number of layers; or there is a mask, a bias or slopes, and a layer that is not of
                attention ``flash``.
        """
        self._check(tokens, targets, cache)
        hiding = {"mask": mask, "bias": bias, "alibi": alibi}
        hiding = {name: value for name, value in hiding.items() if value is not None}
        kinds, softmax = {*self.config.kinds}, {*get_args(Implementation)}
        if hiding and kinds != {"flash"}:
            expected, argument = f"None with attention {self.config.attention!r}", next(iter(hiding))
            raise fault(ArgumentError, type(self).__name__, argument, expected, "a value")
        if position_ids is not None and not (kinds & softmax if self.over_ranks else kinds <= softmax):
            expected = f"None with attention {self.config.attention!r}, which counts tokens"
            raise fault(ArgumentError, type(self).__name__, "position_ids", expected, "a tensor")
        logits = self.head(self.hidden(tokens, cache, position_ids, **hiding))
        if targets is None:
            return Output(logits, None)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return Output(logits, loss)

    def hidden(
        self,
        tokens: Tensor,
        cache: Sequence[Cache | PagedKVCache] | None = None,
        position_ids: Tensor | None = None,
        **hiding: Any,
    ) -> Tensor:
        """Returns the features before the head, (B, N, d_model), of tokens (B, N), with options of `forward`."""
        x = self.embedding(tokens)
        again = self.config.checkpoint and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            given = position_ids
            if self.over_ranks and isinstance(block.attention, LinearAttention | DeltaAttention):
                given = None
            if again:
                options = {"use_reentrant": False, "preserve_rng_state": False, **hiding}  # nothing is random
                x = checkpoint(block, x, None, given, **options)
            else:
                x = block(x, None if cache is None else cache[index], given, **hiding)
        out: Tensor = self.norm(x)
        return out

    def _check(self, tokens: Tensor, targets: Tensor | None, cache: Sequence[Cache | PagedKVCache] | None) -> None:
        name = type(self).__name__
        for argument, tensor in (("tokens", tokens), ("targets", targets)):
            if tensor is not None:
                check_tensor(name, argument, tensor, (torch.int64, torch.int32))
        if tokens.dim() != 2 or 0 in tokens.shape:
            raise fault(ShapeError, name, "tokens", "(B, N) with B ≥ 1 and N ≥ 1", tuple(tokens.shape))
        if targets is not None and targets.shape != tokens.shape:
            raise fault(ShapeError, name, "targets", f"as tokens, {tuple(tokens.shape)}", tuple(targets.shape))
        check_tokens(name, "tokens", tokens, self.config.vocab_size)
        check_tokens(name, "targets", targets, self.config.vocab_size, IGNORED)
        if cache is not None and len(cache) != len(self.blocks):
            raise fault(ArgumentError, name, "cache", f"of {len(self.blocks)} layers (make_cache)", len(cache))
        first = cache[0] if cache else None
        if isinstance(first, PagedKVCache):
            length = first.longest  # with the new tokens
        else:
            length = tokens.shape[1] + (first.length if first is not None else 0)
        if length > self.config.context_length:
            expected = f"at most context_length = {self.config.context_length} with what the cache holds"
            raise fault(ArgumentError, name, "the number of tokens", expected, length)

    # ------------------------------------------------------------------------------------------------------
    # Sampling
    # ------------------------------------------------------------------------------------------------------

    def make_cache(self, capacity: int | None = None) -> list[Cache]:
        """Returns an empty cache for each layer: a `KVCache`, `FactorCache` or `StateCache`.

        Memory for ``capacity`` tokens is allocated at once, and no more fit; by default it grows with the tokens.
        A state of linear attention or of the delta rule has the same size for any number of tokens.
        """
        kinds: dict[str, Callable[[], Cache]] = {
            "linear": StateCache, "delta": StateCache, "tpa": functools.partial(FactorCache, capacity)
        }  # fmt: skip
        return [kinds.get(kind, functools.partial(KVCache, capacity))() for kind in self.config.kinds]

    def make_paged_cache(self, table: PageTable) -> list[PagedKVCache]:
        """Returns an empty paged cache for each layer, which share a table of pages.

        The model is then called with the packed tokens ``(1, N)`` of the table's step.

        Raises:
            ArgumentError: The model's attention has no keys and values of softmax attention by the kernels.
        """
        if {*self.config.kinds} != {"flash"}:
            raise fault(ArgumentError, type(self).__name__, "attention", "'flash'", repr(self.config.attention))
        return [PagedKVCache(table) for _ in self.blocks]

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        stop: int | Sequence[int] = (),
        lengths: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Sample the tokens after a prompt, one at a time, with a cache.

        Args:
            prompt: ``(B, N)`` integers.
            max_new_tokens: The number of tokens to sample at most.
            temperature: Divides the logits. With 0 the most likely token is taken.
            top_k: Sample among so many most likely tokens; all by default.
            top_p: Sample among the most likely tokens that together have at least this probability.
            stop: Tokens that end a sequence, which then repeats the one that ended it. Sampling ends with the last
                sequence; each step waits for the device to know.
            lengths: Tokens of each prompt, if they differ. The rest of ``prompt`` is padding, with any token.
            generator: Source of randomness on the model's device; the default generator if None.

        Returns:
            ``(B, T)`` with ``T ≤ max_new_tokens``: the new tokens only, in the prompt's dtype.

        Raises:
            ArgumentError: An option is out of range, or prompt and new tokens exceed ``context_length``.
            ShapeError: The prompt is not ``(B, N)``, or the number of lengths is not ``B``.
            DtypeError: The prompt does not consist of integers, or an option has the wrong type.
        """
        tokens = self.stream(
            prompt, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop, lengths=lengths,
            generator=generator,
        )  # fmt: skip
        return torch.cat([prompt[:, :0], *(token[:, None] for token in tokens)], dim=1)

    def stream(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        stop: int | Sequence[int] = (),
        lengths: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Sample as `generate` does, with its arguments and errors, and yield the tokens ``(B,)`` of each step.

        Example:
            ```python
            import torch
            from warploom.nn import TransformerConfig, TransformerLM

            config = TransformerConfig(vocab_size=64, context_length=32, d_model=32, d_ff=64, layers=1, heads=2)
            for tokens in TransformerLM(config).stream(torch.tensor([[1, 2, 3]]), 8, top_k=5, stop=0):
                print(tokens.item())
            ```
        """
        name = f"{type(self).__name__}.generate"
        check_tensor(name, "prompt", prompt, (torch.int64, torch.int32))
        self._check(prompt, None, None)
        batch, longest = prompt.shape
        lengths = [longest] * batch if lengths is None else list(lengths)
        ends = as_python(tuple(stop) if isinstance(stop, Sequence) else (stop,))
        given = [("max_new_tokens", max_new_tokens), *(("stop", token) for token in ends)]
        given += [] if top_k is None else [("top_k", top_k)]
        for argument, number in given:
            if not is_int(as_python(number)):
                raise fault(DtypeError, name, argument, "an int", repr(number))
        check_number(name, "temperature", as_python(temperature))
        check_number(name, "top_p", as_python(top_p))
        room, vocabulary = self.config.context_length - longest, self.config.vocab_size
        checks = {
            "max_new_tokens": (
                0 <= max_new_tokens <= room,
                f"between 0 and context_length − N = {room}",
                max_new_tokens,
            ),
            "temperature": (temperature >= 0, "at least 0", temperature),
            "top_k": (top_k is None or top_k >= 1, "at least 1, or None for all", top_k),
            "top_p": (0 < top_p <= 1, "above 0, at most 1", top_p),
            "stop": (
                all(0 <= x < vocabulary for x in ends),
                f"of tokens ≥ 0 and below vocab_size = {vocabulary}",
                ends,
            ),
            "lengths": (all(1 <= n <= longest for n in lengths), f"between 1 and N = {longest}", lengths),
        }
        for argument, (fits, expected, got) in checks.items():
            if not fits:
                raise fault(ArgumentError, name, argument, expected, got)
        if len(lengths) != batch:
            raise fault(ShapeError, name, "lengths", f"one for each of {batch} prompts", len(lengths))
        sample = functools.partial(_sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        return self._stream(prompt, max_new_tokens, sample, ends, lengths) if max_new_tokens else iter(())

    @torch.no_grad()
    def _stream(
        self,
        prompt: Tensor,
        new: int,
        sample: Callable[[Tensor], Tensor],
        ends: tuple[int, ...],
        lengths: list[int],
    ) -> Iterator[Tensor]:
        """Yields tokens (B,), of checked arguments."""
        cache = self.make_cache(prompt.shape[1] + new)
        hidden = self.hidden(prompt, cache)
        for layer in cache:
            layer.truncate(lengths)
        last = torch.tensor(lengths).to(prompt.device, non_blocking=True) - 1
        x = hidden[torch.arange(prompt.shape[0], device=prompt.device), last]  # (B, d_model)
        tokens = sample(self.head(x))[:, 0].to(prompt.dtype)
        yield tokens
        stop = torch.tensor(ends, dtype=prompt.dtype, device=prompt.device)
        for _ in range(new - 1):
            ended = torch.isin(tokens, stop)
            if ends and bool(ended.all()):
                return
            x = self.hidden(tokens[:, None], cache)[:, -1]
            tokens = torch.where(ended, tokens, sample(self.head(x))[:, 0].to(prompt.dtype))
            yield tokens

    def extra_repr(self) -> str:
        """Returns the configuration."""
        return repr(self.config)

    # ------------------------------------------------------------------------------------------------------
    # Files
    # ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write weights and configuration to one safetensors file.

        Raises:
            BackendError: safetensors is not installed.
        """
        weights = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        if self.config.tie:
            del weights["head.weight"]  # the embedding's; safetensors stores no tensor twice
        metadata = {"format": FORMAT, "config": json.dumps(dataclasses.asdict(self.config))}
        _safetensors("save").save_file(weights, path, metadata)

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device | str = "cpu", **changes: Any) -> TransformerLM:
        """Read a model that `save` has written.

        Args:
            path: The file.
            device: The device of the model.
            changes: Fields of the configuration to change, such as ``attention="sdpa"``.

        Raises:
            WarploomError: The file is of another kind, or its weights do not fit its configuration.
            BackendError: safetensors is not installed.
        """
        _safetensors("load")
        from safetensors import safe_open

        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise WarploomError(f"{path}: not a file that TransformerLM.save has written")
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        try:
            config = TransformerConfig(**{**json.loads(metadata["config"]), **changes})
        except TypeError as error:  # a field of another version, or of none
            raise WarploomError(f"{path}: {error}") from error
        with torch.device(device):
            model = cls(config)
        if config.tie:
            weights["head.weight"] = weights["embedding.weight"]
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise WarploomError(f"{path}: {error}") from error
        return model

    # ------------------------------------------------------------------------------------------------------
    # Counts
    # ------------------------------------------------------------------------------------------------------

    def parameter_count(self) -> int:
        """Returns the number of learned parameters; those of a tied head count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, length: int | None = None, *, training: bool = False) -> float:
        """Returns the operations for one token, as a mean over a sequence. A multiply-add counts as two.

        Counted are the matrix products of the layers, attention over the ``(length + 1) / 2`` keys that a token
        sees on average, or the state of linear attention and of the delta rule, and the products of factors. Norms,
        activations, convolutions, positions and the softmax are not counted.

        Args:
            length: Tokens of the sequence; ``context_length`` by default.
            training: True to add the backward, which costs twice the forward.
        """
        length = self.config.context_length if length is None else length
        products = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        config = self.config
        features = (3 if config.position == "cosine" else 2) * config.head_dim  # of a key and a value
        softmax = features * (length + 1) / 2
        attended = {
            # A state of φ's features by those of a value, added to and read, and of the delta rule corrected.
            "linear": 2 * (features - config.head_dim) * config.head_dim,
            "delta": 3 * config.head_dim**2,
            "tpa": softmax + (config.rank_q + config.rank_k + config.rank_v) * config.head_dim,
        }
        flops = 2 * products + 2 * config.heads * sum(attended.get(kind, softmax) for kind in config.kinds)
        return 3 * flops if training else flops


def _sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample one token (B, 1) int64 from each row of logits (B, V)."""
    if temperature < torch.finfo(torch.float32).tiny:  # zero, and what a GPU takes for zero
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float()
    probabilities = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    if top_p < 1 or top_k is not None:
        ordered, index = probabilities.sort(dim=-1, descending=True)
        if top_k is not None:
            ordered[:, top_k:] = 0.0
        before = ordered.cumsum(dim=-1) - ordered  # of more likely tokens; 0 for the first, so that it is kept
        probabilities = torch.zeros_like(ordered).scatter(-1, index, ordered.masked_fill(before >= top_p, 0.0))
    return torch.multinomial(probabilities, 1, generator=generator)  # needs no sum of one


def _safetensors(what: str) -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        hint = "safetensors is not installed: pip install 'warploom[lm]'"
        raise BackendError(f"TransformerLM.{what}: {hint}") from error
    return safetensors.torch
