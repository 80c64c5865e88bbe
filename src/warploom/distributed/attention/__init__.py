"""Attention over a sequence that ranks share.

Keys and values are sent to the chunks that see them, those of the first chunk first. Each chunk is then a plain
call of flash attention on a prefix of the keys, or a window of them, with one GPU's results. Nothing is merged.
In the backward keys and values are sent again, so that no rank keeps more than its part. Gradients of every chunk
return to their owners, who add them up in float32 in the order of steps and ranks.

In reading order: ``api`` validates a call, ``plan`` says which rows ranks send and which plain calls each makes,
``exchange`` sends, ``chunks`` makes a plain call, ``operator`` puts forward and backward together.
"""

from warploom.distributed.attention.api import context_parallel_attention

__all__ = ["context_parallel_attention"]
