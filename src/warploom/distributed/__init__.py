"""One sequence over several GPUs: context parallelism on `torch.distributed`, with meshes of PyTorch.

Every rank holds a part of a sequence. `shard_sequence` cuts a sequence into parts and `local_position_ids` says
where the tokens of a part stand; `context_parallel_attention` and `context_parallel_linear_attention` compute on
parts what `warploom.flash_attention` and `warploom.linear_attention` compute on the whole.
"""

from warploom.distributed.attention import context_parallel_attention
from warploom.distributed.layout import local_position_ids, shard_sequence, unshard_sequence
from warploom.distributed.linear_attention import context_parallel_linear_attention

__all__ = [
    "context_parallel_attention",
    "context_parallel_linear_attention",
    "local_position_ids",
    "shard_sequence",
    "unshard_sequence",
]
