"""What a user may choose about the trainer. Imports neither torch nor Megatron-core: the CLI reads it at start."""

import math
from dataclasses import dataclass, replace
from typing import Literal

RecomputeModule = Literal["core_attn", "mlp", "moe", "shared_experts", "layernorm", "mla_up_proj"]
"""Megatron-core's names of what selective recompute can recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions:
    """How Megatron-core runs a layout. Only the balance of experts (`moe_*`) changes the mathematics."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass: `recompute_modules` only (`selective`) or whole layers (`full`)."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """With `selective`. `mlp`: feed-forward of dense layers; `moe`: router and experts; `mla_up_proj`: latent attention."""
    max_tokens_per_microbatch: int = 16384
    """Token budget (padding included) of one micro-batch on one data-parallel rank."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits over the vocabulary exist at the same time."""
    seed: int = 0
    """Seed of a random start; the same weights on every layout."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    """Auxiliary loss of updates: each sequence balanced for itself (`seq_aux_loss`) or the tokens of each micro-batch."""
    moe_aux_loss_coeff: float = 0.0
    """Of the auxiliary loss, summed over layers."""
    moe_router_bias_update_rate: float = 0.0
    """How far the router's bias moves against the load after each optimizer step (DeepSeek-V3); 0 freezes it."""
    grad_reduce_in_fp32: bool = True
    """Gradients are added up and reduced in fp32; false: in the dtype of the weights, 2 bytes less for each bf16 weight."""
    gradient_accumulation_fusion: bool = False
    """Weight gradients are added to their buffer by the matrix product itself. Needs a CUDA kernel."""

    def __post_init__(self) -> None:
        _check_balance(self)
        for key in ("max_tokens_per_microbatch", "logprob_chunk_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"trainer.strategy.megatron.{key} = {getattr(self, key)}: must be at least 1")


def _check_balance(options: MegatronOptions) -> None:
    key = "trainer.strategy.megatron"
    for name in ("moe_aux_loss_coeff", "moe_router_bias_update_rate"):
        if getattr(options, name) < 0:
            raise ValueError(f"{key}.{name} = {getattr(options, name)}: must not be negative")
    if (options.moe_router_load_balancing_type == "none") != (options.moe_aux_loss_coeff == 0):
        raise ValueError(
            f"{key}.moe_router_load_balancing_type = {options.moe_router_load_balancing_type} with {key}.moe_aux_loss_coeff = "
            f"{options.moe_aux_loss_coeff}: an auxiliary loss needs both a type and a coefficient"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a warm-up and a schedule; state sharded over data-parallel ranks."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled; not applied to norms and biases."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; `linear` and `cosine` fall to `min_lr` at `total_steps`."""
    min_lr: float = 0.0
    total_steps: int | None = None
    """Optimizer steps over which `linear` and `cosine` fall; by default those of the whole run."""
    exp_avg_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the first moment. Anything but float32 needs Transformer Engine's FusedAdam."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the second moment; likewise."""

    def __post_init__(self) -> None:
        for key in ("lr", "eps", "weight_decay", "clip_grad", "warmup_steps", "min_lr"):
            if getattr(self, key) < 0:
                raise ValueError(f"model.optimizer.{key} = {getattr(self, key)}: must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"model.optimizer.betas = {self.betas}: each must be in [0, 1)")

    @property
    def is_precision_aware(self) -> bool:
        """Whether a moment is in less than fp32."""
        return (self.exp_avg_dtype, self.exp_avg_sq_dtype) != ("float32", "float32")

    def with_total_steps(self, total_steps: int) -> "OptimizerConfig":
        """This config with `total_steps` filled in where it was left open.

        Raises:
            ValueError: the schedule would end before the warm-up does.
        """
        config = self if self.total_steps is not None else replace(self, total_steps=total_steps)
        if config.schedule != "constant" and config.total_steps <= config.warmup_steps:
            raise ValueError(
                f"model.optimizer.schedule = {config.schedule}: total_steps = {config.total_steps} must be larger than "
                f"model.optimizer.warmup_steps = {config.warmup_steps}"
            )
        return config

    def lr_factor(self, step: int) -> float:
        """Multiplier of `lr` for the optimizer step that follows `step` finished ones."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        assert self.total_steps is not None, "with_total_steps() comes first"
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        falling = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        floor = self.min_lr / self.lr if self.lr else 0.0
        return floor + (1.0 - floor) * falling
