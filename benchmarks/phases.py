"""What memory offload gives: the demo with and without it, rollout by rollout in turns, in one run under one device budget.

    python benchmarks/phases.py
    python benchmarks/phases.py --device_budget_mib 29      # a small device: the KV cache is what is short

The last line is JSON, of the rank with the most bytes. Peaks are compared with the same KV cache, tokens in the KV cache and
throughput under the same budget: what a rank holds without offload, or `--device_budget_mib`. On a CPU device bytes are
those of residents' storages.

Throughput: neighbouring rollouts with and without offload, in changing order, sample the same completions; what counts is the
median of the pairs' ratios, with quartiles. On a CPU its clock is the CPU time of the process, which other processes of the
machine slow down less than the wall clock.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from rlite.memory import DeviceBudget, OffloadPolicy, Phase, PhaseEntry
from rlite.memory.phases import GRADIENTS, OPTIMIZER, POLICY, REFERENCE

ROOT = Path(__file__).resolve().parents[1]
TRAINING = (POLICY, GRADIENTS, OPTIMIZER, REFERENCE)
MODES = ("same_cache_without", "same_cache_with", "without", "with")
TURNS = MODES + MODES[::-1]
"""One rollout after the other. What else the machine does is the same for all; who goes first changes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo_demo_cpu.yaml")
    parser.add_argument("--rollouts", type=int, default=48, help="the first 8 are not counted")
    parser.add_argument("--device_budget_mib", type=float, help="of a rank; by default what it holds without offload")
    parser.add_argument("--timeout_s", type=float, default=1200)
    args = parser.parse_args()
    if args.rollouts < 2 * len(TURNS) or args.rollouts % len(MODES):
        parser.error(f"--rollouts {args.rollouts}: at least {2 * len(TURNS)}, and a multiple of {len(MODES)}")
    with tempfile.TemporaryDirectory(prefix="rlite-phases-") as folder:
        result = Path(folder) / "result.json"
        run(args, Path(folder), result)
        print(json.dumps(json.loads(result.read_text())))


def run(args: argparse.Namespace, folder: Path, result: Path) -> None:
    budget = "null" if args.device_budget_mib is None else int(args.device_budget_mib * 2**20)
    command = [
        *(sys.executable, "-m", "rlite", "fit", "--config", args.config, "--model.init_from=null"),
        "--model.optimizer.lr=0",  # completions stay as long as they are
        f"--trainer.limit_train_batches={args.rollouts}",
        "--trainer.enable_checkpointing=false",
        f"--trainer.logger.init_args={{save_dir: {folder}, name: run, version: ''}}",
        f"--trainer.callbacks+={{class_path: phases.InTurns, init_args: {{result: {result}, budget_bytes: {budget}}}}}",
    ]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=args.timeout_s)


@dataclass(frozen=True, slots=True)
class SameCache:
    """A budget that always leaves the same room for the KV cache."""

    nbytes: int

    def free_bytes(self, kind: Any, *, held_bytes: int) -> int:
        return self.nbytes


@dataclass(slots=True)
class Step:
    """One rollout."""

    mode: str
    entries: list[PhaseEntry] = field(default_factory=list)
    kv_tokens: int = 0
    sampled_tokens: int = 0
    """By this rank's engine."""
    generate_s: float = 0.0
    """In the engine, by the clock of the comparison."""

    def entry(self, phase: Phase) -> PhaseEntry:
        return next(entry for entry in self.entries if entry.phase == phase)

    @property
    def peak_bytes(self) -> int:
        return max(entry.device_peak_bytes for entry in self.entries)

    @property
    def tokens_per_s(self) -> float:
        return self.sampled_tokens / self.generate_s


class InTurns(Callback):
    """Runs every rollout in another mode and writes what they held."""

    def __init__(self, result: str, budget_bytes: int | None = None) -> None:
        self.result = Path(result)
        self.budget_bytes = budget_bytes
        self.steps: list[Step] = []
        self.prompts: Any = None
        self.requests: Any = None
        """Of the last rollout, with their seeds."""
        self.clock: Callable[[], float] = time.process_time

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # First of all callbacks: the mode must be set before the rollout begins.
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, self)
        self.strategy = trainer.strategy
        if self.strategy.phases.ledger.kind.is_accelerator:
            self.clock = time.perf_counter  # the process only waits for the device
        self.strategy.phases.ledger.listeners.append(self._entered)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        phases, mode = self.strategy.phases, TURNS[batch_idx % len(TURNS)]
        if _second_of_pair(batch_idx):
            batch.prompts = self.prompts
        self.prompts = batch.prompts
        if batch_idx:
            phases.offload_policy = OffloadPolicy(name="full")
            self.strategy.enter(Phase.IDLE)  # from here all modes start alike, with the engine asleep
        self.steps.append(Step(mode))
        with_offload = not mode.endswith("without")
        phases.offload_policy = OffloadPolicy(name="full" if with_offload else "none")
        if not with_offload:
            phases.residents[GRADIENTS].onload()
        if mode in ("with", "without"):
            phases.budget = DeviceBudget(limit_bytes=self.budget_bytes or self.steps[0].peak_bytes)
        else:
            rollout = next(callback for callback in trainer.callbacks if hasattr(callback, "engine_config"))
            phases.budget = SameCache(rollout.engine_config.kv_cache_memory_bytes)

    def _entered(self, entry: PhaseEntry) -> None:
        if self.steps and entry.phase in (Phase.GENERATE, Phase.LOGPROB, Phase.TRAIN):
            self.steps[-1].entries.append(entry)
        if self.steps and entry.phase == Phase.GENERATE:
            self.steps[-1].kv_tokens = self.strategy.engine.kv_tokens
            if len(self.steps) == 1:
                self._watch(self.strategy.engine)

    def _watch(self, engine: Any) -> None:
        generate = engine.generate

        def timed(requests: Any, **kwargs: Any) -> Any:
            self.requests = requests = self.requests if _second_of_pair(len(self.steps) - 1) else requests
            started_s = self.clock()
            completions = generate(requests, **kwargs)
            self.steps[-1].generate_s += self.clock() - started_s
            self.steps[-1].sampled_tokens += sum(len(completion.token_ids) for completion in completions)
            return completions

        engine.generate = timed

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        facts = summary(self.steps[len(TURNS) :]) | {"throughput_clock": self.clock.__name__}
        facts["device_budget_bytes"] = self.budget_bytes or facts["peak_bytes_without"]
        ranks: list[Any] = [facts] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(ranks, facts)
        if trainer.is_global_zero:
            self.result.write_text(json.dumps(max(ranks, key=lambda facts: facts["peak_bytes_with"])))


def _second_of_pair(rollout: int) -> bool:
    return rollout % 2 == 1


def summary(steps: list[Step]) -> dict[str, Any]:
    """Peaks are the highest of a mode's rollouts, cache, times and speeds the medians."""
    of_mode = {mode: [step for step in steps if step.mode == mode] for mode in MODES}
    peak = {mode: max(step.peak_bytes for step in of_mode[mode]) for mode in MODES}
    tokens = {mode: int(statistics.median(step.kv_tokens for step in of_mode[mode])) for mode in MODES}
    speed = {mode: statistics.median(step.tokens_per_s for step in of_mode[mode]) for mode in MODES}
    pairs = zip(of_mode["with"], of_mode["without"], strict=True)
    low, ratio, high = statistics.quantiles(with_.tokens_per_s / without.tokens_per_s for with_, without in pairs)
    offloaded, generate = of_mode["with"], Phase.GENERATE
    held = [step.entry(generate).device_bytes.get(name, 0) for step in offloaded for name in TRAINING]
    copies = [move for step in offloaded for entry in step.entries for move in entry.moves if move.copied_bytes]
    entered = {entry.phase: [step.entry(Phase(entry.phase)) for step in offloaded] for entry in offloaded[0].entries}
    return {
        "train_state_bytes_in_generate": max(held),
        "peak_bytes_with": peak["same_cache_with"],
        "peak_bytes_without": peak["same_cache_without"],
        "peak_ratio": round(peak["same_cache_with"] / peak["same_cache_without"], 3),
        "kv_tokens_with": tokens["with"],
        "kv_tokens_without": tokens["without"],
        "kv_tokens_ratio": round(tokens["with"] / tokens["without"], 3),
        "tokens_per_s_with": round(speed["with"], 1),
        "tokens_per_s_without": round(speed["without"], 1),
        "throughput_ratio": round(ratio, 3),
        "throughput_ratio_quartiles": [round(low, 3), round(high, 3)],
        "throughput_pairs": len(offloaded),
        "transition_s": {p: round(statistics.median(e.transition_s for e in es), 4) for p, es in entered.items()},
        "waited_s": {p: round(statistics.median(e.waited_s for e in es), 4) for p, es in entered.items()},
        "hidden_s": {p: round(statistics.median(e.hidden_s for e in es), 4) for p, es in entered.items()},
        "moved_bytes": {p: int(statistics.median(e.moved_bytes for e in es)) for p, es in entered.items()},
        "gb_per_s": round(sum(m.copied_bytes for m in copies) / sum(m.seconds for m in copies) / 1e9, 3),
    }


if __name__ == "__main__":
    main()
