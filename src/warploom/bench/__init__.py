"""Measuring operators, warploom's and your own: timing, measured ceilings, records of runs, tables, the report.

`time_functions` times any functions that should compute the same. `Bench` and `Operator` describe more: several
suites, providers that are built for a case, bytes and operations; `run_bench` runs one, and so does
``warploom bench --spec FILE`` on a file that defines ``BENCHES``.
"""

from warploom.bench.comparison import compare, read_side
from warploom.bench.records import Record, load
from warploom.ops.spec import Bench, Case, Inputs, Operator, Other, Outputs, Traffic, Unsupported, need_cuda
from warploom.report.results import Results, run_bench, time_functions

__all__ = [
    "Bench",
    "Case",
    "Inputs",
    "Operator",
    "Other",
    "Outputs",
    "Record",
    "Results",
    "Traffic",
    "Unsupported",
    "compare",
    "load",
    "need_cuda",
    "read_side",
    "run_bench",
    "time_functions",
]
