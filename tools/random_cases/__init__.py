"""Random valid calls of every public function, held to the contract of all operators.

A call is made of named choices (`choices`): the arguments of each operator (`calls`), and memory of any kind
(`arrays`). It is run with a few siblings that differ in one thing (`families`) and compared with float64
(`judging`). What fails is repeated from one line, simplified (`shrinking`) and printed as Python (`text`).
``python tools/random_calls.py`` searches for a given time (`searching`).
"""

from random_cases.calls import OPERATORS, Call
from random_cases.definitions import function_of, reference_of
from random_cases.families import Fault, Source, Tally, parse, run_calls, run_family, text_of
from random_cases.searching import Outcome, Plan, search
from random_cases.shrinking import shrink
from random_cases.text import python_of

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
    "python_of",
    "reference_of",
    "run_calls",
    "run_family",
    "search",
    "shrink",
    "text_of",
]
