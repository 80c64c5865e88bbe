"""Random valid calls of every public function, held to the contract of all operators.

A call is made of named choices (`choices`): the arguments of each operator (`calls`), and memory of any kind
(`arrays`). Its numbers are such that float64 and the promised budget suffice to judge it (`judging`); in a few
calls they are huge, tiny or cancel, and results need only be finite. It is run with siblings that differ in one
thing (`families`). What fails is repeated from one line and simplified (`shrinking`).
``python tools/random_calls.py`` searches for a given time (`searching`).
"""

from random_cases.calls import OPERATORS, Call
from random_cases.definitions import function_of, reference_of
from random_cases.families import Fault, Source, Tally, parse, run_calls, text_of
from random_cases.searching import Outcome, Plan, search
from random_cases.shrinking import shrink

__all__ = [
    "OPERATORS",
    "Call",
    "Fault",
    "Outcome",
    "Plan",
    "Source",
    "Tally",
    "function_of",
    "parse",
    "reference_of",
    "run_calls",
    "search",
    "shrink",
    "text_of",
]
