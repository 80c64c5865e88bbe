"""Scans of the delta rule on Hopper, in Gluon: bfloat16, 64 or 128 features of a key, values in blocks of 64.

`scan` goes through chunks of 64 tokens with the rows themselves, `carry` through what `triton.chunks` writes of 32.
"""
