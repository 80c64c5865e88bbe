"""Flash attention: exact softmax attention that never writes its matrix of weights to memory."""
