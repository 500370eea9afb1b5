"""Where vLLM keeps the model, for every `EngineLayout`.

Local names are those of `named_parameters()` without the `routed_experts.` that some versions insert, and shapes are
those that its Triton kernels use: `w13_weight [E, 2 I, H]`, `w2_weight [E, H, I]`.
"""

from collections.abc import Hashable

from rlite.layout.architecture import Architecture
from rlite.layout.boxes import LocalLayout
from rlite.layout.catalogue import CanonicalTensor, catalogue
from rlite.layout.cuts import half, split, stacked_qkv, vocabulary, whole
from rlite.layout.parallel import EngineLayout
from rlite.layout.placement import Rule, RuledPlacement, Slot

_VOCABULARY_MULTIPLE = 64


def padded_vocab(arch: Architecture, engine: EngineLayout) -> int:
    """Vocabulary rows in the engine: the next multiple of 64, which tp has to divide (vLLM demands it)."""
    rows = -(-arch.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    if rows % engine.tp:
        raise ValueError(f"engine tp = {engine.tp} does not divide the {rows} padded vocabulary rows of vLLM")
    return rows


def vllm_rules(arch: Architecture, engine: EngineLayout) -> dict[str, Rule]:
    """One rule for each role; fused projections appear once for each of their parts."""
    vocab = vocabulary(padded_vocab(arch, engine))
    qkv = {"num_heads": arch.num_heads, "num_kv_heads": arch.num_kv_heads, "head_dim": arch.head_dim}
    attention, experts = "self_attn.", "block_sparse_moe." if arch.model_type == "mixtral" else "mlp."
    rules = {
        "embed": Rule("model.embed_tokens.weight", "tp", vocab),
        "lm_head": Rule("lm_head.weight", "tp", vocab),
        "final_norm": Rule("model.norm.weight", "all", whole()),
        "input_norm": Rule("input_layernorm.weight", "all", whole()),
        "post_attention_norm": Rule("post_attention_layernorm.weight", "all", whole()),
        "o": Rule(attention + "o_proj.weight", "tp", split(1, heads=arch.num_heads)),
        "q_norm": Rule(attention + "q_norm.weight", "all", whole()),
        "k_norm": Rule(attention + "k_norm.weight", "all", whole()),
        "mla_q": Rule(attention + "q_proj.weight", "tp", split(0, heads=arch.num_heads)),
        "q_a_norm": Rule(attention + "q_a_layernorm.weight", "all", whole()),
        "q_b": Rule(attention + "q_b_proj.weight", "tp", split(0, heads=arch.num_heads)),
        "kv_a": Rule(attention + "kv_a_proj_with_mqa.weight", "all", whole()),
        "kv_a_norm": Rule(attention + "kv_a_layernorm.weight", "all", whole()),
        "kv_b": Rule(attention + "kv_b_proj.weight", "tp", split(0, heads=arch.num_heads)),
        "router": Rule(experts + "gate.weight", "all", whole()),
        "router_bias": Rule(experts + "gate.e_score_correction_bias", "all", whole()),
        "expert_gate": Rule(experts + "experts.w13_weight", "expert", half(0), stacked=True),
        "expert_up": Rule(experts + "experts.w13_weight", "expert", half(1), stacked=True),
        "expert_down": Rule(experts + "experts.w2_weight", "expert", split(1), stacked=True),
    }
    if arch.mla and arch.mla.q_lora_rank is not None:
        rules["q_a"] = Rule(attention + "fused_qkv_a_proj.weight", "all", whole())
        rules["kv_a"] = Rule(attention + "fused_qkv_a_proj.weight", "all", whole(arch.mla.q_lora_rank))
    for which, role in enumerate(("q", "k", "v")):
        cut = stacked_qkv(which, **qkv)
        rules[role] = Rule(attention + "qkv_proj.weight", "tp", cut)
        rules[f"{role}_bias"] = Rule(attention + "qkv_proj.bias", "tp", cut)
    for kind, prefix in (("", "mlp."), ("shared_", "mlp.shared_experts.")):
        rules[kind + "gate"] = Rule(prefix + "gate_up_proj.weight", "tp", half(0))
        rules[kind + "up"] = Rule(prefix + "gate_up_proj.weight", "tp", half(1))
        rules[kind + "down"] = Rule(prefix + "down_proj.weight", "tp", split(1))
    return rules


class VLLMPlacement(RuledPlacement):
    """The generation side: `world_size / tp` engines that each hold the whole model."""

    def __init__(self, arch: Architecture, engine: EngineLayout, world_size: int, *, dtype: str = "bfloat16") -> None:
        engine.validate(world_size)
        super().__init__(catalogue(arch), vllm_rules(arch, engine), world_size=world_size, dtype=dtype)
        self.arch = arch
        self.engine = engine
        self.padded_rows = dict.fromkeys(("embed", "lm_head"), padded_vocab(arch, engine))
        self._tp_ranks = [tuple(range(tp, world_size, engine.tp)) for tp in range(engine.tp)]
        self._expert_homes = _expert_homes(arch.moe.num_experts if arch.moe else 0, engine)

    def slot_key(self, tensor: CanonicalTensor) -> Hashable:
        whole_expert = tensor.expert is not None and self.engine.expert_parallel
        return tensor.role, self._expert_homes[tensor.expert][0] if whole_expert else None

    def slots(self, tensor: CanonicalTensor) -> tuple[Slot, ...]:
        axis, tp = self.rules[tensor.role].axis, self.engine.tp
        if axis == "all":
            return (Slot(tuple(range(self.world_size)), 0, 1, tensor.role),)
        if axis == "expert" and self.engine.expert_parallel:
            home, _ = self._expert_homes[tensor.expert]
            return (Slot(self._tp_ranks[home], 0, 1, tensor.role),)
        return tuple(Slot(ranks, index, tp, tensor.role) for index, ranks in enumerate(self._tp_ranks))

    def locate(self, tensor: CanonicalTensor, rule: Rule) -> tuple[str, int | None]:
        if tensor.layer is None:
            return rule.local, None
        position = None
        if rule.stacked:
            position = self._expert_homes[tensor.expert][1] if self.engine.expert_parallel else tensor.expert
        return f"model.layers.{tensor.layer}.{rule.local}", position


def vllm_boxes(
    arch: Architecture, engine: EngineLayout, world_size: int, rank: int, *, dtype: str = "bfloat16"
) -> LocalLayout:
    """What `rank` of a generating world holds."""
    return VLLMPlacement(arch, engine, world_size, dtype=dtype).local(rank)


def _expert_homes(num_experts: int, engine: EngineLayout) -> list[tuple[int, int]]:
    """(tp rank, position there) of every expert when experts stay whole: contiguous runs, the first ones longer."""
    base, remainder = divmod(num_experts, engine.tp)
    return [
        (rank, position)
        for rank in range(engine.tp)
        for position in range(base + (rank < remainder))
    ]  # fmt: skip
