"""Subcommands that train nothing: `rlite plan`, `rlite export`, `rlite report`."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rlite.cli.console import quiet_console, user_errors


def plan(arguments: list[str]) -> int:
    """Predicts memory, traffic and devices of a run. Loads no engine and touches no device.

    Whatever is no option of its own is checked and merged as `rlite fit` would: `--config`, `--trainer.devices 8`, ...
    """
    from rlite.plan import run_plan

    parser = argparse.ArgumentParser(prog="rlite plan", description=plan.__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--world_size", type=int, help="devices in all; by default trainer.devices * num_nodes")
    parser.add_argument("--device_memory", default="64GiB", help="memory of one device (default: %(default)s)")
    parser.add_argument("--node_size", type=int, default=8, help="devices in one node (default: %(default)s)")
    parser.add_argument(
        "--link_gbps", type=float, default=40.0, help="GB/s between nodes, for one device (%(default)s)"
    )
    parser.add_argument("--node_link_gbps", type=float, default=150.0, help="GB/s inside a node (%(default)s)")
    parser.add_argument("--host_gbps", type=float, default=25.0, help="GB/s between device and host (%(default)s)")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON instead of tables")
    parser.add_argument("--plot", type=Path, help="also write a picture of the phases to this file")
    options, rest = parser.parse_known_args(arguments)
    if not rest:
        parser.error("--config FILE is missing: the configuration that `rlite fit` would run")
    return run_plan(_parsed_config(rest), **vars(options))


def export(arguments: list[str]) -> int:
    """Writes the policy of a checkpoint as a Hugging Face directory: sharded safetensors, config and tokenizer."""
    parser = argparse.ArgumentParser(prog="rlite export", description=export.__doc__)
    parser.add_argument("--ckpt", type=Path, required=True, help="checkpoint, or run directory (then its last one)")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must be empty or absent")
    parser.add_argument(
        "--policy", type=Path, help="the policy's directory; by default what the run's config.yaml says"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="by default that of the run")
    options = parser.parse_args(arguments)
    from rlite.export import export_checkpoint

    written = export_checkpoint(options.ckpt, options.out, policy_dir=options.policy, dtype=options.dtype)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"wrote {written}")
    return 0


def report(arguments: list[str]) -> int:
    """Makes one self-contained HTML page of a run."""
    parser = argparse.ArgumentParser(prog="rlite report", description=report.__doc__)
    parser.add_argument("run_dir", type=Path, help="directory with metrics.csv")
    options = parser.parse_args(arguments)
    from rlite.report import write_report

    print(f"wrote {write_report(options.run_dir)}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {"plan": plan, "export": export, "report": report}


def run_command(name: str, arguments: list[str]) -> None:
    """Runs one of `COMMANDS` and exits with its code."""
    quiet_console()
    with user_errors():
        sys.exit(COMMANDS[name](arguments))


def _parsed_config(arguments: list[str]) -> dict:
    """The configuration of `rlite fit` with these arguments, checked by the same schema; nothing is built."""
    from rlite.cli.app import ConfigOnlyCLI

    return ConfigOnlyCLI.parse(arguments)
