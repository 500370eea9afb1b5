"""The main job in one command: a supervised warm start, then GRPO, then a verdict.

A tiny random DeepSeek-V3 learns sums on two CPU processes: Megatron-core trains it with expert parallelism 2, vLLM
generates with tensor parallelism 2, in the same two processes.
"""

import csv
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RLITE = [sys.executable, "-m", "rlite"]


def main() -> None:
    started_s = time.perf_counter()
    overrides = sys.argv[1:]
    print("warm start: supervised fine-tuning (configs/sft_demo_cpu.yaml)", flush=True)
    sft_dir = run("sft_demo_cpu")
    print("\nreinforcement learning: GRPO (configs/grpo_demo_cpu.yaml)", flush=True)
    run_dir = run("grpo_demo_cpu", f"--model.init_from={sft_dir}", *overrides)
    rewards = reward_curve(run_dir / "metrics.csv")
    fifth = max(1, len(rewards) // 5)
    start, end = (sum(part) / len(part) for part in (rewards[:fifth], rewards[-fifth:]))
    print(f"\nrun directory: {run_dir.relative_to(ROOT)}   ({time.perf_counter() - started_s:.0f} s in all)")
    print(f"verdict: reward {start:.3f} -> {end:.3f} ({end - start:+.3f}) over {len(rewards)} rollouts")


def run(name: str, *overrides: str) -> Path:
    """Runs a config and returns the directory it wrote; exits when it fails."""
    version = f"{time.strftime('%Y%m%d-%H%M%S')}"
    command = [*RLITE, "fit", "--config", f"configs/{name}.yaml", f"--trainer.logger.init_args.version={version}"]
    result = subprocess.run([*command, *overrides], cwd=ROOT)
    if result.returncode:
        sys.exit(result.returncode)
    return ROOT / "runs" / name / version


def reward_curve(path: Path) -> list[float]:
    """Mean training reward of every rollout."""
    with path.open() as file:
        return [float(row["reward/mean"]) for row in csv.DictReader(file) if row.get("reward/mean")]


if __name__ == "__main__":
    main()
