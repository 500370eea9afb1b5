"""What a run's trace says of memory, and a plan of the same run beside it."""

import json
from pathlib import Path

import pytest
import yaml

from rlite.memory.phases import Phase
from rlite.plan import Cluster
from rlite.plan.config import job_from_config
from rlite.plan.memory import plan_memory
from tests.integration.runs import metrics

TRACE = "--trainer.callbacks+=rlite.callbacks.Trace"


def held(folder: Path) -> dict[tuple[int, str], dict[str, int]]:
    """What residents held on the device by (rank, phase), from the trace; the last time each phase was entered."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    phases = [(e["pid"], e["name"]) for e in events if e["ph"] == "X" and e["tid"] == 0 and "args" in e]
    counters = [(e["pid"], e["args"]) for e in events if e["name"] == "residents"]
    assert [rank for rank, _ in phases] == [rank for rank, _ in counters]
    return {phase: args for phase, (_, args) in zip(phases, counters, strict=True)}


def assert_plan_agrees(folder: Path) -> None:
    """Every resident and every copy within 5%, the residents' peak within 10%, on every rank and in every phase."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    classes = plan_memory(job_from_config(config, cluster=Cluster(world_size=2))).classes
    measured, (first, second, *_) = held(folder), metrics(folder)
    for rank_class in classes:
        for phase in rank_class.phases:
            for rank in rank_class.ranks:
                for name, nbytes in measured[rank, phase.phase].items():
                    where = (rank, phase.phase, name)
                    assert phase.residents.get(name, 0) == pytest.approx(nbytes, rel=0.05), where
    for phase in classes[0].phases:
        key, row = f"perf/phase/{phase.phase}/", first if phase.phase is Phase.VACANT else second
        planned = [c.phase(phase.phase) for c in classes]
        assert row[key + "moved_bytes"] == pytest.approx(max(p.moved_bytes for p in planned), rel=0.05), phase.phase
        peak = max(max(p.transition_peak_bytes, sum(p.residents.values())) for p in planned)
        assert row[key + "device_peak_bytes"] == pytest.approx(peak, rel=0.10), phase.phase
        assert row[key + "host_bytes"] == pytest.approx(max(p.host_bytes for p in planned), rel=0.05), phase.phase
