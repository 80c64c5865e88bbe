"""Kernels of softmax over the sequence for Hopper, in Gluon."""
