"""Copies through the tensor memory accelerator, by the same names in every version of Triton."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

# They have the second of these names since Triton 3.8, and the first no longer since 3.9.
async_copy_global_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_copy_shared_to_global = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
