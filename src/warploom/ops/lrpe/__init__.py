"""LRPE: linearized relative positional encoding, of which RoPE is one."""
