"""The command line: `rlite fit|validate|test|predict|generate|plan --config FILE [overrides]`, `rlite export|report`.

This module is imported before torch, so that thread counts are in the environment when torch reads it.
"""

import os
import sys


def main(args: list[str] | None = None) -> None:
    """Entry point of the `rlite` command."""
    arguments = sys.argv[1:] if args is None else args
    if arguments and arguments[0] in ("--version", "-V"):
        from rlite import __version__

        print(f"rlite {__version__}")
        return
    # Several ranks share a machine's cores: with more threads than cores they spin against each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if (
        os.getcwd() not in sys.path
    ):  # `python -m rlite` has it: modules of the user's, as in `--model my_module.MyReward`
        sys.path.append(os.getcwd())
    from rlite.cli.commands import COMMANDS, run_command

    if arguments and arguments[0] in COMMANDS:
        run_command(arguments[0], arguments[1:])
    from rlite.cli.app import run

    run(arguments)
