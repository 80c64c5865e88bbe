"""Which tests run: a sample of the cases of each, or all; a part of them, if one is asked for."""

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping

import pytest
import seeds
import torch

MOST = {"cpu": 1, "cuda": 3}
"""Cases that run in a day of a test of what computes on a device, and for one operator."""


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of every test")
    parser.addoption(
        "--part", type=_part, help="of so many parts of the tests, one: 1/3, 2/3 or 3/3", metavar="I/N"
    )


def _part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ValueError(text)
    return int(number), int(of)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out of ``items`` what does not run."""
    by_name = any("::" in argument for argument in config.args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    chosen = set(items) if by_name or config.getoption("--all") else _sample(items, device)
    if part := config.getoption("--part"):
        number, of = part
        chosen = {item for item in chosen if _hash(item) % of == number - 1}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
    if device == "cuda":
        items.sort(key=_turn)
    elif not by_name:
        items.sort(key=lambda item: -_seldom(item)[1])  # no worker has a long test left when others are done


def _seldom(item: pytest.Item) -> tuple[int, float]:
    """Days of which a test runs on one, and the seconds of a CPU that it takes then, as far as is known."""
    mark = item.get_closest_marker("seldom")
    days, seconds = mark.args if mark else (1, 0.0)
    return days, seconds


def _turn(item: pytest.Item) -> int:
    """What needs memory is first, while others hold none; what measures time is last, with its kernels compiled.

    All other workers wait meanwhile: there, none of them has begun a long test, or has another one to run.
    """
    return 2 if item.get_closest_marker("alone") else 0 if needs_the_gpu_alone(item) else 1


def needs_the_gpu_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None or "gpu_memory" in getattr(item, "fixturenames", ())


def _hash(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


def _sample(items: list[pytest.Item], device: str) -> set[pytest.Item]:
    """Of every test some cases, at least one, each once in so many days.

    One in ``n`` of ``sample(n)`` runs, and all of ``seldom(n, seconds)`` on one day in ``n``.
    """
    tests: defaultdict[tuple[str, str, tuple[int, float]], list[pytest.Item]] = defaultdict(list)
    for item in items:
        operator = item.callspec.params.get("operator") if hasattr(item, "callspec") else None
        name = str(getattr(operator, "name", operator))
        tests[item.nodeid.partition("[")[0], name, _seldom(item)].append(item)
    today = seeds.day() + seeds.seed()
    turns = _turns({cases[0].nodeid: seldom for (_, _, seldom), cases in tests.items()})
    chosen: set[pytest.Item] = set()
    for (_, _, (days, _)), cases in tests.items():
        runnable = [item for item in cases if not item.get_closest_marker("skip")]
        chosen.update([item for item in cases if item.get_closest_marker("skip")][:1])  # which says why
        refuses = "_errors.py" in cases[0].nodeid  # in no time, and each case something else
        computes = not refuses and "device" in getattr(cases[0], "fixturenames", ())
        one_in = 1
        if not (computes and device == "cuda"):  # what a GPU computes does not take long
            if today % days != turns[cases[0].nodeid]:
                continue
            mark = cases[0].get_closest_marker("sample")
            one_in = mark.args[0] if mark else 1
        if computes:
            one_in = max(one_in, -(-len(runnable) // MOST[device]))
        # In an order of their own, in which the values of a parameter do not come by turns.
        runnable.sort(key=_hash)
        first = today // days % max(min(one_in, len(runnable)), 1)
        chosen.update(runnable[first::one_in])
    return chosen


def _turns(seldom: Mapping[str, tuple[int, float]]) -> dict[str, int]:
    """For each test the day, of its ``n``, on which it runs: every day has as much to do as any other."""
    work = [0.0] * math.lcm(*(days for days, _ in seldom.values()))
    turns: dict[str, int] = {}
    for test, (days, seconds) in sorted(seldom.items(), key=lambda each: (-each[1][1], each[0])):
        turns[test] = min(range(days), key=lambda day: (max(work[day::days]), sum(work[day::days])))
        for day in range(turns[test], len(work), days):
            work[day] += seconds
    return turns
