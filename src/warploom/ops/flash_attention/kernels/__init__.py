"""Kernels and device code alone.

`forward` and `backward` are for every GPU and call, `decode` is for few queries, `small` for gradients of small problems,
and `hopper` for Hopper.
`launches.forward` and `launches.backward` choose among them.
"""
