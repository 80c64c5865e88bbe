"""Named choices: what a random call is made of, so that it can be drawn, varied, written down and simplified.

A call is made by a function that asks for its choices by name. A seed answers at random; a record of an earlier
call answers as it did then, and with the simplest option where it says nothing. So one mechanism draws a call,
changes one thing about it, repeats it from one line of text, and simplifies it: a choice that is taken out of the
record becomes the simplest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, TypeVar

__all__ = ["Choices", "as_tuples"]

T = TypeVar("T")


class Choices:
    """Answers to the questions of the function that makes a call.

    Args:
        seed: Where new answers come from; None for the simplest option.
        given: Answers that are settled, by name. One that does not fit is taken for none.
        settled: Where the few options come from, in many calls, that a kernel is compiled for.
        other: The name of a choice whose answer must be another than that of ``given``.
        small: True for sizes that suit Triton's interpreter.
    """

    def __init__(
        self,
        seed: str | None = None,
        given: Mapping[str, Any] | None = None,
        *,
        settled: str | None = None,
        other: str | None = None,
        small: bool = False,
    ) -> None:
        self.seed, self.given, self.settled, self.other, self.small = seed, given or {}, settled, other, small
        self.answers: dict[str, Any] = {}
        """All answers, by the name of the choice."""
        self.record: dict[str, Any] = {}
        """Those that are not the simplest."""
        self.options: dict[str, int] = {}
        """The number of options that each choice had."""

    def choice(self, name: str, options: Sequence[T], compiled: int | None = None) -> T:
        """Returns one of the options: the first is the simplest, and one that stands there twice is drawn as often.

        Args:
            name: What the choice is called.
            options: JSON values, with tuples for lists.
            compiled: How many options a run of calls has between them, if kernels are compiled for each.
        """
        return self._answer(name, options, options[0], options.__contains__, compiled)

    def number(
        self, name: str, options: Sequence[int], low: int, high: int, simplest: int = 0, compiled: int | None = None
    ) -> int:
        """Returns one of the options within two bounds, both included; a settled answer is any number there."""
        simplest = min(max(simplest, low), high)
        within = [option for option in options if low <= option <= high] or [simplest]
        return self._answer(name, within, simplest, lambda n: type(n) is int and low <= n <= high, compiled)

    def flag(self, name: str, share: float = 0.5, compiled: int | None = None) -> bool:
        """Returns True in a share of calls; False is simpler."""
        yes = round(20 * share)
        return self.choice(name, [False] * (20 - yes) + [True] * yes, compiled)

    def room(self, name: str, options: Sequence[int]) -> int:
        """Returns a bound on what is drawn, which is no part of the record."""
        return max(options) if self.seed is None else Random(f"{self.seed}:{name}").choice(options)

    def settles(self, name: str, share: float) -> bool:
        """Returns True for a share of runs of calls that share the options kernels are compiled for; no record."""
        return self.settled is None or Random(f"{self.settled}:{name}").random() < share

    def _answer(self, name: str, options: Sequence[T], simplest: T, fits: Any, compiled: int | None) -> T:
        if compiled is not None and self.settled is not None:
            order = Random(f"{self.settled}:{name}").sample(options, len(options))
            kept = list(dict.fromkeys(order))[:compiled]
            options = [option for option in options if option in kept]
        self.options[name] = len(set(options))
        given = self.given.get(name, None)
        if name in self.given and name != self.other and fits(given):
            value: T = given
        elif self.seed is None:
            value = simplest
        else:
            if name == self.other:
                options = [option for option in options if option != given] or options
            value = Random(f"{self.seed}:{name}").choice(options)
        self.answers[name] = value
        if value != simplest:
            self.record[name] = value
        return value


def as_tuples(value: Any) -> Any:
    """Returns a JSON value with tuples for lists, as choices have them."""
    if isinstance(value, list):
        return tuple(map(as_tuples, value))
    return {name: as_tuples(one) for name, one in value.items()} if isinstance(value, dict) else value
