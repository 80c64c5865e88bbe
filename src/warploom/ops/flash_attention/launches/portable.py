"""The launches of flash attention by the names that operators call."""

from warploom.ops.flash_attention.launches.backward import backward, plan_backward
from warploom.ops.flash_attention.launches.forward import forward, plan_forward
from warploom.ops.flash_attention.launches.tiling import COUNTERS as TICKETS

__all__ = ["TICKETS", "backward", "forward", "plan_backward", "plan_forward"]
