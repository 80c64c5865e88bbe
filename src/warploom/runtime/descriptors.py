"""Tensor descriptors, with which kernels copy whole tiles through the tensor memory accelerator, from Hopper on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warploom.runtime.build import ALIGNMENT, TYPE_NAMES

_MOST_BYTES = 2**40  # a stride in a tensor descriptor is shorter
_MOST_SIZE = 2**32  # of an axis in one


class TmaTile(NamedTuple):
    """How a kernel copies tiles of a tensor.

    The caller sees to it that there can be descriptors of tensors ``like`` it: `supports_tma`, and addresses of a
    multiple of 16 bytes.
    """

    like: torch.Tensor
    order: tuple[int, ...]  # of the tensor's axes
    tile: tuple[int, ...]  # its sizes along them


class DescriptorTemplate:
    """What tensor descriptors say of every tensor like that of `TmaTile`."""

    __slots__ = ("fields", "shape", "strides", "type")

    def __init__(self, boxes: TmaTile) -> None:
        import triton.language as tl
        from triton.experimental.gluon.language import NVMMASharedLayout

        like, order, tile = boxes.like, boxes.order, list(boxes.tile)
        shape = [like.shape[axis] for axis in order]
        strides = encode_strides(shape, [like.stride(axis) for axis in order], like.element_size())
        if strides is None:
            raise ValueError(
                f"there can be no descriptor of a tensor {tuple(like.shape)} of strides {like.stride()}"
            )
        kind = TYPE_NAMES[like.dtype]
        layout = NVMMASharedLayout.get_default_for(tile, tl.dtype(kind))
        self.shape, self.strides = shape, list(strides)
        self.type = f"tensordesc<{kind}{tile},{layout!r}>"
        self.fields = {
            "base": like.new_empty(0, device="meta"), "shape": shape, "strides": self.strides, "block_shape": tile,
            "layout": layout, "padding": "zero",
        }  # fmt: skip

    def of(self, tensor: torch.Tensor) -> Any:
        """Triton's descriptor of a tensor."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        descriptor = object.__new__(TensorDescriptor)  # its constructor would check again what the plan settled
        descriptor.__dict__.update(self.fields, base=tensor)
        return descriptor


def encode_strides(shape: Sequence[int], strides: Sequence[int], element_size: int) -> tuple[int, ...] | None:
    """Strides, in elements, that a tensor descriptor holds for such a tensor; None if there can be no descriptor.

    The driver refuses a descriptor unless

    - the address is a multiple of 16 bytes, see `are_aligned`: plans serve many addresses;
    - sizes are 1 to 2³²;
    - features, on the last axis, are adjacent: their stride is not encoded;
    - the other strides are multiples of 16 bytes, and less than 2⁴⁰ bytes. Those of axes of size one are encoded
      too. They are never taken, so they may be anything, and one that the driver accepts stands for them here;
    - a box has 1 to 256 elements along each axis, and a multiple of 16 bytes along the last: kernels have such.

    A stride of zero along an axis that has more than one element is refused here.
    """
    if not all(0 < size <= _MOST_SIZE for size in shape):
        return None
    encoded = [stride if size > 1 else ALIGNMENT for size, stride in zip(shape[:-1], strides[:-1])]
    if not all(0 < s * element_size < _MOST_BYTES and s * element_size % ALIGNMENT == 0 for s in encoded):
        return None
    return (*encoded, 1) if shape[-1] == 1 or strides[-1] == 1 else None


def are_aligned(*tensors: torch.Tensor) -> bool:
    """Whether the addresses of tensors are aligned for tensor descriptors."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % ALIGNMENT == 0


def supports_tma(tensor: torch.Tensor) -> bool:
    """Whether there can be a descriptor of a tensor and of each entry of it, apart from addresses.

    So where entries lie at other distances than multiples of 16 bytes, a single one has none either, and takes the
    kernels that its batch takes, which give the same bits. See `encode_strides`.
    """
    entries_aligned = tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
    return entries_aligned and encode_strides(tensor.shape, tensor.stride(), tensor.element_size()) is not None
