"""Rotary positions and causal attention as one operator."""
