"""The compute capability of a GPU."""

from __future__ import annotations

import functools

import torch


@functools.cache
def capability(device: torch.device) -> int:
    """Returns the compute capability of a GPU of NVIDIA, times ten; 0 for a GPU of AMD."""
    if torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
