"""The log of a run of the tests, ``--log FILE``: a line of JSON, added to what the file has."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--log", type=Path, help="add a line of JSON about the run to a file", metavar="FILE")


class Log:
    """Counts what comes in where the run is controlled."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config, self.path, self.begun = config, path, time.time()
        self.counts: Counter[str] = Counter()
        self.why: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.slowest[report.nodeid] = self.slowest.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.counts["failed" if report.when == "call" else "errors"] += 1
            self.failures.append(report.nodeid)
        elif report.skipped:
            self.counts["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
            self.why[reason.removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self.counts["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.why[f"{report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}"] += 1
        elif report.failed:
            self.counts["errors"] += 1
            self.failures.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        slowest = sorted(self.slowest.items(), key=lambda each: -each[1])[:10]
        line = {
            "environment": self.environment(),
            "part": self.config.getoption("--part"),
            "arguments": [str(each) for each in self.config.invocation_params.args],
            "seconds": round(time.time() - self.begun, 1),
            "status": int(exitstatus),
            "counts": {name: self.counts[name] for name in ("passed", "failed", "errors", "skipped")},
            "failures": self.failures,
            "skipped_why": dict(self.why.most_common()),
            "slowest_s": {name: round(seconds, 1) for name, seconds in slowest},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def environment(self) -> dict[str, Any]:
        """Commit, whether the tree is clean, GPU and versions."""
        from warploom.bench.environment import describe_environment

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return describe_environment(device) | {"workers": self.config.getoption("numprocesses", None) or 1}
