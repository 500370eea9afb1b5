"""Properties that hold for every placement, and the facts about each framework that are easy to get wrong."""

import math

import pytest

from rlite.device import DeviceKind
from rlite.layout.architecture import Architecture
from rlite.layout.boxes import check_local, volume
from rlite.layout.catalogue import catalogue
from rlite.layout.megatron import MegatronPlacement, megatron_boxes, pipeline_places
from rlite.layout.megatron import padded_vocab as megatron_padded_vocab
from rlite.layout.parallel import EngineLayout, ParallelLayout
from rlite.layout.placement import ExplicitPlacement
from rlite.layout.vllm import VLLMPlacement, vllm_boxes
from rlite.layout.vllm import padded_vocab as vllm_padded_vocab
from rlite.megatron.bootstrap import bootstrap
from rlite.reshard.pieces import atoms
from tests.reshard.tiny import CONFIGS

ARCHS = {name: Architecture.from_config(config) for name, config in CONFIGS.items()}
MOE = [name for name, arch in ARCHS.items() if arch.moe]
LAYOUTS = {
    "single": (1, ParallelLayout()),
    "dp2": (2, ParallelLayout()),
    "tp2_pp2": (8, ParallelLayout(tp=2, pp=2, etp=2, first_stage_layers=1)),
    "pp3": (3, ParallelLayout(pp=3)),
    "pp2_uneven": (2, ParallelLayout(pp=2, last_stage_layers=1)),
    "cp2": (4, ParallelLayout(cp=2, tp=2, etp=2)),
}
MOE_LAYOUTS = {
    "ep4": (4, ParallelLayout(ep=4)),
    "tp2_ep2_etp1": (8, ParallelLayout(tp=2, ep=2, pp=2, last_stage_layers=2)),
    "ep2_etp2": (4, ParallelLayout(tp=2, ep=2, etp=2)),
}
ENGINES = {
    "tp1": (2, EngineLayout()),
    "tp2": (4, EngineLayout(tp=2)),
    "tp4": (4, EngineLayout(tp=4)),
    "ep4": (4, EngineLayout(tp=4, expert_parallel=True)),
}
PLACEMENTS = [
    *[("megatron", name, world, layout) for name in ARCHS for world, layout in LAYOUTS.values()],
    *[("megatron", name, world, layout) for name in MOE for world, layout in MOE_LAYOUTS.values()],
    *[("vllm", name, world, engine) for name in ARCHS for world, engine in ENGINES.values()],
]


def _placement(side: str, name: str, world_size: int, layout) -> MegatronPlacement | VLLMPlacement:
    return (MegatronPlacement if side == "megatron" else VLLMPlacement)(ARCHS[name], layout, world_size)


@pytest.mark.parametrize(("side", "name", "world_size", "layout"), PLACEMENTS)
def test_every_local_element_has_one_box_and_every_canonical_element_a_holder(side, name, world_size, layout):
    placement = _placement(side, name, world_size, layout)
    for rank in range(world_size):
        check_local(placement.local(rank))
    for tensor in placement.tensors.values():
        held = sum(volume(shard.start, shard.stop) for shard in atoms(placement.sharding(tensor.name)))
        assert held == math.prod(tensor.shape), tensor.name


@pytest.mark.parametrize(("side", "name", "world_size", "layout"), PLACEMENTS)
def test_lazy_shardings_say_the_same_as_all_local_layouts_written_out(side, name, world_size, layout):
    placement = _placement(side, name, world_size, layout)
    explicit = ExplicitPlacement([placement.local(rank) for rank in range(world_size)], placement.tensors)
    for tensor in placement.tensors:
        assert sorted(atoms(placement.sharding(tensor))) == sorted(atoms(explicit.sharding(tensor))), tensor
        assert placement.dtype(tensor) == explicit.dtype(tensor)


def test_virtual_pipeline_chunks_are_dealt_out_in_turns():
    # The example in Megatron-core's get_num_layers_to_build: stage 0 [0, 1] [4, 5], stage 1 [2, 3] [6, 7].
    places = pipeline_places(8, ParallelLayout(pp=2, vpp=2))
    assert [(p.stage, p.chunk) for p in places] == [(0, 0), (0, 0), (1, 0), (1, 0), (0, 1), (0, 1), (1, 1), (1, 1)]
    assert [p.index for p in places] == [0, 1] * 4


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        (8, ParallelLayout(pp=2)),
        (8, ParallelLayout(pp=2, vpp=2)),
        (12, ParallelLayout(pp=3, vpp=2)),
        (61, ParallelLayout(pp=16, first_stage_layers=3, last_stage_layers=2)),
        (10, ParallelLayout(pp=4, last_stage_layers=1)),
        (10, ParallelLayout(pp=4, first_stage_layers=4)),
        (16, ParallelLayout(pp=4, vpp=2, first_stage_layers=2, last_stage_layers=2, tp=1)),
        (5, ParallelLayout(pp=2, first_stage_layers=2)),
    ],
)
def test_layer_offsets_are_those_of_megatron_core(layers, layout):
    from types import SimpleNamespace

    bootstrap(DeviceKind.CPU)
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    for layer, place in enumerate(pipeline_places(layers, layout)):
        chunk = place.chunk if layout.vpp > 1 else None
        assert get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=place.stage) + place.index == layer


def test_virtual_chunks_appear_in_local_names():
    arch = Architecture.from_config({**CONFIGS["llama"], "num_hidden_layers": 4})
    names = {t.name for t in megatron_boxes(arch, ParallelLayout(pp=2, vpp=2), 2, 1).tensors}
    assert {"0.decoder.layers.0.input_layernorm.weight", "1.decoder.layers.0.input_layernorm.weight"} <= names
    assert {"1.decoder.final_layernorm.weight", "1.output_layer.weight"} <= names
    assert not any("embedding" in name for name in names)


def test_tied_embeddings_have_a_copy_on_the_last_stage_only():
    arch, layout = ARCHS["llama_tied"], ParallelLayout(pp=3)
    first, middle, last = (megatron_boxes(arch, layout, 3, rank) for rank in range(3))
    embed = [[box.local for box in part.boxes if "embed_tokens" in box.tensor] for part in (first, middle, last)]
    assert embed == [["0.embedding.word_embeddings.weight"], [], ["0.output_layer.weight"]]
    alone = megatron_boxes(arch, ParallelLayout(), 1, 0)
    assert "0.output_layer.weight" not in {tensor.name for tensor in alone.tensors}


def test_megatron_pads_the_vocabulary_to_tp_and_vllm_to_64():
    arch = ARCHS["llama"]  # 101 tokens
    assert megatron_padded_vocab(arch, ParallelLayout(tp=4)) == 104
    assert vllm_padded_vocab(arch, EngineLayout(tp=4)) == 128
    local = vllm_boxes(arch, EngineLayout(tp=4), 4, 3)
    assert local.tensors[0].shape == (32, 40)
    # Rows 96..127 are on rank 3: five real ones.
    assert [(r.start, r.stop) for r in local.padding if r.local == "lm_head.weight"] == [((5, 0), (32, 40))]


def test_rank_with_only_padding_still_has_its_vocabulary_rows():
    arch = Architecture.from_config({**CONFIGS["llama"], "vocab_size": 32})
    local = vllm_boxes(arch, EngineLayout(tp=2), 2, 1)
    assert ("lm_head.weight", (32, 40)) in [(t.name, t.shape) for t in local.tensors]
    check_local(local)


def test_engine_repeats_kv_heads_when_it_has_more_ranks():
    boxes = [vllm_boxes(ARCHS["llama"], EngineLayout(tp=4), 4, rank).boxes for rank in range(4)]
    keys = [next(b for b in part if b.tensor == "model.layers.0.self_attn.k_proj.weight") for part in boxes]
    assert [(b.start[0], b.stop[0]) for b in keys] == [(0, 6), (0, 6), (6, 12), (6, 12)]
    # Two query heads of 6 rows come first.
    assert {b.local_start for b in keys} == {(12, 0)}


def test_engine_experts_that_do_not_divide_go_to_the_first_ranks():
    arch = Architecture.from_config({**CONFIGS["qwen3_moe"], "num_experts": 6})
    engine = EngineLayout(tp=4, expert_parallel=True)
    shapes = [dict((t.name, t.shape) for t in vllm_boxes(arch, engine, 4, r).tensors) for r in range(4)]
    assert [s["model.layers.0.mlp.experts.w13_weight"] for s in shapes] == [(2, 48, 40)] * 2 + [(1, 48, 40)] * 2


def test_qkv_is_interleaved_by_kv_group_in_megatron():
    boxes = megatron_boxes(ARCHS["llama"], ParallelLayout(), 1, 0).boxes
    mine = {
        (box.tensor.split(".")[-2], box.start[0], box.stop[0]): box.local_start[0]
        for box in boxes
        if box.local == "0.decoder.layers.0.self_attention.linear_qkv.weight"
    }
    # 8 query heads and 2 KV heads of 6: each group is 4 queries, a key, a value.
    assert mine == {
        ("q_proj", 0, 24): 0,
        ("k_proj", 0, 6): 24,
        ("v_proj", 0, 6): 30,
        ("q_proj", 24, 48): 36,
        ("k_proj", 6, 12): 60,
        ("v_proj", 6, 12): 66,
    }


def test_replicas_hold_the_same_layout():
    placement = MegatronPlacement(ARCHS["deepseek_v3"], ParallelLayout(tp=2, ep=2), 8)
    assert placement.local(0) == placement.local(4)
    assert VLLMPlacement(ARCHS["deepseek_v3"], EngineLayout(tp=2), 4).local(1) == vllm_boxes(
        ARCHS["deepseek_v3"], EngineLayout(tp=2), 4, 3
    )


@pytest.mark.parametrize(
    ("name", "layout", "world_size", "message"),
    [
        ("qwen3_moe", ParallelLayout(ep=3), 3, r"strategy.layout.ep = 3 does not divide the 8 experts"),
        ("llama", ParallelLayout(tp=4, etp=4), 4, r"q_proj.weight \(48, 40\): 2 KV heads do not divide over 4 ranks"),
        ("llama", ParallelLayout(pp=2), 2, r"3 layers on pp = 2 stages .* Set first_stage_layers"),
        ("llama", ParallelLayout(pp=2, first_stage_layers=2, vpp=2), 2, r"vpp = 2 does not divide the 1 layers"),
        ("llama", ParallelLayout(pp=2, first_stage_layers=4), 2, r"leave -1 layers"),
        ("qwen3_moe", ParallelLayout(tp=8, ep=8, etp=1), 8, r"KV heads do not divide over 8 ranks"),
        ("deepseek_v3", ParallelLayout(tp=16, ep=2), 16, r"8 attention heads do not divide over 16 ranks"),
    ],
)
def test_training_layouts_that_do_not_fit_the_model_are_refused(name, layout, world_size, message):
    with pytest.raises(ValueError, match=message):
        MegatronPlacement(ARCHS[name], layout, world_size).local(0)


@pytest.mark.parametrize(
    ("name", "engine", "message"),
    [
        ("llama", EngineLayout(tp=16), r"8 attention heads do not divide over 16 ranks"),
        ("llama", EngineLayout(tp=3), r"tp = 3 does not divide the 128 padded vocabulary rows"),
    ],
)
def test_engine_layouts_that_do_not_fit_the_model_are_refused(name, engine, message):
    with pytest.raises(ValueError, match=message):
        VLLMPlacement(ARCHS[name], engine, engine.tp).local(0)


def test_explicit_placement_refuses_boxes_outside_the_catalogue():
    tensors = catalogue(ARCHS["llama"])
    layout = vllm_boxes(ARCHS["llama"], EngineLayout(), 1, 0)
    without_head = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"rank 0: local tensor lm_head.weight holds lm_head.weight, which is not"):
        ExplicitPlacement([layout], without_head)
