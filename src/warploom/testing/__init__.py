"""Tests of operators: the error budget, poisoned memory, conformance to the reference, and builds."""
