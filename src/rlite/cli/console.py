"""What the console shows: one line for an error of the user's, none of the libraries' chatter."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager


def quiet_console() -> None:
    """Silences what libraries say at import and start-up; warnings and errors of rlite itself stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("lightning.pytorch", "lightning.fabric", "megatron", "torch.distributed", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("lightning", "megatron", "torch", "transformers"):
        warnings.filterwarnings("ignore", module=f"{module}.*")


@contextmanager
def user_errors(*, unless: Callable[[], bool] = lambda: False) -> Generator[None, None, None]:
    """Turns an error about the user's input into `error: ...` and exit code 1; RLITE_TRACEBACK=1 shows where.

    Args:
        unless: when it returns true the error passes with its traceback: once a run is under way, the place matters.
    """
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        yield
    except (ValueError, TypeError, FileNotFoundError, MisconfigurationException) as error:
        if unless() or os.environ.get("RLITE_TRACEBACK"):
            raise
        print(f"error: {error}\n(RLITE_TRACEBACK=1 shows where it was raised)", file=sys.stderr)
        sys.exit(1)
