"""Delta rule attention over a sequence that ranks share: what parts make of a state is sent, and not tokens.

The state behind a part is ``M S + U`` of the state ``S`` before it, with a matrix ``M`` of D × D for each head. A
rank computes ``[U | M]`` by one call with values ``[V | 0]`` from the state ``[0 | 1]``, all ranks gather these,
and a plain call from the state before the part does the rest. In the backward the gradient of the state before a
part is ``Mᵀ dS'``, of that behind it, and what its own outputs add: again one gather.

Where a sequence begins on a rank no ``M`` is needed, and the call that makes the outputs gives ``U`` as well. So
with two ranks every token is computed once, as if the first handed the state on. From three ranks on, ranks that
hand it on would wait for each other: the scans over chunks, which take two fifths of the time, would follow one
another. Here all ranks in the middle make their maps at once, and then their outputs at once.

In reading order: ``api`` validates a call, ``calls`` makes a plain call on a segment of this rank's part, ``maps``
makes and exchanges what parts do with states, ``forward_backward`` puts them together, ``operator`` registers both.
"""

from warploom.distributed.delta_attention.api import context_parallel_delta_attention

__all__ = ["context_parallel_delta_attention"]
