"""Products of linear attention on Hopper, in Gluon: bfloat16, 64 or 128 features, states in registers.

Two groups of four warps hold a head's state, and tiles of 64 tokens pass through shared memory: one warp has the
tensor memory accelerator bring them, others encode them where they lie while the products of earlier tiles run.

Pairs of features that turn together must meet in a thread when gradients are turned back. Where groups share the
columns of a product, features of ``φ`` are taken in the order (group, part, features): see `encoding.map_feature`.
"""
