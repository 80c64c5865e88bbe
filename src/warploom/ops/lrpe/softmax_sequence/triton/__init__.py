"""Triton kernels of LRPE with softmax over the sequence: one forward, one backward, which share the work alike (`rounds`)."""
