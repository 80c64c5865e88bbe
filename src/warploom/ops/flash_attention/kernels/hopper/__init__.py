"""Kernels for Hopper, in Gluon: a page each, made of `warploom.device.hopper`.

`backward_shared_tiles` is for float32, and for keys and values of more than 128 features; `backward` for all else.
"""
