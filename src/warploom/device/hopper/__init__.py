"""Device functions for Hopper, in Gluon.

In the order to read them:

- `pipeline`: rings of buffers and their barriers, the tile scheduler, products. `tma` has the copies.
- `attention`: groups of warps that own queries, and their KV loop. `softcap` has caps of logits.
- `attention_backward`: the same for gradients.
- `ordered`: programs that add to the same memory one after the other.
"""
