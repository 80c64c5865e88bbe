"""``python -m warploom``: the same as the command ``warploom``."""

import sys

from warploom.cli import main

sys.exit(main())
