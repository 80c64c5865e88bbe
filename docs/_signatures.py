"""An extension of griffe: signatures in the reference leave out what only catches wrong arguments."""

from __future__ import annotations

from typing import Any

import griffe


class PublicParameters(griffe.Extension):
    """Take parameters whose names begin with an underscore from the signatures of functions."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Called for every function that was read."""
        func.parameters = griffe.Parameters(*(p for p in func.parameters if not p.name.startswith("_")))
