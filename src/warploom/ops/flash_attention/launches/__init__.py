"""Launch plans: what a call allocates and launches.

`forward` and `backward` choose among the kernels. `tiling` cuts calls for the kernels for every GPU, and `hopper`,
`decode` and `small` for their own.
"""
