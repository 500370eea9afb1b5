"""Named settings of `AlgorithmConfig`, one for each published recipe. `docs/algorithms.md` has formulas and papers."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rlite.algorithms.config import KEY, AlgorithmConfig

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo_kl": {"kl_coef": 0.04},
    "r1": {"clip_low": 10.0, "clip_high": 10.0, "kl_coef": 0.001},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean", "drop_zero_variance": True},
    "gspo": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "luspo": {"loss": "gspo", "clip_low": 2e-3, "clip_high": 2.5e-3, "aggregation": "seq_mean_token_sum"},
    "cispo": {"loss": "cispo", "aggregation": "token_mean"},
    "scale_rl": {
        "loss": "cispo",
        "advantage": "scale_rl",
        "aggregation": "prompt_mean_token_mean",
        "drop_zero_variance": True,
    },
    "sapo": {"loss": "sapo"},
    "gmpo": {"loss": "gmpo"},
    "vespo": {"loss": "vespo", "aggregation": "token_mean"},
    "dppo": {"loss": "dppo_tv", "aggregation": "token_mean"},
    "rloo": {"loss": "rloo_sequence", "advantage": "rloo", "kl_coef": 0.05, "kl_in_reward": True},
    "reinforce_pp": {"advantage": "reinforce_pp", "aggregation": "token_mean"},
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "aggregation": "token_mean",
        "clip_high": 0.27,
        "correction": "token_mask",
        "correction_min": 0.5,
        "correction_max": 5.0,
        "truncation_reward_scale": 0.0,
    },
    "lite_ppo": {"advantage": "batch_std", "aggregation": "token_mean"},
    "ppo": {"aggregation": "token_mean"},
    "opo": {"loss": "reinforce", "advantage": "opo", "aggregation": "token_mean"},
    "gpg": {"loss": "reinforce", "advantage": "gpg", "aggregation": "token_mean"},
    "intellect2": {"dual_clip": 4.0, "kl_coef": 0.001, "aggregation": "token_mean"},
    "deepseek_v32": {"advantage": "dr_grpo", "kl_coef": 0.001, "kl_estimator": "k3u", "opsm_delta": 0.5},
    "mini_rl": {
        "advantage": "dr_grpo",
        "clip_high": 0.27,
        "aggregation": "seq_mean_token_sum",
        "correction": "token_truncate",
        "correction_max": 5.0,
    },
}


def algorithm_config(spec: str | Mapping[str, Any] | AlgorithmConfig = "grpo") -> AlgorithmConfig:
    """An `AlgorithmConfig` from a preset's name, or from a mapping of fields that may start from `preset: name`.

    Raises ValueError for an unknown preset or field, with the nearest match.
    """
    if isinstance(spec, AlgorithmConfig):
        return spec
    overrides = {"preset": spec} if isinstance(spec, str) else dict(spec)
    preset = overrides.pop("preset", "grpo")
    if preset not in PRESETS:
        raise ValueError(f"{KEY}.preset = {preset!r}: unknown; {_nearest(preset, PRESETS)}known: {', '.join(PRESETS)}")
    known = [spec.name for spec in fields(AlgorithmConfig)]
    for name in overrides:
        if name not in known:
            raise ValueError(f"{KEY}.{name}: unknown field; {_nearest(name, known)}known: preset, {', '.join(known)}")
    return AlgorithmConfig(**PRESETS[preset] | overrides)


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""
