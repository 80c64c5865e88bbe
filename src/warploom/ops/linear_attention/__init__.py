"""Linear attention with LRPE inside: tokens are encoded while their tiles are loaded."""
