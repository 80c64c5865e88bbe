"""Device functions for Hopper, in Gluon.

`pipeline` has rings of buffers and their barriers, and `tma` the copies into these.
"""
