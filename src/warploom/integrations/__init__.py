"""Integrations of warploom into other libraries, each by one line of code."""
