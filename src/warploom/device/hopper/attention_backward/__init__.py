"""What attention's backward kernels for Hopper are made of, in the manner of `warploom.device.hopper.attention`.

A group of warps owns 64 queries and loops over the keys (`queries`), or 64 keys and loops over the queries of all heads
that read them, for the gradients of these keys and their values (`keys`) or for all (`all_gradients`). In the last case
groups exchange gradients of logits (`exchange`), and the gradients of queries are added up in device memory
(`query_sums`). Weights are computed anew from logits (`weights`).

Where registers or shared memory have no room for that, two groups share a tile of 64 keys (`shared_keys`, and
`shared_keys_in_pieces`) or queries (`shared_queries`), and one takes weights from the other (`shared_weights`). Float32 is
in bfloat16 `terms`.
"""
