"""The Triton kernels of delta rule attention."""
