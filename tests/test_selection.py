"""Which tests run, and what a run leaves in its log."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run_log
import seeds
import selection


def made(
    name: str,
    cases: int,
    sample: int | None = None,
    operator: str | None = None,
    computes: bool = True,
    seldom: tuple[int, float] | None = None,
) -> Any:
    given = {"sample": sample and (sample,), "seldom": seldom}
    markers = {kind: SimpleNamespace(args=arguments) for kind, arguments in given.items() if arguments}
    return [
        SimpleNamespace(
            nodeid=f"tests/test_{name}.py::test[{operator}-{case}]",
            fixturenames=["device"] if computes else [],
            callspec=SimpleNamespace(params={"operator": SimpleNamespace(name=operator)} if operator else {}),
            get_closest_marker=markers.get,
        )
        for case in range(cases)
    ]


class Item(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_every_test_has_some_cases_each_day_and_every_case_its_day(
    on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = {
        "few": made("few", 3),
        "sampled": made("sampled", 13, sample=5),
        "fewer than are left out": made("two", 2, sample=7),
        "many": made("many", 37),
        "of one operator": made("operators", 9, operator="a"),
        "of another": made("operators", 2, operator="b"),
        "messages": made("messages", 50, computes=False),
        "mistakes": made("any_errors", 50),
        "long": made("long", 6, sample=2, seldom=(2, 9.0)),
        "one that takes long": made("one", 1, seldom=(3, 9.0)),
    }
    seldom = ("long", "one that takes long")
    tests = {name: [Item(**vars(item)) for item in items] for name, items in tests.items()}
    seen: dict[str, set[str]] = {name: set() for name in tests}
    for day in range(20261101, 20261140):
        monkeypatch.setenv(seeds.TODAY, str(day))
        chosen = selection._sample([item for items in tests.values() for item in items], on)
        for name, items in tests.items():
            today = {item.nodeid for item in items if item in chosen}
            assert len(today) <= (50 if name in ("messages", "mistakes") else 3), name
            assert today or (on == "cpu" and name in seldom), name
            seen[name] |= today
    assert {name: len(ids) for name, ids in seen.items()} == {name: len(items) for name, items in tests.items()}


def test_every_day_has_as_much_to_do() -> None:
    draw = random.Random(seeds.seed())
    seldom = {str(test): (draw.choice((1, 2, 3, 4)), draw.uniform(1.0, 30.0)) for test in range(60)}
    turns = selection._turns(seldom)
    assert all(0 <= turns[test] < days for test, (days, _) in seldom.items())
    work = [sum(s for test, (n, s) in seldom.items() if day % n == turns[test]) for day in range(24)]
    assert max(work) < 1.05 * sum(work) / len(work)


def test_parts_are_the_whole() -> None:
    items = made("any", 200)
    parts = [{item.nodeid for item in items if selection._hash(item) % 3 == part} for part in range(3)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 200
    assert min(map(len, parts)) > 40
    assert selection._part("2/3") == (2, 3)
    for wrong in ("0/3", "4/3", "2", "x/3"):
        with pytest.raises(ValueError, match=wrong):
            selection._part(wrong)


def test_a_log_says_what_was_skipped_and_why(tmp_path: Path) -> None:
    options = {"--part": (1, 3), "numprocesses": 2}
    config: Any = SimpleNamespace(
        getoption=lambda name, default=None: options.get(name, default),
        invocation_params=SimpleNamespace(args=("-n", "auto")),
    )
    log = run_log.Log(config, tmp_path / "new" / "log.jsonl")
    skipped = ("test_b.py", 3, "Skipped: needs a GPU")
    for name, when, outcome, text in (
        ("a", "setup", "passed", None),
        ("a", "call", "passed", None),
        ("b", "setup", "skipped", skipped),
        ("c", "call", "failed", "wrong"),
        ("d", "teardown", "failed", "wrong"),
    ):
        log.pytest_runtest_logreport(pytest.TestReport(name, ("", 0, ""), {}, outcome, text, when, duration=0.25))
    for _ in range(2):
        log.pytest_sessionfinish(None, 1)  # type: ignore[arg-type]
    first, _ = map(json.loads, log.path.read_text().splitlines())
    assert first["counts"] == {"passed": 1, "failed": 1, "errors": 1, "skipped": 1}
    assert first["failures"] == ["c", "d"]
    assert first["skipped_why"] == {"needs a GPU": 1}
    assert (first["part"], first["status"], first["environment"]["workers"]) == ([1, 3], 1, 2)
    assert {"torch", "started"} <= set(first["environment"])
