"""Where Megatron-core keeps the model, for every `ParallelLayout`.

Local names are `{chunk}.{name}`: the virtual pipeline chunk, then the name in that chunk's `GPTModel` (built with the
local spec, which needs no Transformer Engine), with layers and experts counted locally.
"""

from collections import defaultdict
from collections.abc import Hashable
from itertools import chain
from typing import NamedTuple

from rlite.layout.architecture import Architecture
from rlite.layout.boxes import LocalLayout
from rlite.layout.catalogue import CanonicalTensor, catalogue
from rlite.layout.cuts import half, interleaved_qkv, split, vocabulary, whole
from rlite.layout.parallel import ParallelLayout
from rlite.layout.placement import Rule, RuledPlacement, Slot


def padded_vocab(arch: Architecture, layout: ParallelLayout) -> int:
    """Vocabulary rows in training: the next multiple of `tp`."""
    return -(-arch.vocab_size // layout.tp) * layout.tp


class LayerPlace(NamedTuple):
    """Where a decoder layer lies in the pipeline."""

    stage: int
    chunk: int
    index: int
    """Position inside the chunk."""


def pipeline_places(num_layers: int, layout: ParallelLayout) -> list[LayerPlace]:
    """Place of every layer, as Megatron-core deals them out (`get_transformer_layer_offset`).

    Raises ValueError when layers do not divide over stages or chunks.
    """
    per_stage = _layers_per_stage(num_layers, layout)
    for stage, layers in enumerate(per_stage):
        if layers % layout.vpp:
            raise ValueError(
                f"trainer.strategy.layout.vpp = {layout.vpp} does not divide the {layers} layers of pipeline stage {stage}"
            )
    return [
        LayerPlace(stage, chunk, index)
        for chunk in range(layout.vpp)
        for stage, layers in enumerate(per_stage)
        for index in range(layers // layout.vpp)
    ]


def _layers_per_stage(num_layers: int, layout: ParallelLayout) -> list[int]:
    first, last = layout.first_stage_layers, layout.last_stage_layers
    if layout.pp == 1:
        return [num_layers]
    fixed = [n for n in (first, last) if n is not None]
    even_stages, left = layout.pp - len(fixed), num_layers - sum(fixed)
    if left < 0 or (left % even_stages if even_stages else left):
        raise ValueError(
            f"trainer.strategy.layout: {num_layers} layers on pp = {layout.pp} stages with first_stage_layers = {first} and "
            f"last_stage_layers = {last} leave {left} layers for {even_stages} equal stages. Set "
            "first_stage_layers or last_stage_layers so that the rest divides."
        )
    stages = [left // even_stages] * even_stages if even_stages else []
    return ([first] if first is not None else []) + stages + ([last] if last is not None else [])


def megatron_rules(arch: Architecture, layout: ParallelLayout) -> dict[str, Rule]:
    """One rule for each role. Projections that Megatron fuses appear once for each of their parts."""
    vocab = vocabulary(padded_vocab(arch, layout))
    qkv = {"num_heads": arch.num_heads, "num_kv_heads": arch.num_kv_heads, "head_dim": arch.head_dim}
    attention, router = "self_attention.", "mlp.router."
    rules = {
        "embed": Rule("embedding.word_embeddings.weight", "tp", vocab),
        "lm_head": Rule("output_layer.weight", "tp", vocab),
        "final_norm": Rule("decoder.final_layernorm.weight", "all", whole()),
        "input_norm": Rule("input_layernorm.weight", "all", whole()),
        "post_attention_norm": Rule("pre_mlp_layernorm.weight", "all", whole()),
        "o": Rule(attention + "linear_proj.weight", "tp", split(1, heads=arch.num_heads)),
        "q_norm": Rule(attention + "q_layernorm.weight", "all", whole()),
        "k_norm": Rule(attention + "k_layernorm.weight", "all", whole()),
        "mla_q": Rule(attention + "linear_q_proj.weight", "tp", split(0, heads=arch.num_heads)),
        "q_a": Rule(attention + "linear_q_down_proj.weight", "all", whole()),
        "q_a_norm": Rule(attention + "q_layernorm.weight", "all", whole()),
        "q_b": Rule(attention + "linear_q_up_proj.weight", "tp", split(0, heads=arch.num_heads)),
        "kv_a": Rule(attention + "linear_kv_down_proj.weight", "all", whole()),
        "kv_a_norm": Rule(attention + "kv_layernorm.weight", "all", whole()),
        "kv_b": Rule(attention + "linear_kv_up_proj.weight", "tp", split(0, heads=arch.num_heads)),
        "router": Rule(router + "weight", "all", whole()),
        "router_bias": Rule(router + "expert_bias", "all", whole()),
    }
    for which, role in enumerate(("q", "k", "v")):
        cut = interleaved_qkv(which, **qkv)
        rules[role] = Rule(attention + "linear_qkv.weight", "tp", cut)
        rules[f"{role}_bias"] = Rule(attention + "linear_qkv.bias", "tp", cut)
    experts = "mlp.experts.local_experts.{expert}."
    for kind, prefix, axis in (
        ("", "mlp.", "tp"),
        ("shared_", "mlp.shared_experts.", "tp"),
        ("expert_", experts, "expert"),
    ):
        rules[kind + "gate"] = Rule(prefix + "linear_fc1.weight", axis, half(0))
        rules[kind + "up"] = Rule(prefix + "linear_fc1.weight", axis, half(1))
        rules[kind + "down"] = Rule(prefix + "linear_fc2.weight", axis, split(1))
    return rules


class MegatronPlacement(RuledPlacement):
    """The training side. Raises ValueError when the layout fits neither the world nor the model."""

    def __init__(self, arch: Architecture, layout: ParallelLayout, world_size: int, *, dtype: str = "bfloat16") -> None:
        layout.validate(world_size)
        super().__init__(catalogue(arch), megatron_rules(arch, layout), world_size=world_size, dtype=dtype)
        self.arch = arch
        self.layout = layout
        self.places = pipeline_places(arch.num_layers, layout)
        self.padded_rows = dict.fromkeys(("embed", "lm_head"), padded_vocab(arch, layout))
        self.experts_per_rank = _experts_per_rank(arch, layout)
        self._dense_ranks: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._expert_ranks: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for rank in range(world_size):
            at = layout.coordinates(rank, world_size)
            self._dense_ranks[at.pp, at.tp].append(rank)
            self._expert_ranks[at.pp, at.ep, at.etp].append(rank)

    def slot_key(self, tensor: CanonicalTensor) -> Hashable:
        stage = None if tensor.layer is None else self.places[tensor.layer].stage
        owner = None if tensor.expert is None else tensor.expert // self.experts_per_rank
        return tensor.role, stage, owner

    def slots(self, tensor: CanonicalTensor) -> tuple[Slot, ...]:
        role, last = tensor.role, self.layout.pp - 1
        if tensor.layer is not None:
            return self._stage_slots(tensor, role, self.places[tensor.layer].stage)
        if role == "embed":
            slots = self._stage_slots(tensor, role, 0)
            # With tied embeddings the last pipeline stage computes the logits with a copy of its own.
            tied_copy = self.arch.tied_embeddings and last > 0
            return slots + (self._stage_slots(tensor, "lm_head", last) if tied_copy else ())
        return self._stage_slots(tensor, role, last)

    def _stage_slots(self, tensor: CanonicalTensor, role: str, stage: int) -> tuple[Slot, ...]:
        layout, axis = self.layout, self.rules[role].axis
        if axis == "expert":
            assert tensor.expert is not None
            owner = tensor.expert // self.experts_per_rank
            parts = [self._expert_ranks[stage, owner, etp] for etp in range(layout.etp)]
        else:
            parts = [self._dense_ranks[stage, tp] for tp in range(layout.tp)]
        if axis == "all":
            return (Slot(tuple(sorted(chain(*parts))), 0, 1, role),)
        return tuple(Slot(tuple(ranks), index, len(parts), role) for index, ranks in enumerate(parts))

    def locate(self, tensor: CanonicalTensor, rule: Rule) -> tuple[str, int | None]:
        if tensor.layer is None:
            chunk = 0 if rule is self.rules["embed"] else self.layout.vpp - 1
            return f"{chunk}.{rule.local}", None
        place = self.places[tensor.layer]
        local = rule.local
        if tensor.expert is not None:
            local = local.format(expert=tensor.expert % self.experts_per_rank)
        return f"{place.chunk}.decoder.layers.{place.index}.{local}", None


def megatron_boxes(
    arch: Architecture, layout: ParallelLayout, world_size: int, rank: int, *, dtype: str = "bfloat16"
) -> LocalLayout:
    """What `rank` of a training world holds."""
    return MegatronPlacement(arch, layout, world_size, dtype=dtype).local(rank)


def _experts_per_rank(arch: Architecture, layout: ParallelLayout) -> int:
    if arch.moe is None:
        return 1
    if arch.moe.num_experts % layout.ep:
        raise ValueError(
            f"trainer.strategy.layout.ep = {layout.ep} does not divide the {arch.moe.num_experts} experts of the model"
        )
    return arch.moe.num_experts // layout.ep
