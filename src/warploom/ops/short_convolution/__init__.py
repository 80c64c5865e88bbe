"""Short causal convolution of each channel, with packed sequences and states for decoding."""
