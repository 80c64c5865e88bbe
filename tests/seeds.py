"""The seed of a run of the tests, ``--seed``: other draws of whatever the tests draw."""

import datetime
import os

import torch

NAME = "WARPLOOM_SEED"
TODAY = "WARPLOOM_DAY"


def seed() -> int:
    return int(os.environ.get(NAME, "0"))


def day() -> int:
    """The day of a run of the tests, which draws change with where no seed is given."""
    return int(os.environ.get(TODAY) or datetime.date.today().strftime("%Y%m%d"))


def generator(number: int = 0) -> torch.Generator:
    """One on the CPU, of the run's seed; different for every number."""
    return torch.Generator().manual_seed(1000 * seed() + number)
