"""Triton device functions that several operators share. Importing this package imports Triton."""
