"""Recomputes every advantage, loss and gradient of a golden file with rlite's own functions.

    python benchmarks/golden.py tests/golden/losses.json

Any batch, group and length works as long as the file has the same format. The last line printed is JSON:
`{"checked": n, "mismatches": [...], "worst": {...}}`; the exit code is 1 when something does not match.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlite import algorithms as alg

CLIP_KEYS = {"eps_low": "clip_low", "eps_high": "clip_high", "dual_clip": "dual_clip"}
CORRECTION_KEYS = {"correction": "correction", "c_min": "correction_min", "c_max": "correction_max"}
LOSS_ARGS = {
    "cispo": {"ratio_min": "ratio_min", "ratio_max": "ratio_max"},
    "sapo": {"tau_pos": "tau_pos", "tau_neg": "tau_neg"},
    "vespo": {name: name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    "dppo_tv": {"delta_low": "delta_low", "delta_high": "delta_high", "cap": "ratio_max"},
    "dppo_kl": {"delta_low": "delta_low", "delta_high": "delta_high", "cap": "ratio_max"},
    "dro": {"beta": "beta"},
}
LOSS_OF = {
    "reinforce": "reinforce",
    "bypass_reinforce": "reinforce",
    "gspo": "gspo",
    "luspo": "gspo",
    "gmpo": "gmpo",
    "rloo_sequence_ratio": "rloo_sequence",
    **{name: name for name in LOSS_ARGS},
}
ADVANTAGE_OF = {
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "batch_std_raw": "batch_std",
    "batch_std_centred": "scale_rl",
    "rloo": "rloo",
    "loo_mean_loo_std": "loo_std",
    "reinforce_pp": "reinforce_pp",
    "reinforce_pp_baseline": "reinforce_pp_baseline",
    "opo": "opo",
    "gpg": "gpg",
    "multi_sum_then_normalize": "grpo",
    "multi_gdpo": "gdpo",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One array compared with the golden one."""

    name: str
    got: Tensor
    want: Tensor
    tolerance: float

    @property
    def error(self) -> float:
        """Largest difference, relative where the golden value exceeds 1; infinite for a wrong shape or a NaN."""
        if self.got.shape != self.want.shape:
            return float("inf")
        error = ((self.got.double() - self.want).abs() / self.want.abs().clamp(min=1.0)).amax()
        return float(torch.nan_to_num(error, nan=torch.inf)) if error.numel() else 0.0


class Golden:
    """The batch of a golden file, padded and flat, in one precision."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float64) -> None:
        self.data = json.loads(path.read_text())
        self.dtype = dtype
        self.tolerance = self.data["meta"]["tolerance"][str(dtype).removeprefix("torch.")]
        self.mask_BT = self.raw("mask").bool()
        self.lengths_B = self.mask_BT.sum(dim=1)
        self.group_B = self.raw("group").long()
        self.truncated_B = self.raw("truncated").bool()

    def raw(self, name: str) -> Tensor:
        return to_tensor(self.data["inputs"][name])

    def flat(self, name: str) -> Tensor:
        return alg.flatten_padded(self.raw(name), self.mask_BT).to(self.dtype)

    def inputs(self, *, rollout: bool = False, ref: bool = False, keep_B: Tensor | None = None) -> alg.LossInputs:
        return alg.LossInputs(
            logprobs_N=self.flat("lp_new").requires_grad_(),
            old_logprobs_N=self.flat("lp_old"),
            rollout_logprobs_N=self.flat("lp_roll") if rollout else None,
            ref_logprobs_N=self.flat("lp_ref") if ref else None,
            entropy_N=self.flat("entropy"),
            advantages_N=alg.expand_rows(self.raw("adv"), self.lengths_B).to(self.dtype),
            row_N=alg.row_index(self.lengths_B),
            lengths_B=self.lengths_B,
            group_tokens_B=alg.group_token_counts(self.lengths_B, self.group_B, keep_B=keep_B),
            keep_B=keep_B,
        )


def to_tensor(values: Any) -> Tensor:
    """fp64, null -> NaN."""

    def clean(value: Any) -> Any:
        return (
            [clean(item) for item in value] if isinstance(value, list) else (float("nan") if value is None else value)
        )

    return torch.tensor(clean(values), dtype=torch.float64)


def advantage_checks(golden: Golden) -> Iterator[Check]:
    for name, want in golden.data["advantages"].items():
        table_BK, weights_K = golden.raw("reward_table"), golden.raw("reward_weights")
        rewards_B = alg.weighted_sum(table_BK, weights_K) if name.startswith("multi_") else golden.raw("rewards")
        want_tensor = to_tensor(want)
        if want_tensor.dim() == 2:
            want_tensor = alg.flatten_padded(want_tensor, golden.mask_BT)
        got = rewards_B
        if name != "multi_weighted_sum":
            config, kl_coef = advantage_config(name)
            got = alg.compute_advantages(
                rewards_B,
                golden.group_B,
                golden.lengths_B,
                config,
                reward_table=table_BK,
                weights=weights_K,
                token_kl_N=kl_coef * (golden.flat("lp_old") - golden.flat("lp_ref")) if kl_coef else None,
            )
        yield Check(f"advantages/{name}", got, want_tensor, golden.tolerance)


def advantage_config(name: str) -> tuple[alg.AlgorithmConfig, float]:
    """(config, KL coefficient in the reward) from a name such as `reinforce_pp_kl0.1_tok` or `grpo_eps1e-4`."""
    args: dict[str, Any] = {}
    if match := re.search(r"_eps([0-9.e-]+)", name):
        args["eps"] = float(match[1])
    if name.endswith("_popvar"):
        args["population_variance"] = True
    kl_match = re.search(r"_kl([0-9.]+)", name)
    base = re.sub(r"_eps[0-9.e-]+|_kl[0-9.]+|_tok|_popvar", "", name)
    return alg.AlgorithmConfig(advantage=ADVANTAGE_OF[base], advantage_args=args), float(
        kl_match[1]
    ) if kl_match else 0.0


def loss_checks(golden: Golden) -> Iterator[Check]:
    for name, entry in golden.data["losses"].items():
        live_N, loss = golden_loss(golden, name, entry["config"])
        loss.backward()
        gradient_BT = alg.unflatten_padded(live_N.grad, golden.mask_BT)
        yield Check(f"losses/{name}/value", loss.detach(), to_tensor(entry["value"]), golden.tolerance)
        yield Check(f"losses/{name}/grad", gradient_BT, to_tensor(entry["grad"]), golden.tolerance)


def golden_loss(golden: Golden, name: str, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(live log-probabilities, loss) of one entry."""
    base, aggregation = name.split("/")
    if base.startswith("kl_"):
        inputs = golden.inputs(ref=True)
        log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
        kl_N = alg.kl_estimate(inputs.logprobs_N, inputs.ref_logprobs_N, config["estimator"], log_ratio_N=log_ratio_N)
        counts = alg.Counts.of(inputs.lengths_B, inputs.group_tokens_B)
        return inputs.logprobs_N, alg.aggregate(kl_N, inputs, counts, aggregation)
    algorithm = alg.AlgorithmConfig(**algorithm_fields(base, aggregation, config))
    keep_B = ~golden.truncated_B if "overlong_filter" in base else None
    behaviour_old = config.get("behaviour") == "old"
    needs_rollout = algorithm.needs_rollout_logprobs or (algorithm.opsm_delta is not None and not behaviour_old)
    inputs = golden.inputs(rollout=needs_rollout, ref=algorithm.kl_coef > 0, keep_B=keep_B)
    if base.startswith("entropy_bonus"):
        inputs.advantages_N.zero_()
    max_tokens = golden.data["inputs"]["max_completion_length"]
    objective = alg.PolicyObjective(algorithm, max_completion_tokens=max_tokens)
    counts = objective.counts(inputs)
    if base.endswith("keep_denominator"):
        counts = alg.Counts.of(inputs.lengths_B, inputs.group_tokens_B)
    threshold = alg.high_entropy_threshold(inputs.entropy_N, algorithm.entropy_top_fraction)
    return inputs.logprobs_N, objective(inputs, counts, entropy_threshold=threshold).loss


def algorithm_fields(base: str, aggregation: str, config: dict[str, Any]) -> dict[str, Any]:
    """`AlgorithmConfig` fields of an entry: from its config, and from its name where the config is silent."""
    prefix = max((key for key in LOSS_OF if base.startswith(key)), key=len, default=None)
    loss = LOSS_OF[prefix] if prefix else "ppo_clip"
    fields: dict[str, Any] = {"loss": loss}
    fields["aggregation"] = "seq_mean_token_mean" if aggregation == "seq_mean" else aggregation
    fields["loss_args"] = {to: config[key] for key, to in LOSS_ARGS.get(loss, {}).items() if key in config}
    fields |= {to: config[key] for key, to in CLIP_KEYS.items() if key in config}
    if loss == "ppo_clip" and base.startswith("dapo"):
        fields.setdefault("clip_high", 0.28)
    fields |= {to: config[key] for key, to in CORRECTION_KEYS.items() if key in config}
    if "c_max" in config:
        fields.setdefault("correction", "token_truncate")
    if config.get("batch_normalize"):
        fields["correction_normalize"] = "batch"
    if config.get("renormalize"):
        fields["correction_normalize"] = "kept"
    if base.startswith("bypass"):
        fields["old_policy"] = "live" if loss == "reinforce" else "rollout"
    if base.endswith("on_policy"):
        fields["old_policy"] = "live"
    if "beta" in config and loss == "ppo_clip":
        fields |= {"kl_coef": config["beta"], "kl_estimator": config.get("estimator", "k3u")}
    if "opsm_delta" in config:
        fields["opsm_delta"] = config["opsm_delta"]
    if "rho" in config:
        fields["entropy_top_fraction"] = config["rho"]
    fields["entropy_coef"] = config.get("entropy_coef", config.get("coef", 0.0))
    return fields


def all_checks(path: Path) -> Iterator[Check]:
    yield from advantage_checks(Golden(path))
    for dtype in (torch.float64, torch.float32):
        for check in loss_checks(Golden(path, dtype)):
            yield Check(f"{str(dtype).removeprefix('torch.')}/{check.name}", check.got, check.want, check.tolerance)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="golden file (JSON)")
    checks = list(all_checks(parser.parse_args().file))
    mismatches = [check for check in checks if check.error > check.tolerance]
    for check in mismatches:
        print(f"{check.name}: got {check.got.tolist()}, expected {check.want.tolist()}, error {check.error:.3g}")
    worst = max(checks, key=lambda check: check.error / check.tolerance)
    result = {
        "checked": len(checks),
        "mismatches": [check.name for check in mismatches],
        "worst": {"name": worst.name, "error": worst.error, "tolerance": worst.tolerance},
    }
    print(json.dumps(result))
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
