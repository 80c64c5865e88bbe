"""One sequence over several GPUs: context parallelism on `torch.distributed`, with meshes of PyTorch.

Every rank holds a part of a sequence. `shard_sequence` cuts a sequence into parts and `local_position_ids` says
where the tokens of a part stand; `context_parallel_attention` computes on parts what `warploom.flash_attention`
computes on the whole.
"""

from warploom.distributed.attention import context_parallel_attention
from warploom.distributed.layout import local_position_ids, shard_sequence, unshard_sequence

__all__ = [
    "context_parallel_attention",
    "local_position_ids",
    "shard_sequence",
    "unshard_sequence",
]
