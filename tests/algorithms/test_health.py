"""Symptoms in metrics become findings; healthy metrics become none."""

import pytest

from rlite.algorithms.health import HealthMonitor

HEALTHY = {
    "entropy": 0.8,
    "rollout/ess": 0.97,
    "rollout/kl_k1": 1e-4,
    "rollout/kl_k3": 1e-3,
    "frac_reward_zero_std": 0.4,
    "clip_ratio/region_mean": 0.02,
    "completions/clipped_ratio": 0.1,
    "updates_skipped": 0.0,
}


def names(monitor: HealthMonitor, **changes: float) -> list[str]:
    return [finding.name for finding in monitor.check(HEALTHY | changes)]


def test_a_healthy_step_has_no_findings() -> None:
    assert names(HealthMonitor()) == []


@pytest.mark.parametrize(
    ("metric", "value", "name", "said"),
    [
        ("rollout/ess", 0.29, "ess", "correction: token_truncate"),
        ("rollout/kl_k1", -0.11, "mismatch_kl", "weight sync"),
        ("rollout/kl_k3", 0.11, "mismatch_kl", "weight sync"),
        ("frac_reward_zero_std", 1.0, "degenerate_groups", "max_sampling_rounds"),
        ("clip_ratio/region_mean", 0.31, "clip_fraction", "model.optimizer.lr"),
        ("completions/clipped_ratio", 0.6, "truncated", "sampling.max_tokens"),
        ("updates_skipped", 1.0, "skipped_updates", "not finite"),
    ],
)
def test_each_symptom_is_found_alone_and_names_its_remedy(metric: str, value: float, name: str, said: str) -> None:
    findings = HealthMonitor().check(HEALTHY | {metric: value})
    assert [finding.name for finding in findings] == [name]
    assert said in findings[0].text
    assert "\n" not in findings[0].text


def test_entropy_collapses_against_its_own_peak() -> None:
    monitor = HealthMonitor()
    assert names(monitor, entropy=0.05) == [], "a policy that starts sharp has not collapsed"
    assert names(monitor, entropy=0.9) == []
    assert names(monitor, entropy=0.095) == [], "above a tenth of the peak"
    assert names(monitor, entropy=0.085) == ["entropy_collapse"]


def test_a_fall_to_a_still_broad_policy_is_no_collapse() -> None:
    monitor = HealthMonitor()
    names(monitor, entropy=4.0)
    assert names(monitor, entropy=0.3) == []


def test_metrics_that_were_not_logged_are_not_judged() -> None:
    assert HealthMonitor().check({"loss": 1.0}) == []
