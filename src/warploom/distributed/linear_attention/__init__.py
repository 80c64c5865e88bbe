"""Linear attention over a sequence that ranks share: states are sent, and not tokens.

Every rank computes the state that its own tokens leave behind, and all of them exchange these and the decays over
their parts, whatever the length. A plain call of linear attention from the state before the part does the rest. In
the backward the gradients of states go the other way.

In reading order: ``api`` validates a call, ``calls`` makes a plain call on a segment of this rank's part,
``states`` exchanges states, ``forward`` and ``backward`` put them together, ``operator`` registers both.
"""

from warploom.distributed.linear_attention.api import context_parallel_linear_attention

__all__ = ["context_parallel_linear_attention"]
