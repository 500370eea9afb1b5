"""Kill -9 at random moments of a run, resume, and compare with the run that nobody killed.

    python benchmarks/kill_resume.py --kills 10
    python benchmarks/kill_resume.py --kills 10 --asynchronous --seed 1

A small GRPO run (the demo's model, two processes) saves after every rollout step. Its process group is killed while it
starts and in every phase of a step, saving among them, each at a random moment, and resumed with `--ckpt_path last`; before
there is a checkpoint it starts again. The last line is JSON: `identical` says that samples.jsonl, and loss, gradient norm
and the like of every step, are equal to those of the undisturbed run, byte for byte.
"""

import argparse
import collections
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

ROOT = Path(__file__).resolve().parents[1]
RUN = (
    "fit", "--config", "configs/grpo_demo_cpu.yaml", "--data.batch_size=4", "--model.batch.group_size=4",
    "--model.init_from=null", "--model.batch.minibatches=2",
    "--model.rewards=[{fn: soft_overlong, options: {max_tokens: 4, cache_tokens: 4}}]",
    "--model.optimizer={lr: 1.0e-3, warmup_steps: 3, schedule: linear, total_steps: 60}",
)  # fmt: skip
MOMENTS = ("start", "generate", "to generate", "logprob", "train", "to train", "save", "renaming")
COMPARED = ("loss", "reward/mean", "grad_norm", "entropy", "lr", "rollout_step")
STARTED: list[subprocess.Popen] = []
"""None of them outlives this program."""
_RECORD_BYTES = 32
_POLL_S = 0.0005


class Watch(Callback):
    """Writes into `path` what rank 0 is doing now; the parent reads it, also after the process is gone."""

    def __init__(self, path: str) -> None:
        self.path = path

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not trainer.is_global_zero:
            return
        from rlite.strategies import pending

        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        phases, saver = trainer.strategy.phases, trainer.strategy.saver
        enter, save, put_in_place = phases.enter, saver.save, pending.put_in_place

        def watched_enter(phase: Any) -> None:
            self._note(f"to {phase}")
            enter(phase)
            self._note(phase)

        def watched_save(*args: Any) -> None:
            self._note("save")
            save(*args)
            self._note("train")

        def watched_put_in_place(new: Path, path: Path) -> None:
            self._note("renaming")
            put_in_place(new, path)

        phases.enter, saver.save, pending.put_in_place = watched_enter, watched_save, watched_put_in_place

    def _note(self, moment: str) -> None:
        os.pwrite(self._file, moment.ljust(_RECORD_BYTES).encode(), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true", help="saves in the background")
    parser.add_argument("--timeout_s", type=float, default=300, help="of each start")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlite-kill-") as folder:
        try:
            print(json.dumps(measure(args, Path(folder))))
        finally:
            for process in STARTED:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rollouts = 2 * args.kills + 2  # a resumed run does at most two before it is killed
    undisturbed, killed = Launch(args, folder / "undisturbed", rollouts), Launch(args, folder / "killed", rollouts)
    lasting_s = undisturbed.finish_watched()
    choose = random.Random(args.seed)
    moments = [MOMENTS[k % len(MOMENTS)] for k in range(args.kills)]
    choose.shuffle(moments)
    hit: collections.Counter[str] = collections.Counter()
    for number, moment in enumerate(moments):
        delay_s = choose.uniform(0.0, 8.0 if moment == "start" else 0.8 * lasting_s.get(moment, 0.0))
        hit[killed.kill(moment, occurrence=choose.randint(1, 2), delay_s=delay_s)] += 1
        print(f"kill {number + 1} meant for {moment}: {dict(hit)}, saved: {killed.saved()}", file=sys.stderr)
    killed.finish()
    identical = {
        "samples": (killed.folder / "samples.jsonl").read_bytes()
        == (undisturbed.folder / "samples.jsonl").read_bytes(),
        "metrics": killed.metrics() == undisturbed.metrics(),
    }
    return {
        "kills": args.kills,
        "resumes": killed.resumes,
        "starts_without_checkpoint": killed.starts - killed.resumes,
        "phases_hit": dict(hit),
        "rollouts": rollouts,
        "asynchronous": args.asynchronous,
        "seed": args.seed,
        "identical": all(identical.values()),
        "compared": {**identical, "columns": COMPARED, "rows": len(killed.metrics())},
    }


class Launch:
    """One run, however often it is started."""

    def __init__(self, args: argparse.Namespace, folder: Path, rollouts: int) -> None:
        self.folder, self.timeout_s = folder, args.timeout_s
        self.watched, self.output = (folder.with_name(f"{folder.name}.{what}") for what in ("moment", "log"))
        saving = f"{{every_n_rollouts: 1, asynchronous: {str(args.asynchronous).lower()}}}"
        self.arguments = (
            *RUN,
            f"--trainer.limit_train_batches={rollouts}",
            f"--trainer.logger.init_args={{save_dir: {folder.parent}, name: {folder.name}, version: ''}}",
            f"--trainer.callbacks+={{class_path: rlite.callbacks.RolloutCheckpoint, init_args: {saving}}}",
            f"--trainer.callbacks+={{class_path: kill_resume.Watch, init_args: {{path: {self.watched}}}}}",
        )
        self.starts = self.resumes = 0

    def finish(self) -> None:
        process = self._start()
        process.wait(timeout=self.timeout_s)
        if process.returncode != 0:
            raise RuntimeError(f"exit code {process.returncode}\n{self.output.read_text()}")

    def finish_watched(self) -> dict[str, float]:
        """The same; returns the mean seconds of each moment."""
        process, before, began_s = self._start(), "start", time.monotonic()
        seconds, times = collections.Counter(), collections.Counter()
        deadline = time.monotonic() + self.timeout_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run did not end within {self.timeout_s} s\n{self.output.read_text()}")
            moment, now_s = self._moment(), time.monotonic()
            seconds[before] += now_s - began_s
            times[moment] += moment != before
            before, began_s = moment, now_s
            time.sleep(_POLL_S)
        if process.returncode != 0:
            raise RuntimeError(f"exit code {process.returncode}\n{self.output.read_text()}")
        return {moment: seconds[moment] / max(times[moment], 1) for moment in seconds}

    def kill(self, moment: str, *, occurrence: int, delay_s: float) -> str:
        """Starts the run and kills it when it has come to `moment` so often; returns what it was doing then."""
        process = self._start()
        if moment != "start":
            for _ in range(occurrence):
                self._wait_for(moment, process)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return self._moment()

    def saved(self) -> str:
        """The newest complete checkpoint."""
        markers = sorted(self.folder.glob("checkpoints/*.ckpt*/COMPLETE"), key=lambda marker: marker.stat().st_mtime)
        return markers[-1].parent.resolve().name if markers else "none"

    def metrics(self) -> list[dict[str, str]]:
        with (self.folder / "metrics.csv").open() as file:
            return [{key: row[key] for key in COMPARED} for row in csv.DictReader(file)]

    def _start(self) -> subprocess.Popen:
        self.watched.unlink(missing_ok=True)
        self.starts += 1
        resume = []
        if any(self.folder.glob("checkpoints/*.ckpt*/COMPLETE")):
            self.resumes += 1
            resume = ["--ckpt_path=last"]
        paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        with self.output.open("w") as output:  # a pipe that nobody reads would fill up and stop the run
            process = subprocess.Popen(
                [sys.executable, "-m", "rlite", *self.arguments, *resume],
                cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths}, start_new_session=True,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        STARTED.append(process)
        return process

    def _wait_for(self, moment: str, process: subprocess.Popen) -> None:
        """Until the run comes to `moment` next."""
        deadline = time.monotonic() + self.timeout_s
        for is_there in (False, True):
            while (self._moment() == moment) is not is_there:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the run ended or hung before {moment}\n{self.output.read_text()}")
                time.sleep(_POLL_S)

    def _moment(self) -> str:
        text = self.watched.read_text().strip() if self.watched.exists() else ""
        return text or "start"


if __name__ == "__main__":
    main()
