"""Kernels for Hopper, in Gluon, and their launches.

In the order to read them: `work` has the tiles of work, `masks` the loops over their keys or queries, `tiles` what lies in
shared memory and registers, and `softmax` the weights; with these, `forward` is a page, kernel and loop. The backward is
`backward_dq` and `backward_dkv`, or `backward_fused` in one kernel. `backward_shared` is for float32, and for keys of more
than 128 features. `launch` says which calls they take.
"""
