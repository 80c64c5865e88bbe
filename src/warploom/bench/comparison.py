"""Compares two sets of records: for every case that both have, the ratio of the times with its interval.

Uncertainty. A record has the median of its repetitions and their 20th and 80th percentile. Whatever the
distribution of a repetition, the true median lies between these two with a probability that counting gives: each
repetition falls below it or not, as a coin. For the 15 repetitions that a measurement has at least it is 95 % or
more, from 40 on more than 99.9 %. (Calls of a second and more get fewer repetitions, and less of that.) So the
ratio of the true medians lies between ``p20 / p80`` and ``p80 / p20`` of the two records in at least 90 % of
cases, whether or not the two drift together. A difference is significant when that interval does not contain 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warploom.bench.environment import device_name
from warploom.bench.records import LIMIT, Record, as_option, load, load_environments, own_provider
from warploom.errors import ArgumentError
from warploom.ops import benches


@dataclass(frozen=True)
class Side:
    """One of the two sets of records."""

    path: Path
    provider: str
    """A provider's name; empty for the one that stands for each operator."""
    records: tuple[Record, ...]
    devices: tuple[str, ...]
    stale: int
    """The number of records of other code than the present. They are compared all the same."""
    fixed_us: tuple[float, ...] = ()
    """The microseconds in every time of each of its runs, measured at the run's start."""

    def describe(self) -> str:
        """Returns one line of text."""
        words = [f"{self.path}", self.provider or "the library's own provider", *self.devices]
        if self.stale:
            words.append(f"{self.stale} of {len(self.records)} records from other code than the present")
        if self.fixed_us:
            least, most = min(self.fixed_us), max(self.fixed_us)
            words.append(f"{least:g} {f'to {most:g} ' if most > least else ''}µs of each time are fixed")
        return ", ".join(words)


@dataclass(frozen=True)
class Pair:
    """One case on both sides."""

    operator: str
    mode: str
    case: Mapping[str, Any]
    a: Record
    b: Record

    @property
    def comparable(self) -> bool:
        """True if both sides have a time."""
        return bool(self.a.status == self.b.status == "ok" and self.a.ms and self.b.ms)

    @property
    def ratio(self) -> float:
        """Time of B over time of A: above 1, B is slower; NaN without two times."""
        return (self.b.ms or 0.0) / self.a.ms if self.comparable and self.a.ms else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the ratio of the true medians; see the module's text. None is known if disturbed."""
        if not self.comparable or self.disturbed:
            return math.nan, math.nan
        low = (self.b.ms_p20 or 0.0) / (self.a.ms_p80 or math.inf)
        return low, (self.b.ms_p80 or math.inf) / self.a.ms_p20 if self.a.ms_p20 else math.inf

    @property
    def disturbed(self) -> str:
        """The disturbance of either measurement, if there was one."""
        return self.a.disturbed or self.b.disturbed or ""

    @property
    def significant(self) -> bool:
        """True if the interval leaves out 1, and nothing disturbed the measurements."""
        low, high = self.interval
        return low > 1 or high < 1

    @property
    def verdict(self) -> str:
        """``slower``, ``faster``, ``same`` (as far as can be told), ``disturbed``, or why there is no ratio."""
        if not self.comparable:
            failed = [f"{name} {r.status}" for name, r in (("A", self.a), ("B", self.b)) if r.status != "ok"]
            return ", ".join(failed) or "not timed"
        if self.disturbed:
            return "disturbed"
        if not self.significant:
            return "same"
        return "slower" if self.ratio > 1 else "faster"

    def worse_by(self, fraction: float) -> bool:
        """Returns True if B is slower by more than a fraction and significantly so, or fails where A does not."""
        if self.a.status == "ok" and self.b.status in ("incorrect", "error", "oom"):
            return True
        return self.significant and self.ratio > 1 + fraction


@dataclass(frozen=True)
class Mean:
    """The geometric mean of some cases' ratios; the ends of its interval are the means of theirs."""

    name: str
    cases: int
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The cases that two sides have in common."""

    a: Side
    b: Side
    pairs: tuple[Pair, ...]
    unmatched: int
    """Cases that only one side has, or providers of one set in different runs."""

    def __repr__(self) -> str:
        """Returns one line: the two sides and how many cases they share."""
        return f"<Comparison of {self.a.path} and {self.b.path}: {len(self.pairs)} cases>"

    @property
    def means(self) -> list[Mean]:
        """The geometric mean of each operator and mode, and that of everything; of cases without disturbance."""
        groups: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            if pair.comparable and not pair.disturbed:
                groups.setdefault(f"{pair.operator} {pair.mode}", []).append(pair)
        every = [pair for group in groups.values() for pair in group]
        return [_mean(name, group) for name, group in groups.items()] + ([_mean("all", every)] if every else [])

    def slower(self, fraction: float) -> list[Pair]:
        """Returns the cases in which B is worse by more than a fraction; see `Pair.worse_by`."""
        return [pair for pair in self.pairs if pair.worse_by(fraction)]

    def to_json(self) -> str:
        """Returns everything as JSON, with null for numbers that there are not."""
        a, b = (
            {"path": str(side.path), "provider": side.provider, "devices": side.devices, "stale": side.stale}
            for side in (self.a, self.b)
        )
        names = ("operator", "mode", "case", "ratio", "significant", "verdict")
        pairs = [
            {name: getattr(pair, name) for name in names}
            | {"a_ms": pair.a.ms, "b_ms": pair.b.ms, "low": pair.interval[0], "high": pair.interval[1]}
            for pair in self.pairs
        ]
        found: dict[str, Any] = {"a": a, "b": b, "ratio": "time of b over time of a", "pairs": pairs}
        found |= {"means": [asdict(mean) for mean in self.means], "unmatched": self.unmatched}
        finite = json.loads(json.dumps(found), parse_constant=lambda _: None)
        return json.dumps(finite, indent=2, allow_nan=False)


def read_side(text: str | Path, provider: str = "") -> Side:
    """Read one side.

    Args:
        text: A folder of records or a records file; ``PATH:PROVIDER`` names the provider as well.
        provider: The same, where ``text`` is only a path.

    Raises:
        ArgumentError: The provider has no record there.
        WarploomError: There are no records there.

    Example:
        ```python
        from warploom.bench import read_side

        ours = read_side("results/h200:warploom")
        print(ours.devices)  # ('NVIDIA H200',)
        ```
    """
    path = Path(text)
    if not provider and not path.exists():
        before, colon, after = str(text).rpartition(":")
        if colon:
            path, provider = Path(before), after
    known = load_environments(path)
    records = load([path])
    named = {bench.record_name: bench.own for bench in benches().values()}
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.operator, []).append(record)
    own = {operator: provider or own_provider(group, named.get(operator, "")) for operator, group in groups.items()}
    chosen = tuple(r for r in records if r.provider == own[r.operator] and (provider or r.provider != LIMIT))
    if not chosen:
        names = ", ".join(sorted({record.provider for record in records})) or "none"
        raise ArgumentError(f"compare: {path} has no records of {provider or 'its own'}; there are: {names}")
    devices = dict.fromkeys(device_name(known.get(record.environment, {})) for record in chosen)
    runs = dict.fromkeys((record.environment, record.run) for record in chosen)
    said = [known.get(environment, {}).get("runs", {}).get(run, {}).get("fixed_us") for environment, run in runs]
    fixed = tuple(us for us in said if us is not None)
    return Side(path, provider, chosen, tuple(devices), sum(record.is_stale for record in chosen), fixed)


def compare(a: Side | str | Path, b: Side | str | Path) -> Comparison:
    """Match the cases of two sides: the same operator, mode and parameters; of several of a side, the last.

    Two providers of one set of records are compared within a run alone.

    Args:
        a: One side, or its text as `read_side` takes it.
        b: The other.

    Raises:
        ArgumentError: They have no case in common.

    Example:
        ```python
        from warploom.bench import compare

        for pair in compare("results/h200:warploom", "results/h200:torch_compile").pairs:
            print(pair.operator, pair.case, pair.ratio, pair.verdict)
        ```
    """
    a, b = (side if isinstance(side, Side) else read_side(side) for side in (a, b))
    left, right = _by_case(a.records), _by_case(b.records)
    together = [key for key in left if key in right and (a.path != b.path or left[key].run == right[key].run)]
    pairs = tuple(
        Pair(left[key].operator, left[key].mode, left[key].case, left[key], right[key]) for key in together
    )
    if not pairs:
        raise ArgumentError(f"compare: no case in common between {a.describe()} and {b.describe()}")
    return Comparison(a, b, pairs, len((left.keys() | right.keys()) - set(together)))


def _by_case(records: Iterable[Record]) -> dict[tuple[str, str, str], Record]:
    return {(r.operator, r.mode, json.dumps(r.case, sort_keys=True)): r for r in records}


def _mean(name: str, pairs: Sequence[Pair]) -> Mean:
    def geometric(values: Iterable[float]) -> float:
        # A record without its percentiles has an interval from 0 to infinity.
        logs = [math.log(value) if value else -math.inf for value in values]
        return math.exp(math.fsum(logs) / len(pairs))

    ends = [pair.interval for pair in pairs]
    ratio = geometric(pair.ratio for pair in pairs)
    return Mean(name, len(pairs), ratio, geometric(low for low, _ in ends), geometric(high for _, high in ends))


def case_words(pairs: Sequence[Pair]) -> list[str]:
    """Returns each pair's case in words: the parameters in which the cases of its operator differ."""
    values: dict[str, dict[str, set[str]]] = {}
    for pair in pairs:
        for name, value in pair.case.items():
            values.setdefault(pair.operator, {}).setdefault(name, set()).add(json.dumps(value))
    return [
        " ".join(f"{name}={as_option(v)}" for name, v in pair.case.items() if len(values[pair.operator][name]) > 1)
        for pair in pairs
    ]
