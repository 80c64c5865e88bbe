"""Which tensors there can be descriptors of."""

import random
from typing import Any

import pytest
import torch
from launches import driver_accepts

from warploom.runtime.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)


from warploom.runtime.descriptors import DescriptorTemplate, encode_strides
from warploom.runtime.launch import TmaTile, supports_tma

pytestmark = pytest.mark.stack


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 9, 3, 64), (1728, 192, 64, 1), (1728, 192, 64, 1)),
        ((1, 1, 1, 36), (108, 108, 36, 1), (16, 16, 16, 1)),  # what is never taken may be anything
        ((1, 5, 1, 64), (1, 64, 0, 1), (16, 64, 16, 1)),
        ((1, 1, 1, 1), (1, 1, 1, 1), (16, 16, 16, 1)),
        ((1, 1, 1, 1), (3, 3, 3, 3), (16, 16, 16, 1)),
        ((2, 9, 1), (9, 1, 9), None),  # keys are adjacent, and are no features
        ((2, 9, 1), (72, 8, 5), (72, 8, 1)),
        ((2, 9, 8), (72, 8, 2), None),
        ((2, 9, 8), (72, 12, 1), None),  # 24 bytes
        ((2, 9, 8), (0, 8, 1), None),
        ((2, 9, 8), (2**39, 8, 1), None),
        ((2, 9, 8), (2**39 - 8, 8, 1), (2**39 - 8, 8, 1)),
        ((1, 9, 8), (2**39, 8, 1), (16, 8, 1)),
        ((2, 0, 8), (8, 8, 1), None),
        ((2, 2**32 + 1, 8), (8, 8, 1), None),
    ],
)
def test_strides_that_a_descriptor_holds(shape: Any, strides: Any, expected: Any) -> None:
    assert encode_strides(shape, strides, 2) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_driver_accepts_every_descriptor_that_there_can_be(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    verdicts = {True: 0, False: 0}
    for _ in range(4000):
        shape = [draw.choice((1, 1, 2, 5, 64)) for _ in range(4)]
        *outer, last = (draw.choice((1, 3, 4, 8, 24, 64, 4096, 2**37, 2**38, 2**39)) for _ in range(4))
        strides = [*outer, draw.choice((1, 1, 1, last))]
        x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        order = [*draw.sample(range(3), 3), 3]
        boxes = TmaTile(x, tuple(order), (1, 1, 64, 64))
        taken = encode_strides(shape, strides, x.element_size()) is not None
        verdicts[taken] += 1
        if taken:
            description = DescriptorTemplate(boxes).fields
            assert driver_accepts(description), description
            for size, stride, axis in zip(description["shape"], description["strides"], order):
                assert size == x.shape[axis]
                assert size == 1 or stride == x.stride(axis)
        else:
            with pytest.raises(ValueError, match="no descriptor"):
                DescriptorTemplate(boxes)
            apart = x.shape[-1] > 1 and x.stride(-1) != 1
            honest = [stride if size > 1 else 16 for size, stride in zip(shape, strides)]
            description = {"base": x, "shape": shape, "strides": [*honest[:3], 1], "block_shape": [1, 1, 64, 64]}
            assert apart or not driver_accepts(description), description
    assert min(verdicts.values()) > 400


def test_an_entry_is_copied_where_its_batch_is() -> None:
    """Other kernels give other bits."""
    for distance in (0, 9 * 64, 9 * 64 + 1, 9 * 64 + 4, 9 * 64 + 8):
        batch = torch.empty_strided((3, 9, 64), (distance, 64, 1), dtype=torch.bfloat16, device="meta")
        for entry in (batch, batch[:1], batch[1:2]):
            assert supports_tma(entry) == (distance > 0 and distance % 8 == 0)
