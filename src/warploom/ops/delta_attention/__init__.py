"""Delta rule attention: a state that is corrected by what it predicts, with decays and rotary positions."""
