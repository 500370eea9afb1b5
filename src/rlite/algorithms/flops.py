"""Model FLOPs of dense and MoE transformers with grouped-query or multi-head latent attention, and MFU.

A multiply-add is 2 FLOPs; training is 3 forward passes; causal attention touches half of the score matrix. The input
embedding is a lookup and costs nothing. Sums are per document (s^2), never over a packed row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2.25e15}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of one device by what it calls itself; None when it is not known."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that decide the FLOPs. Zero experts: dense. `kv_lora_rank`: multi-head latent attention."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    ffn: int = 0
    """Inner size of a dense MLP (SwiGLU)."""
    kv_heads: int = 0
    head_dim: int = 0
    experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0
    """Leading layers with a dense MLP in a MoE model."""
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From a Hugging Face `config.json` of the Llama, Qwen, Mixtral or DeepSeek family."""

        def get(*names: str) -> int:
            return next((config[name] for name in names if config.get(name) is not None), 0)

        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            hidden=hidden,
            layers=config["num_hidden_layers"],
            heads=heads,
            vocab=config["vocab_size"],
            ffn=get("intermediate_size"),
            kv_heads=get("num_key_value_heads") or heads,
            head_dim=get("head_dim") or hidden // heads,
            experts=get("n_routed_experts", "num_experts", "num_local_experts"),
            top_k=get("num_experts_per_tok"),
            shared_experts=get("n_shared_experts"),
            expert_ffn=get("moe_intermediate_size", "intermediate_size"),
            dense_layers=get("first_k_dense_replace"),
            q_lora_rank=config.get("q_lora_rank"),
            kv_lora_rank=config.get("kv_lora_rank"),
            qk_nope_head_dim=get("qk_nope_head_dim"),
            qk_rope_head_dim=get("qk_rope_head_dim"),
            v_head_dim=get("v_head_dim"),
        )

    @property
    def attention_weights(self) -> int:
        """Matmul weights of one layer's attention."""
        if self.kv_lora_rank is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        qk_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        query = self.hidden * self.heads * qk_dim
        if self.q_lora_rank is not None:
            query = self.hidden * self.q_lora_rank + self.q_lora_rank * self.heads * qk_dim
        key_value = self.hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        key_value += self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + key_value + self.heads * self.v_head_dim * self.hidden

    @property
    def active_weights(self) -> int:
        """Weights that a token meets in matmuls: attention, active experts and router or MLP, output head."""
        dense_mlp = 3 * self.hidden * self.ffn
        moe_mlp = self.hidden * self.experts + 3 * self.hidden * self.expert_ffn * (self.top_k + self.shared_experts)
        moe_layers = self.layers - self.dense_layers if self.experts else 0
        mlp = moe_layers * moe_mlp + (self.layers - moe_layers) * dense_mlp
        return self.layers * self.attention_weights + mlp + self.hidden * self.vocab

    @property
    def score_dim(self) -> int:
        """Multiply-adds per (query, key) pair and layer, over all heads: scores plus weighted values."""
        if self.kv_lora_rank is None:
            return 2 * self.heads * self.head_dim
        return self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)


def forward_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """One forward pass over sequences of these lengths (log-probabilities, or prefill)."""
    linear = 2.0 * shape.active_weights * sum(lengths)
    return linear + float(shape.layers * shape.score_dim) * sum(length**2 for length in lengths)


def train_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Forward and backward, without recomputation."""
    return 3.0 * forward_flops(shape, lengths)


def generate_flops(shape: ModelShape, prompt_tokens: int, completion_tokens: int) -> float:
    """Prefill of the prompt, then one token at a time; latent attention decodes in its absorbed form."""
    score_dim = shape.score_dim
    if shape.kv_lora_rank is not None:
        score_dim = shape.heads * (2 * shape.kv_lora_rank + shape.qk_rope_head_dim)
    steps = max(completion_tokens - 1, 0)
    contexts = steps * prompt_tokens + steps * (steps + 1) // 2
    decode = 2.0 * shape.active_weights * steps + 2.0 * shape.layers * score_dim * contexts
    return forward_flops(shape, [prompt_tokens]) + decode


def update_metrics(
    shape: ModelShape, lengths: Sequence[int], *, epochs: int, seconds: float, devices: int, device_name: str
) -> dict[str, float]:
    """`perf/tflops/actor`, model TFLOP/s of one device while it updates; `perf/mfu/actor` on a device of known peak.

    Args:
        lengths: of every row of the step, all data-parallel ranks together.
        epochs: times each row was trained on.
        seconds: of all updates of the step.
    """
    flops, peak = epochs * train_flops(shape, lengths), peak_flops(device_name)
    metrics = {"perf/tflops/actor": flops / (seconds * devices * 1e12)}
    if peak is not None:
        metrics["perf/mfu/actor"] = mfu(flops, seconds=seconds, devices=devices, peak_flops=peak)
    return metrics


def mfu(flops: float, *, seconds: float, devices: int, peak_flops: float) -> float:
    """Model FLOPs utilisation: model FLOPs over what `devices` could have done in `seconds`."""
    return flops / (seconds * devices * peak_flops)
