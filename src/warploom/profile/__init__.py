"""Where a model's time and memory go: ``warploom profile transformer | attention``."""
