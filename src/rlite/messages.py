"""Lines for the user that must be seen whatever the libraries' loggers are set to."""

import sys

from lightning.pytorch.utilities.rank_zero import rank_zero_only


def announce(message: str) -> None:
    """One line on the console (stderr) of rank 0."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        print(message, file=sys.stderr, flush=True)
