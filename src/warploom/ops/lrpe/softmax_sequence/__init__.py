"""LRPE with softmax over the sequence as its activation."""
