"""Kernels for Hopper, in Gluon."""
