"""What decides whether an operator is right: the error budget, poisoned memory, conformance, builds."""
