"""`AlgorithmConfig`: everything about the objective that a YAML file can say (`model.algorithm.<field>`)."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlite.algorithms.aggregation import AGGREGATIONS, Aggregation
from rlite.algorithms.corrections import CORRECTIONS, CorrectionMode
from rlite.algorithms.kl import KL_ESTIMATORS, KLEstimator
from rlite.algorithms.registry import ADVANTAGES, LOSSES

KEY = "model.algorithm"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """Defaults are GRPO without KL. `algorithm_config("dapo")` gives the presets. Raises ValueError naming the key."""

    loss: str = "ppo_clip"
    """Policy loss: a registered name or a dotted path."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Further options of the loss."""
    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low. None: the loss's own default."""
    clip_high: float | None = None
    """The ratio is clipped above 1 + clip_high. None: the loss's own default."""
    dual_clip: float | None = None
    """Bound of the ratio for negative advantages, > 1 + clip_high, usually 3. None: unbounded."""
    aggregation: Aggregation = "seq_mean_token_mean"
    """How token losses become one loss."""
    old_policy: Literal["trainer", "rollout", "live"] = "trainer"
    """Denominator of the ratio: the trainer's own log-probabilities, the engine's as sampled (saves a forward pass, but
    the ratio then contains the train/infer mismatch), or the live ones (ratio 1: plain policy gradient)."""

    advantage: str = "grpo"
    """Advantage estimator: a registered name or a dotted path."""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """Options of the estimator."""

    kl_coef: float = 0.0
    """Weight of KL(policy || reference). 0: no reference model is loaded."""
    kl_estimator: KLEstimator = "k3"
    kl_in_reward: bool = False
    """Subtract the KL (k1) from the reward instead of adding it to the loss."""
    kl_target: float | None = None
    """Adapt kl_coef so that the KL approaches this. None: fixed."""
    kl_horizon: int = 10_000
    """Completions over which kl_coef adapts."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    entropy_target: float | None = None
    """Adapt entropy_coef so that the entropy (nats) stays above this. None: fixed."""
    entropy_top_fraction: float = 1.0
    """Only this fraction of the tokens, those of the highest entropy, gets a policy gradient (0.2: the 80/20 rule)."""

    correction: CorrectionMode = "none"
    """Weight for the mismatch between trainer and engine, w = exp(old - rollout)."""
    correction_min: float | None = None
    """Lower bound of the ratio trainer / engine. None: unbounded."""
    correction_max: float | None = None
    """Upper bound of the ratio trainer / engine. None: unbounded."""
    correction_normalize: Literal["none", "batch", "kept"] = "none"
    """`batch`: divide weights by their global mean. `kept`: rejected tokens leave the denominators too."""
    veto_ratio: float | None = None
    """Reject a row that has any token with w below this (1e-4)."""
    opsm_delta: float | None = None
    """Off-policy sequence masking (DeepSeek-V3.2): drop rows with a negative advantage whose mean log(behaviour / live)
    exceeds this. Behaviour is the engine when it recorded log-probabilities, else the old policy."""

    router_replay: Literal["none", "R2", "R3"] = "none"
    """MoE: which experts the trainer sends tokens to in the old policy's pass and in the updates. `R3`: those that the engine
    chose while sampling. `R2`: those that the trainer chose before the first update. The reference always chooses itself."""

    overlong_filter: bool = False
    """Truncated completions are not trained on (they stay in the baseline)."""
    drop_zero_variance: bool = False
    """Groups whose rewards are all equal leave the denominators."""
    overlong_buffer_tokens: int = 0
    """Soft punishment over the last so many tokens before the length limit (DAPO). 0: off."""
    overlong_penalty: float = 1.0
    """Punishment at the length limit."""
    truncation_reward_scale: float | None = None
    """Truncated completions get reward * this; a negative value replaces the reward (stop-properly). None: off."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("aggregation", AGGREGATIONS),
            ("kl_estimator", KL_ESTIMATORS),
            ("correction", CORRECTIONS),
            ("old_policy", ("trainer", "rollout", "live")),
            ("correction_normalize", ("none", "batch", "kept")),
            ("router_replay", ("none", "R2", "R3")),
        ):
            self._require(name, getattr(self, name) in choices, f"choose one of {', '.join(choices)}")
        LOSSES.bind(self.loss, self.loss_options())
        ADVANTAGES.bind(self.advantage, self.advantage_args)
        self._check_numbers()
        self._check_combinations()

    def loss_options(self) -> dict[str, Any]:
        """`loss_args` together with the clip ranges that were set."""
        clips = {name: getattr(self, name) for name in ("clip_low", "clip_high", "dual_clip")}
        return {name: value for name, value in clips.items() if value is not None} | self.loss_args

    @property
    def needs_ref_logprobs(self) -> bool:
        """A reference model must be loaded."""
        return self.kl_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """The old policy must be scored before the update even when each sample is used for one update only."""
        in_reward = self.kl_in_reward and self.needs_ref_logprobs
        return self.correction_normalize != "none" or in_reward or self.entropy_top_fraction < 1.0

    @property
    def needs_rollout_logprobs(self) -> bool:
        return self.old_policy == "rollout" or self.correction != "none" or self.veto_ratio is not None

    def _check_numbers(self) -> None:
        for name in ("kl_coef", "entropy_coef", "overlong_buffer_tokens", "overlong_penalty"):
            self._require(name, getattr(self, name) >= 0, "must be >= 0")
        for name in ("clip_low", "clip_high", "kl_target", "entropy_target", "correction_min", "veto_ratio"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 0, "must be >= 0")
        self._require("kl_horizon", self.kl_horizon > 0, "must be > 0")
        self._require("entropy_top_fraction", 0 < self.entropy_top_fraction <= 1, "must be in (0, 1]")
        least_dual = 1.0 + (self.clip_high or 0.0)
        self._require(
            "dual_clip", self.dual_clip is None or self.dual_clip > least_dual, "must be > 1 + clip_high; usually 3"
        )
        scale = self.truncation_reward_scale
        self._require("truncation_reward_scale", scale is None or scale <= 1, "must be <= 1")

    def _check_combinations(self) -> None:
        low, high = self.correction_min, self.correction_max
        needs_max = {"token_truncate", "sequence_truncate", "k3_rs"}
        if self.correction in needs_max:
            self._require(
                "correction_max", high is not None, f"correction = {self.correction} needs an upper bound (2.0)"
            )
        elif self.correction == "none":
            self._require("correction_min", low is None, "has no effect with correction = none; remove it")
            self._require("correction_max", high is None, "has no effect with correction = none; remove it")
        else:
            has_bound = low is not None or high is not None
            self._require(
                "correction_max", has_bound, f"correction = {self.correction} needs correction_min or correction_max"
            )
        self._require(
            "correction_max", low is None or high is None or low < high, f"must exceed correction_min = {low}"
        )
        if self.old_policy == "rollout":
            fix = "the ratio to the engine already contains it: set correction = none, or old_policy = trainer"
            self._require("correction", self.correction == "none" and self.veto_ratio is None, fix)
        if self.router_replay == "R2":
            fix = "R2 records the trainer's own old policy: set old_policy = trainer, or router_replay = R3"
            self._require("router_replay", self.old_policy == "trainer", fix)
        if self.correction_normalize != "none":
            is_on = self.correction != "none" or self.veto_ratio is not None
            self._require("correction_normalize", is_on, "has no effect with correction = none; remove it")
            fix = "needs weights known before the update: set old_policy = trainer"
            self._require("correction_normalize", self.old_policy == "trainer", fix)
        if self.correction_normalize == "kept":
            fix = "cannot be combined with aggregation = prompt_mean_token_mean"
            self._require("correction_normalize", self.aggregation != "prompt_mean_token_mean", fix)
        self._require("kl_target", self.kl_target is None or self.kl_coef > 0, "needs kl_coef > 0 to start from")
        self._require("kl_in_reward", not self.kl_in_reward or self.kl_coef > 0, "has no effect with kl_coef = 0")
        shaped = self.overlong_buffer_tokens > 0 or self.truncation_reward_scale is not None or self.kl_in_reward
        fix = "reads single rewards, which length terms and kl_in_reward do not change: switch those off"
        self._require("advantage", self.advantage != "gdpo" or not shaped, fix)
        both = self.overlong_buffer_tokens > 0 and self.truncation_reward_scale is not None
        self._require("truncation_reward_scale", not both, "cannot be combined with overlong_buffer_tokens; choose one")

    def _require(self, name: str, holds: bool, fix: str) -> None:
        if not holds:
            raise ValueError(f"{KEY}.{name} = {getattr(self, name)!r}: {fix}")
