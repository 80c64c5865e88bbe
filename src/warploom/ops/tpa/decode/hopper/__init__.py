"""Decoding on Hopper, in Gluon."""
