"""One sequence over several GPUs: context parallelism on `torch.distributed`, with meshes of PyTorch.

Every rank holds a part of a sequence. `shard_sequence` cuts a sequence into parts and `local_position_ids` says
where the tokens of a part stand; `context_parallel_attention`, `context_parallel_linear_attention`,
`context_parallel_delta_attention` and `context_parallel_short_convolution` compute on parts what the functions of
`warploom` without a prefix compute on the whole. `shard_context` puts them into a model, and `shard_matrices`
shards its matrices. Tensors that are sharded over batch entries or heads need nothing of this: operators take a
`torch.distributed.tensor.DTensor` as they take a tensor.
"""

from warploom.distributed.attention import context_parallel_attention
from warploom.distributed.delta_attention import context_parallel_delta_attention
from warploom.distributed.linear_attention import context_parallel_linear_attention
from warploom.distributed.parallel import shard_context, shard_matrices
from warploom.distributed.sequence import local_position_ids, shard_sequence, unshard_sequence
from warploom.distributed.short_convolution import context_parallel_short_convolution

__all__ = [
    "context_parallel_attention",
    "context_parallel_delta_attention",
    "context_parallel_linear_attention",
    "context_parallel_short_convolution",
    "local_position_ids",
    "shard_context",
    "shard_matrices",
    "shard_sequence",
    "unshard_sequence",
]
