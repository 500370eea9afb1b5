"""The algorithm layer: pure functions on flat token tensors. Knows nothing of Lightning, Megatron or vLLM."""

from rlite.algorithms import losses as losses
from rlite.algorithms import whitening as whitening
from rlite.algorithms.advantages import AdvantageInputs, GroupStatistics, compute_advantages
from rlite.algorithms.aggregation import AGGREGATIONS, aggregate
from rlite.algorithms.config import AlgorithmConfig
from rlite.algorithms.controllers import AdaptiveEntropy, AdaptiveKL, Coefficients
from rlite.algorithms.corrections import CORRECTIONS, correction_weights, opsm_mask
from rlite.algorithms.entropy import high_entropy_mask, high_entropy_threshold
from rlite.algorithms.flops import ModelShape, forward_flops, generate_flops, mfu, train_flops, update_metrics
from rlite.algorithms.inputs import Counts, LossInputs, group_token_counts
from rlite.algorithms.kl import KL_ESTIMATORS, kl_estimate
from rlite.algorithms.losses import PolicyLoss
from rlite.algorithms.metrics import add_metric_sums, is_max_metric, summarize_metrics
from rlite.algorithms.mismatch import mismatch_metrics
from rlite.algorithms.moe import expert_load, load_balancing_loss, load_violation, routing_mismatch
from rlite.algorithms.objective import PolicyObjective
from rlite.algorithms.presets import PRESETS, algorithm_config
from rlite.algorithms.registry import ADVANTAGES, LOSSES, register_advantage, register_loss
from rlite.algorithms.rewards import shape_rewards, soft_overlong, stop_properly, trainable_rows, weighted_sum
from rlite.algorithms.rollout_metrics import (
    advantage_metrics,
    completion_metrics,
    pass_at_k,
    reward_metrics,
    reward_table_metrics,
)
from rlite.algorithms.rows import expand_rows, flatten_padded, row_index, unflatten_padded

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LOSSES",
    "PRESETS",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "AdvantageInputs",
    "AlgorithmConfig",
    "Coefficients",
    "Counts",
    "GroupStatistics",
    "LossInputs",
    "ModelShape",
    "PolicyLoss",
    "PolicyObjective",
    "add_metric_sums",
    "advantage_metrics",
    "aggregate",
    "algorithm_config",
    "completion_metrics",
    "compute_advantages",
    "correction_weights",
    "expand_rows",
    "expert_load",
    "flatten_padded",
    "forward_flops",
    "generate_flops",
    "group_token_counts",
    "high_entropy_mask",
    "high_entropy_threshold",
    "is_max_metric",
    "kl_estimate",
    "load_balancing_loss",
    "load_violation",
    "mfu",
    "mismatch_metrics",
    "opsm_mask",
    "pass_at_k",
    "register_advantage",
    "register_loss",
    "reward_metrics",
    "reward_table_metrics",
    "routing_mismatch",
    "row_index",
    "shape_rewards",
    "soft_overlong",
    "stop_properly",
    "summarize_metrics",
    "train_flops",
    "trainable_rows",
    "unflatten_padded",
    "update_metrics",
    "weighted_sum",
]
