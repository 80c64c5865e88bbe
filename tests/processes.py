"""Programs that tests start."""

import os
from pathlib import Path

import warploom

SOURCE = Path(warploom.__file__).parents[1]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Return this process's variables for a program that finds the same package, and modules in further folders.

    What PYTHONPATH has already stays: dependencies may be found by it alone.
    """
    known = filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *map(str, folders), *known]), **variables}
