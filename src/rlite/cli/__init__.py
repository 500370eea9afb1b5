"""The command line: `rlite fit|validate|test|predict|generate|plan --config FILE [overrides]`, `rlite export|report`.

This module is imported before torch, so that thread counts are in the environment when torch reads it.
"""

import os
import sys

_HELP = """usage: rlite COMMAND --config FILE [--key value ...]

RL post-training of large language models: training and generation share the same devices in turns.

commands that run a config (rlite COMMAND --help lists every key, --print_config shows all values):
  fit        train; --ckpt_path last goes on after an interruption
  validate   greedy completions and rewards of the validation data
  test       the same of the test data
  generate   completions into predictions.jsonl (also: predict)

commands that train nothing:
  plan       memory, traffic and devices of a run, before it is launched; exits 1 when it does not fit
  export     the policy of a checkpoint as a Hugging Face directory
  report     one HTML page of a run

  --version  print the version
"""


def main(args: list[str] | None = None) -> None:
    """Entry point of the `rlite` command."""
    arguments = sys.argv[1:] if args is None else args
    if arguments and arguments[0] in ("--version", "-V"):
        from rlite import __version__

        print(f"rlite {__version__}")
        return
    if not arguments or arguments[0] in ("--help", "-h"):
        print(_HELP, end="")
        sys.exit(0 if arguments else 2)
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
