"""What the ledger's entries become in a run's metrics: phases of a rollout step, and growth over rollout steps."""

from collections.abc import Iterable

from rlite.memory.ledger import PhaseEntry

_SUMS = ("seconds", "transition_s", "waited_s", "hidden_s", "moved_bytes")
_PEAKS = ("device_peak_bytes", "rss_peak_bytes")
_OF_PHASE = (*_SUMS, *_PEAKS, "host_bytes")


class PhaseMetrics:
    """`perf/phase/{name}/*` and `perf/rss_bytes` of a rollout step.

    A phase that was entered in an earlier step and not in this one is reported with zeros: loggers repeat the last value
    of a metric that is missing.
    """

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}

    def of(self, entries: Iterable[PhaseEntry]) -> dict[str, float]:
        """Seconds and moved bytes are sums, peaks the largest, over the times a phase was entered."""
        metrics = {f"perf/phase/{phase}/{name}": 0.0 for phase in self._seen for name in _OF_PHASE}
        for entry in entries:
            self._seen[entry.phase] = None
            prefix = f"perf/phase/{entry.phase}/"
            for name in _SUMS:
                metrics[prefix + name] = metrics.get(prefix + name, 0.0) + getattr(entry, name)
            for name in _PEAKS:
                metrics[prefix + name] = max(metrics.get(prefix + name, 0.0), float(getattr(entry, name)))
            metrics[prefix + "host_bytes"] = float(sum(entry.host_bytes.values()))
            metrics["perf/rss_bytes"] = float(entry.rss_bytes)
        return metrics


class LeakCheck:
    """Growth of memory from rollout to rollout, always looked at in the same place.

    Args:
        warmup: rollouts before the one that later ones are compared with; caches fill in the first ones.
    """

    def __init__(self, *, warmup: int = 5) -> None:
        self.warmup = warmup
        self._seen = 0
        self._baseline: dict[str, float] = {}

    def growth(self, held_bytes: dict[str, float]) -> dict[str, float]:
        """Fraction by which each of `held_bytes` exceeds what it was after `warmup` rollouts; 0 until then."""
        self._seen += 1
        if self._seen <= self.warmup:
            self._baseline = dict(held_bytes)
        return {name: value / max(self._baseline[name], 1.0) - 1.0 for name, value in held_bytes.items()}
