"""Tensor descriptors, by which kernels copy tiles with the tensor memory accelerator (TMA), from Hopper on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warploom.runtime.build import ALIGNMENT, TYPE_NAMES

_MAX_STRIDE_BYTES = 2**40  # strides in a descriptor are less
_MAX_SIZE = 2**32  # the largest size of an axis in a descriptor


class TmaTile(NamedTuple):
    """A tile of a tensor that a kernel copies by TMA.

    The caller makes sure that tensors ``like`` it can have descriptors: `supports_tma`, and addresses that are
    multiples of 16 bytes.
    """

    like: torch.Tensor
    order: tuple[int, ...]  # the tensor's axes, in the descriptor's order
    tile: tuple[int, ...]  # the tile's size along each of them


class DescriptorTemplate:
    """The fields, all but the address, of descriptors of tensors like that of a `TmaTile`."""

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
        """Returns Triton's descriptor of a tensor."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        descriptor = object.__new__(TensorDescriptor)  # its constructor would repeat the plan's checks
        descriptor.__dict__.update(self.fields, base=tensor)
        return descriptor


def encode_strides(shape: Sequence[int], strides: Sequence[int], element_size: int) -> tuple[int, ...] | None:
    """Returns the strides, in elements, of a tensor's descriptor; None if there can be no descriptor.

    The driver accepts a descriptor if

    - the address is a multiple of 16 bytes, which `are_aligned` checks, since a plan is used with many addresses;
    - sizes are 1 to 2³²;
    - the features, on the last axis, are adjacent: their stride is not encoded;
    - the other strides are multiples of 16 bytes and less than 2⁴⁰ bytes. The stride of an axis of size one is
      never used, so any that the driver accepts is encoded for it;
    - a tile has 1 to 256 elements along each axis, and a multiple of 16 bytes along the last, as all tiles of the
      kernels have.

    A stride of zero along an axis of more than one element is not accepted here.
    """
    if not all(0 < size <= _MAX_SIZE for size in shape):
        return None
    encoded = [stride if size > 1 else ALIGNMENT for size, stride in zip(shape[:-1], strides[:-1])]
    if not all(0 < s * element_size < _MAX_STRIDE_BYTES and s * element_size % ALIGNMENT == 0 for s in encoded):
        return None
    return (*encoded, 1) if shape[-1] == 1 or strides[-1] == 1 else None


def are_aligned(*tensors: torch.Tensor) -> bool:
    """Returns True if the addresses of all tensors are aligned for tensor descriptors."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % ALIGNMENT == 0


def supports_tma(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor and each of its batch entries can have a descriptor, if their addresses are aligned.

    A tensor whose batch stride is 0 or no multiple of 16 bytes is not supported even if it has one entry: an entry
    runs on the same kernels, and has the same bits, alone and in a batch.
    """
    entries_aligned = tensor.stride(0) > 0 and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
    return entries_aligned and encode_strides(tensor.shape, tensor.stride(), tensor.element_size()) is not None
