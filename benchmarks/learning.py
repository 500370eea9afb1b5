"""Does the demo learn? GRPO on arithmetic, a run for each seed, from one supervised warm start.

    python benchmarks/learning.py --preset grpo --seeds 0 1 2 3 4

The last line is JSON: the reward curve of each seed, mean reward at the start and at the end, the gain, and the seeds that
collapsed (ended below their start). Two runs of the same code give the same curves, so a change in algorithm code shows.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 5
"""Rollouts that are averaged at the start and at the end of a curve."""
WANTED_GAIN = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="grpo", help="of model.algorithm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rollouts", type=int, default=50)
    parser.add_argument(
        "--warm-start", type=Path, help="run directory or checkpoint of sft_demo_cpu.yaml; trained when not given"
    )
    parser.add_argument("--timeout-s", type=float, default=1800, help="of one run")
    args = parser.parse_args()
    if args.rollouts < 2 * WINDOW:
        parser.error(f"--rollouts {args.rollouts}: at least {2 * WINDOW}, to compare the first {WINDOW} with the last")
    with tempfile.TemporaryDirectory(prefix="rlite-learning-") as folder:
        curves = run_seeds(args, Path(folder))
    print(json.dumps({"preset": args.preset, "rollouts": args.rollouts, **summary(curves)}))


def run_seeds(args: argparse.Namespace, folder: Path) -> dict[int, list[float]]:
    """Reward of every rollout, by seed."""
    warm = args.warm_start
    if warm is None:
        warm = fit("configs/sft_demo_cpu.yaml", folder / "warm", args.timeout_s)
    curves = {}
    for seed in args.seeds:
        started = time.perf_counter()
        options = (
            f"--seed_everything={seed}",
            f"--model.init_from={warm}",
            f"--model.algorithm={args.preset}",
            f"--trainer.limit_train_batches={args.rollouts}",
            "--trainer.enable_checkpointing=false",
        )
        config = "ppo" if args.preset == "ppo" else "grpo"  # the critic is another module
        run = fit(f"configs/{config}_demo_cpu.yaml", folder / f"seed{seed}", args.timeout_s, *options)
        curves[seed] = rewards(run / "metrics.csv")
        start, final = ends(curves[seed])
        print(f"seed {seed}: {start:.3f} -> {final:.3f} in {time.perf_counter() - started:.0f} s", flush=True)
    return curves


def fit(config: str, run: Path, timeout_s: float, *options: str) -> Path:
    """Runs `rlite fit` into the directory `run`. Raises CalledProcessError, after showing what the run printed."""
    logger = f"--trainer.logger.init_args={{save_dir: {run.parent}, name: {run.name}, version: ''}}"
    command = [sys.executable, "-m", "rlite", "fit", "--config", config, logger, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout_s, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
    done.check_returncode()
    return run


def rewards(metrics_file: Path) -> list[float]:
    with metrics_file.open() as file:
        return [float(row["reward/mean"]) for row in csv.DictReader(file) if row.get("reward/mean")]


def ends(curve: list[float]) -> tuple[float, float]:
    return statistics.fmean(curve[:WINDOW]), statistics.fmean(curve[-WINDOW:])


def summary(curves: dict[int, list[float]]) -> dict[str, Any]:
    """What the JSON line says about the curves."""
    pairs = {seed: ends(curve) for seed, curve in curves.items()}
    start = statistics.fmean(first for first, _ in pairs.values())
    final = statistics.fmean(last for _, last in pairs.values())
    collapsed = [seed for seed, (first, last) in pairs.items() if last < first]
    return {
        "start": round(start, 4),
        "final": round(final, 4),
        "gain": round(final - start, 4),
        "collapsed_seeds": collapsed,
        "learned": final - start >= WANTED_GAIN and not collapsed,
        "curves": {str(seed): [round(value, 4) for value in curve] for seed, curve in curves.items()},
    }


if __name__ == "__main__":
    main()
