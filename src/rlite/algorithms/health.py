"""What the metrics of a rollout step say about the health of a run, and what to do about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRule:
    """One symptom. `when` is only asked when every metric of `needs` was logged."""

    name: str
    needs: tuple[str, ...]
    when: Callable[[Metrics], bool]
    symptom: str
    """What was seen: a format string whose `{0}`, `{1}` are the metrics of `needs`, in order."""
    remedy: str


RULES: tuple[HealthRule, ...] = (
    HealthRule(
        name="entropy_collapse",
        needs=("entropy", "entropy/peak"),
        when=lambda m: m["entropy"] < min(0.1 * m["entropy/peak"], 0.1),
        symptom="entropy {0:.3f} nats, less than a tenth of its peak {1:.3f}: the policy stops exploring",
        remedy="raise model.algorithm.clip_high (dapo: 0.28), set entropy_coef and entropy_target, or lower model.optimizer.lr",
    ),
    HealthRule(
        name="ess",
        needs=("rollout/ess",),
        when=lambda m: m["rollout/ess"] < 0.3,
        symptom="effective sample size {0:.2f} < 0.3: the engine samples from another policy than the one trained",
        remedy="set model.algorithm.correction: token_truncate, correction_max: 2.0; for MoE also router_replay: R3",
    ),
    HealthRule(
        name="mismatch_kl",
        needs=("rollout/kl_k1", "rollout/kl_k3"),
        when=lambda m: max(abs(m["rollout/kl_k1"]), m["rollout/kl_k3"]) > 0.1,
        symptom="KL between engine and trainer {0:.3f} (k1), {1:.3f} (k3) > 0.1",
        remedy="give engine and trainer one dtype, sample without top_p, top_k, min_p; if it grows, the weight sync is broken",
    ),
    HealthRule(
        name="degenerate_groups",
        needs=("frac_reward_zero_std",),
        when=lambda m: m["frac_reward_zero_std"] >= 1.0,
        symptom="in {0:.0%} of the groups all rewards are equal: nothing was learned from this step",
        remedy="use easier or harder prompts, a larger model.batch.group_size, or max_sampling_rounds of the rollout callback",
    ),
    HealthRule(
        name="clip_fraction",
        needs=("clip_ratio/region_mean",),
        when=lambda m: m["clip_ratio/region_mean"] > 0.3,
        symptom="{0:.0%} of the policy loss is clipped: updates go further than the trust region",
        remedy="lower model.optimizer.lr, model.batch.minibatches or model.batch.epochs",
    ),
    HealthRule(
        name="truncated",
        needs=("completions/clipped_ratio",),
        when=lambda m: m["completions/clipped_ratio"] > 0.5,
        symptom="{0:.0%} of the completions hit the length limit and have no end",
        remedy="raise sampling.max_tokens, or set model.algorithm.overlong_filter: true",
    ),
    HealthRule(
        name="skipped_updates",
        needs=("updates_skipped",),
        when=lambda m: m["updates_skipped"] > 0,
        symptom="{0:.0f} optimizer steps were skipped: loss or gradients were not finite",
        remedy="lower model.optimizer.lr or model.optimizer.clip_grad",
    ),
)


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """A rule that applies, in words."""

    name: str
    text: str


class HealthMonitor:
    """Checks `RULES` after each step; remembers the highest entropy of the run."""

    def __init__(self) -> None:
        self.peak_entropy = 0.0

    def check(self, metrics: Metrics) -> list[HealthFinding]:
        """Findings of one step, from its logged metrics."""
        self.peak_entropy = max(self.peak_entropy, metrics.get("entropy", 0.0))
        seen = {**metrics, "entropy/peak": self.peak_entropy}
        return [
            HealthFinding(rule.name, f"{rule.symptom.format(*(seen[key] for key in rule.needs))}. {rule.remedy}")
            for rule in RULES
            if all(key in seen for key in rule.needs) and rule.when(seen)
        ]
