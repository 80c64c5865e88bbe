"""The seed of a run of the tests, ``--seed``: other draws of whatever the tests draw."""

import os

import torch

NAME = "WARPLOOM_SEED"


def seed() -> int:
    return int(os.environ.get(NAME, "0"))


def generator(number: int = 0) -> torch.Generator:
    """One on the CPU, of the run's seed; different for every number."""
    return torch.Generator().manual_seed(1000 * seed() + number)
