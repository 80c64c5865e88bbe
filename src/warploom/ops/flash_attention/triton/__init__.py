"""Kernels in Triton, and their launches.

`forward` and `backward` are for every GPU and call, `decode` is for few queries, and `small` for gradients of small problems.
`launch` cuts calls into tiles.
"""
