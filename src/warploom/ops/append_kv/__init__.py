"""Appending to a cache of keys and values: rotation, and rows written where a sequence continues."""
