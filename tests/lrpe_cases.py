"""What tests of LRPE's gradients share."""

from collections.abc import Callable

import pytest
import torch
from test_lrpe import BATCH, HEADS

from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor

kernels = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

# Gradients multiply once more than the forward does, and that of theta adds many such products.
GRADIENT = 2e-6

# How to lay x out, and its axes from the slowest to the fastest in memory.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "contiguous": (lambda x: x, "BNHD"),
    "heads_first": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "BHND"),
    "tokens_first": (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "NBHD"),
    "features_before_heads": (lambda x: x.mT.contiguous().mT, "BNDH"),
    "every_second_head": (lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2], "BNHD"),
    "every_second_feature": (lambda x: x.repeat_interleave(2, dim=3)[..., ::2], "BNHD"),
    "every_second_token": (lambda x: x.repeat_interleave(2, dim=1)[:, ::2], "BNHD"),
    "misaligned": (lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape), "BNHD"),
    # An expanded axis has no place of its own in memory, but must not come between the features.
    "batch_expanded": (lambda x: x[:1].expand(BATCH, -1, -1, -1), "NHD"),
    "heads_expanded": (lambda x: x[:, :, :1].expand(-1, -1, HEADS, -1), "BND"),
    "heads_first_and_batch_expanded": (
        lambda x: x[:1].transpose(1, 2).contiguous().transpose(1, 2).expand(BATCH, -1, -1, -1),
        "HND",
    ),
}
