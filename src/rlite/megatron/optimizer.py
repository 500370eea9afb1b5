"""Megatron's data-parallel wrapper and distributed optimizer, in the shape that Lightning expects of an optimizer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as McoreOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from rlite.megatron.bootstrap import capabilities
from rlite.megatron.options import OptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Global norm before clipping."""
    applied: bool
    """False when gradients were not finite."""


def wrap_for_training(chunks: Sequence[torch.nn.Module], *, grad_reduce_in_fp32: bool = True) -> torch.nn.ModuleList:
    """Megatron's DistributedDataParallel around each chunk; weights and gradients move into flat buffers.

    Replicas start from the weights of the first data-parallel rank. Gradients are summed over data-parallel ranks, in fp32
    or in the dtype of the weights.
    """
    settings = {
        "grad_reduce_in_fp32": grad_reduce_in_fp32,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": False,
    }
    wrapped = torch.nn.ModuleList(
        DistributedDataParallel(
            chunk.config, DistributedDataParallelConfig(**settings), chunk, disable_bucketing=index > 0
        )
        for index, chunk in enumerate(chunks)
    )
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def build_optimizer(chunks: Sequence[torch.nn.Module], config: OptimizerConfig) -> "McoreOptimizer":
    """AdamW over wrapped chunks, its state sharded over data-parallel ranks (ZeRO-1), fp32 main weights for bf16.

    Raises:
        ValueError: moments in less than fp32 without Transformer Engine.
    """
    model = chunks[0].config
    mcore_config = McoreOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=model.params_dtype is torch.bfloat16,
        params_dtype=model.params_dtype,
        use_distributed_optimizer=True,
        **_moment_settings(config),
    )
    return McoreOptimizer(get_megatron_optimizer(mcore_config, list(chunks), use_gloo_process_groups=False), config)


def _moment_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Megatron's precision-aware optimizer, for moments in less than fp32. Never run: it needs CUDA."""
    if not config.is_precision_aware:
        return {}
    if not capabilities().transformer_engine:
        raise ValueError(
            f"model.optimizer: exp_avg_dtype = {config.exp_avg_dtype}, exp_avg_sq_dtype = {config.exp_avg_sq_dtype} need "
            "Transformer Engine's FusedAdam (CUDA), which is not here; set both to float32"
        )
    return {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": getattr(torch, config.exp_avg_dtype),
        "exp_avg_sq_dtype": getattr(torch, config.exp_avg_sq_dtype),
        # Only tells who keeps the fp32 main weights: with the default FusedAdam would, out of reach of offload and
        # checkpoints. Nothing is in fp8.
        "fp8_recipe": "tensorwise",
    }


class McoreOptimizer(torch.optim.Optimizer):
    """Adapter: Lightning recognises optimizers by class and by attributes that Megatron's do not have.

    `torch.optim.Optimizer.__init__` is not called on purpose: parameter groups and state belong to
    Megatron's optimizer.
    """

    def __init__(self, mcore: MegatronOptimizer, config: OptimizerConfig) -> None:
        self.mcore = mcore
        self.config = config
        self.defaults: dict[str, Any] = {}
        self.last_step: StepResult | None = None
        for group in self.param_groups:
            group["lr"] = config.lr * config.lr_factor(0)
        for part in self.parts:
            _step_without_copies(part.optimizer)

    def __repr__(self) -> str:
        return f"McoreOptimizer({type(self.mcore).__name__}, lr={self.config.lr})"

    @property
    def parts(self) -> list[MegatronOptimizer]:
        """Megatron's optimizers that own parameters on this rank: dense and expert-parallel ones."""
        chained = getattr(self.mcore, "chained_optimizers", [self.mcore])
        return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.mcore.param_groups

    @property
    def state(self) -> Any:
        return self.mcore.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.mcore.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip by global norm and update; leaves weights and state alone when the norm is not finite.

        Collective over all ranks. The outcome, the same on every rank, is kept in `last_step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = self.mcore.prepare_grads()
        grad_norm = float(self.mcore.get_grad_norm())
        applied = not found_inf and math.isfinite(grad_norm)
        if applied:
            self._clip(grad_norm)
            applied = bool(self.mcore.step_with_ready_grads())
        self.mcore.zero_grad()  # fp32 copies of gradients that are reduced in bf16: a whole set that nobody needs now
        self.last_step = StepResult(grad_norm=grad_norm, applied=applied)
        return loss

    def reload_model_params(self) -> None:
        """Take over weights that were written into the model: fp32 main weights are rebuilt from them."""
        self.mcore.reload_model_params()

    def state_dict(self) -> dict[str, Any]:
        """Empty: the sharded state goes through `rlite.megatron.checkpoint`, not through a Lightning checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            raise ValueError(f"optimizer state with keys {sorted(state_dict)}: load it with load_sharded instead")

    def _clip(self, grad_norm: float) -> None:
        if not self.config.clip_grad:
            return
        for part in self.parts:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, self.config.clip_grad, grad_norm)


def _step_without_copies(inner: torch.optim.Optimizer) -> None:
    """torch's AdamW, which Megatron takes where neither Transformer Engine nor Apex is installed, one parameter at a time.

    Its multi-tensor form holds temporaries of all parameters together: as much as a whole moment. CUDA has a fused
    kernel without any.
    """
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        for group in inner.param_groups:
            group["foreach"] = False
            group["fused"] = all(parameter.is_cuda for parameter in group["params"])


class LrScheduler:
    """Sets the learning rate of every parameter group; call `step()` after each optimizer step."""

    def __init__(self, optimizer: McoreOptimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self._apply()

    def step(self) -> None:
        self.num_steps += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.num_steps = state_dict["num_steps"]
        self._apply()

    def _apply(self) -> None:
        config = self.optimizer.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * config.lr_factor(self.num_steps)
