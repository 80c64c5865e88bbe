"""A spec file as a user writes one: `toy`, described for ``--spec``."""

import toy

from warploom.bench import Bench

OPERATORS = (toy.OPERATOR,)
BENCHES: tuple[Bench, ...] = (toy.make_bench(),)
