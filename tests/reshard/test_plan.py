"""Choices of the planner on cases small enough to work out by hand, and what it refuses."""

from collections import Counter

import pytest

from rlite.layout.architecture import Architecture
from rlite.layout.boxes import Box, LocalLayout, LocalTensor
from rlite.layout.catalogue import CanonicalTensor
from rlite.layout.megatron import MegatronPlacement
from rlite.layout.parallel import EngineLayout, ParallelLayout
from rlite.layout.placement import ExplicitPlacement
from rlite.layout.vllm import VLLMPlacement
from rlite.reshard.plan import TransferPlanner, plan_transfer
from rlite.reshard.routes import Topology
from tests.reshard.tiny import CONFIGS

ONE_NODE = Topology(node_size=8)


def _rank(*boxes: tuple[str, int, int], dtype: str = "float32") -> LocalLayout:
    """A rank that holds rows [start, stop) of `[rows, 4]` tensors, each in a local tensor of its own."""
    tensors = tuple(LocalTensor(f"{name}:{start}", (stop - start, 4), dtype) for name, start, stop in boxes)
    return LocalLayout(
        tensors, tuple(Box(name, (start, 0), (stop, 4), f"{name}:{start}", (0, 0)) for name, start, stop in boxes)
    )


def _placement(*ranks: LocalLayout, rows: int = 8, names: str = "a") -> ExplicitPlacement:
    return ExplicitPlacement(ranks, {name: CanonicalTensor(name, (rows, 4), "any") for name in names})


EMPTY = LocalLayout((), ())


def test_own_rows_are_copied_and_only_missing_rows_travel():
    source = _placement(_rank(("a", 0, 4)), _rank(("a", 4, 8)))
    destination = _placement(_rank(("a", 2, 8)), EMPTY)
    plan = plan_transfer(source, destination, topology=ONE_NODE, rank=0)
    assert (plan.bytes_local, plan.bytes_recv, plan.bytes_lower_bound, plan.ops) == (2 * 16, 4 * 16, 4 * 16, 1)
    (bucket,) = plan.buckets
    assert [copy.source_index for copy in bucket.copies] == [(slice(2, 4), slice(0, 4))]
    assert [copy.destination_index for copy in bucket.copies] == [(slice(0, 2), slice(0, 4))]
    assert [m.index for m in bucket.receives[0].moves] == [(slice(2, 6), slice(0, 4))]


def test_holder_in_the_same_node_is_preferred():
    source = _placement(_rank(("a", 0, 8)), EMPTY, _rank(("a", 0, 8)), EMPTY)
    destination = _placement(EMPTY, _rank(("a", 0, 8)), EMPTY, _rank(("a", 0, 8)))
    planner = TransferPlanner(source, destination, topology=Topology(node_size=2))
    assert planner.choices["a", 0] == {0: (1,), 2: (3,)}
    assert [planner.plan(rank).bytes_internode for rank in range(4)] == [0, 0, 0, 0]


def test_load_is_spread_over_replicas():
    # Ranks 0 and 1 hold everything; six ranks need it.
    source = _placement(_rank(("a", 0, 8)), _rank(("a", 0, 8)), *[EMPTY] * 6)
    destination = _placement(EMPTY, EMPTY, *[_rank(("a", 0, 8))] * 6)
    planner = TransferPlanner(source, destination, topology=ONE_NODE)
    assert [planner.plan(rank).bytes_sent for rank in (0, 1)] == [3 * 128, 3 * 128]


def test_replica_that_must_send_something_else_sends_less_of_the_rest():
    # Only rank 0 holds b, which rank 2 needs; a is on ranks 0 and 1.
    source = _placement(_rank(("a", 0, 8), ("b", 0, 8)), _rank(("a", 0, 8)), EMPTY, names="ab")
    destination = _placement(EMPTY, EMPTY, _rank(("a", 0, 8), ("b", 0, 8)), names="ab")
    planner = TransferPlanner(source, destination, topology=ONE_NODE)
    assert planner.choices["a", 0] == {1: (2,)}


def test_expert_parallel_to_expert_parallel_moves_no_expert():
    arch = Architecture.from_config(CONFIGS["qwen3_moe"])
    source = MegatronPlacement(arch, ParallelLayout(ep=4), 4)
    destination = VLLMPlacement(arch, EngineLayout(tp=4, expert_parallel=True), 4)
    assert [plan_transfer(source, destination, topology=ONE_NODE, rank=r).bytes_recv for r in range(4)] == [0] * 4


def test_slices_for_engine_replicas_are_staged_once():
    # 4 engines of one rank each need all of expert 0, which rank 0 holds.
    arch = Architecture.from_config(CONFIGS["mixtral"])
    source, destination = MegatronPlacement(arch, ParallelLayout(ep=4), 4), VLLMPlacement(arch, EngineLayout(), 4)
    plan = plan_transfer(source, destination, topology=ONE_NODE, rank=0)
    experts = [m for bucket in plan.buckets for m in bucket.sends if "experts" in m.moves[0].local]
    assert {message.takers for message in experts} == {(1, 2, 3)}


def test_all_ranks_send_at_any_time():
    # Two pipeline stages: no bucket may hold only the tensors of one stage while both still have some.
    arch = Architecture.from_config({**CONFIGS["llama"], "num_hidden_layers": 8})
    source = MegatronPlacement(arch, ParallelLayout(pp=2), 2)
    planner = TransferPlanner(source, VLLMPlacement(arch, EngineLayout(tp=2), 2), topology=ONE_NODE)
    layers = [int(name.split(".")[2]) for name in planner.traffic if "q_proj" in name]
    assert [{layer // 4 for layer in pair} for pair in zip(layers[::2], layers[1::2], strict=True)] == [{0, 1}] * 4
    # Within a stage the layers keep their order.
    assert sorted(layer for layer in layers if layer < 4) == [layer for layer in layers if layer < 4]


def test_sources_are_done_in_the_bucket_of_their_last_part():
    source = _placement(_rank(("a", 0, 8), ("b", 0, 8), ("c", 0, 8)), EMPTY, names="abc")
    needed = _placement(EMPTY, _rank(("a", 0, 8), ("b", 0, 8), ("c", 0, 8)), names="abc")
    # 128 bytes a tensor, 64 a bucket: every tensor takes two buckets.
    plan = plan_transfer(source, needed, topology=ONE_NODE, rank=0, staging_budget_bytes=128)
    assert [bucket.done_sources for bucket in plan.buckets] == [(), ("a:0",), (), ("b:0",), (), ("c:0",)]


def test_source_that_nobody_takes_is_unused():
    source = _placement(_rank(("a", 0, 8)), _rank(("a", 0, 8)))
    destination = _placement(_rank(("a", 0, 8)), EMPTY)
    plans = [plan_transfer(source, destination, topology=ONE_NODE, rank=rank) for rank in range(2)]
    assert [plan.unused_sources for plan in plans] == [(), ("a:0",)]


def test_restricted_transfer_leaves_the_other_tensors_alone():
    source = _placement(_rank(("a", 0, 8), ("b", 0, 8)), names="ab")
    destination = _placement(_rank(("b", 0, 8)), names="b")
    plan = plan_transfer(source, destination, topology=ONE_NODE, rank=0, tensors=["b"])
    assert [copy.source for bucket in plan.buckets for copy in bucket.copies] == ["b:0"]
    assert plan.unused_sources == ()


def test_wire_dtype_is_the_narrower_one():
    wide, narrow = _rank(("a", 0, 8)), _rank(("a", 0, 8), dtype="bfloat16")
    for source, destination in ((wide, narrow), (narrow, wide)):
        plan = plan_transfer(_placement(source, EMPTY), _placement(EMPTY, destination), topology=ONE_NODE, rank=1)
        assert plan.bytes_recv == 8 * 4 * 2


def test_message_order_is_the_same_at_both_ends():
    arch = Architecture.from_config(CONFIGS["deepseek_v3"])
    source = MegatronPlacement(arch, ParallelLayout(tp=2, ep=2), 4)
    planner = TransferPlanner(source, VLLMPlacement(arch, EngineLayout(tp=4), 4), topology=ONE_NODE)
    plans = [planner.plan(rank) for rank in range(4)]
    sent, received = Counter(), Counter()
    for plan in plans:
        for i, bucket in enumerate(plan.buckets):
            for m in bucket.sends:
                sent.update((i, plan.rank, taker, m.wire_dtype, m.nbytes) for taker in m.takers)
            received.update((i, m.sender, plan.rank, m.wire_dtype, m.nbytes) for m in bucket.receives)
    assert sent == received


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        (_placement(_rank(("a", 0, 8))), _placement(_rank(("b", 0, 8)), names="b"),
         r"a: source shape \[8, 4\] from rank 0 on, destination does not know it"),
        (_placement(_rank(("a", 0, 8))), _placement(_rank(("a", 0, 6)), rows=6),
         r"a: source shape \[8, 4\] from rank 0 on, destination shape \[6, 4\] from rank 0 on"),
        (_placement(_rank(("a", 0, 6))), _placement(_rank(("a", 2, 8))),
         r"a: source shape \[8, 4\].*destination rank 0 needs elements \(2, 0\)..\(8, 4\); no source rank holds 8"),
        (_placement(EMPTY), _placement(_rank(("a", 0, 8))), r"a: source shape \[8, 4\] held by no rank"),
        (_placement(_rank(("a", 0, 8))), _placement(_rank(("a", 0, 5), ("a", 4, 8))),
         r"a: destination rank 0 holds elements .* only once"),
        (_placement(_rank(("a", 0, 8))), _placement(_rank(("a", 0, 8)), EMPTY), r"1 source ranks but 2 destination"),
        (_placement(_rank(("a", 0, 8), dtype="int4")), _placement(_rank(("a", 0, 8))), r"a: .* dtype int4"),
    ],
    ids=["unknown", "shapes", "uncovered", "no holder", "written twice", "worlds", "dtype"],
)  # fmt: skip
def test_sides_that_do_not_fit_are_refused(source, destination, message):
    with pytest.raises(ValueError, match=message):
        plan_transfer(source, destination, topology=ONE_NODE, rank=0)


def test_inexact_cast_is_refused_only_when_exactness_is_asked():
    source, destination = _placement(_rank(("a", 0, 8))), _placement(_rank(("a", 0, 8), dtype="bfloat16"))
    plan_transfer(source, destination, topology=ONE_NODE, rank=0)
    with pytest.raises(ValueError, match=r"a: .* float32 cannot be cast to bfloat16 exactly"):
        plan_transfer(source, destination, topology=ONE_NODE, rank=0, exact=True)
    plan_transfer(destination, source, topology=ONE_NODE, rank=0, exact=True)


def test_budget_below_a_row_names_the_budget_that_would_do():
    source, destination = _placement(_rank(("a", 0, 8)), EMPTY), _placement(EMPTY, _rank(("a", 0, 8)))
    with pytest.raises(ValueError, match=r"staging_budget_bytes = 30 is too small: a, .* at least 32"):
        plan_transfer(source, destination, topology=ONE_NODE, rank=0, staging_budget_bytes=30)
    plan = plan_transfer(source, destination, topology=ONE_NODE, rank=0, staging_budget_bytes=32)
    assert plan.staging_peak_bytes == 32


def test_budget_below_one_element_is_refused_too():
    box = Box("a", (0, 0), (1, 1), "a", (0, 0))
    held = LocalLayout((LocalTensor("a", (1, 1), "float32"),), (box,))
    tensors = {"a": CanonicalTensor("a", (1, 1), "any")}
    sides = ExplicitPlacement([held, EMPTY], tensors), ExplicitPlacement([EMPTY, held], tensors)
    with pytest.raises(ValueError, match=r"staging_budget_bytes = 4 is too small: a, .* at least 8"):
        plan_transfer(*sides, topology=ONE_NODE, rank=0, staging_budget_bytes=4)
