"""Bytes of the training state on each pipeline stage: Megatron's flat buffers and its distributed optimizer.

Layers of one kind are alike, so a stage is a count of dense and MoE layers times the tensors of a two-layer model,
cut by the same placement as the real one.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from rlite.layout.architecture import Architecture
from rlite.layout.boxes import LocalTensor
from rlite.layout.megatron import MegatronPlacement, pipeline_places
from rlite.layout.parallel import ParallelLayout
from rlite.plan.job import PlanJob
from rlite.plan.sizes import DTYPE_BYTES

_PARAM_ALIGNMENT = 64
"""Elements at whose multiples a parameter starts in a flat buffer (Megatron-core, `param_and_grad_buffer.py`)."""
_BUCKET_ALIGNMENT = 128
"""A bucket's length is a multiple of this and of the number of ranks that share its optimizer state."""


_LM_HEAD = "output_layer"


class Chunk(NamedTuple):
    """What one model chunk is made of."""

    dense_layers: int
    moe_layers: int
    has_embedding: bool
    has_head: bool


Stage = tuple[Chunk, ...]
"""The chunks of one pipeline stage: one, or `vpp`. Equal stages hold equally many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBytes:
    """Of one rank."""

    weights: int
    """In compute dtype."""
    gradients: int
    """One for each weight of this rank, in fp32 or (`grad_reduce_in_fp32 = false`) the dtype of the weights."""
    gradient_copies: int
    """fp32 gradients of this rank's share, which the optimizer step makes where gradients are not in fp32."""
    optimizer: int
    """Two moments, and fp32 main weights when the weights are bf16; this rank's share, padding included."""
    owned: int
    """Elements in that share."""
    largest_shard: int
    """Elements of the largest piece of one weight whose optimizer state this rank can hold."""


def two_layers(arch: Architecture) -> Architecture:
    """The same model with one dense layer (0) and, where it has experts, one MoE layer (1)."""
    if arch.moe is None:
        return replace(arch, num_layers=1)
    return replace(arch, num_layers=2, moe=replace(arch.moe, layers=(1,)))


def stages(arch: Architecture, layout: ParallelLayout) -> list[Stage]:
    """Every pipeline stage, in order."""
    layers: Counter[tuple[int, int, bool]] = Counter()
    for layer, place in enumerate(pipeline_places(arch.num_layers, layout)):
        layers[place.stage, place.chunk, arch.is_moe_layer(layer)] += 1
    return [
        tuple(
            Chunk(
                dense_layers=layers[stage, chunk, False],
                moe_layers=layers[stage, chunk, True],
                has_embedding=stage == 0 and chunk == 0,
                has_head=stage == layout.pp - 1 and chunk == layout.vpp - 1,
            )
            for chunk in range(layout.vpp)
        )
        for stage in range(layout.pp)
    ]


class TrainingModel:
    """Parameters of one dense layer, one MoE layer, embedding and head, on one rank of a layout.

    Args:
        job: the run.
        critic: of PPO's critic in the place of the policy: a value for each position where that has an LM head.
    """

    def __init__(self, job: PlanJob, *, critic: bool = False) -> None:
        self.job, layout = job, job.layout
        self.optimizer = job.critic_optimizer if critic else job.optimizer
        arch = replace(job.architecture, tied_embeddings=False) if critic else job.architecture
        self._shares_embedding = arch.tied_embeddings and layout.pp > 1
        one_stage = replace(layout, pp=1, vpp=1, first_stage_layers=None, last_stage_layers=None)
        self._parts = _parts(arch, one_stage, job.cluster.world_size // layout.pp)
        if critic:
            head = [t._replace(shape=(1, arch.hidden_size)) if _LM_HEAD in t.name else t for t in self._parts["head"]]
            self._parts = self._parts | {"head": head}

    def stage_bytes(self, stage: Stage) -> TrainingBytes:
        """Of every rank of `stage`."""
        world_size, layout = self.job.cluster.world_size, self.job.layout
        dense = [self._buffer(chunk, experts=False) for chunk in stage]
        experts = [self._buffer(chunk, experts=True) for chunk in stage] if layout.ep > 1 else []
        dense_ranks, expert_ranks = layout.dp(world_size) * layout.cp, layout.edp(world_size)
        sizes = [flat_numel(buffer, dense_ranks) for buffer in dense]
        expert_sizes = [flat_numel(buffer, expert_ranks) for buffer in experts]
        elements = sum(sizes) + sum(expert_sizes)
        owned = sum(sizes) // dense_ranks + sum(expert_sizes) // expert_ranks
        moments = DTYPE_BYTES[self.optimizer.exp_avg_dtype] + DTYPE_BYTES[self.optimizer.exp_avg_sq_dtype]
        main_weights = 0 if self.job.train_dtype == "float32" else 4
        gradient = 4 if self.job.megatron.grad_reduce_in_fp32 else DTYPE_BYTES[self.job.train_dtype]
        return TrainingBytes(
            weights=elements * DTYPE_BYTES[self.job.train_dtype],
            gradients=gradient * elements,
            gradient_copies=4 * owned if gradient < 4 else 0,
            optimizer=(moments + main_weights) * owned,
            owned=owned,
            largest_shard=min(owned, max(max(bucket) for buffer in dense + experts for bucket in buffer)),
        )

    def _buffer(self, chunk: Chunk, *, experts: bool) -> list[Counter[int]]:
        """Buckets of one flat buffer: how many parameters of which size."""
        counts = {"dense": chunk.dense_layers, "moe": chunk.moe_layers}
        counts |= {"embedding": int(chunk.has_embedding), "head": int(chunk.has_head)}
        body: Counter[int] = Counter()
        shared: Counter[int] = Counter()
        for part, count in counts.items():
            for tensor in self._parts[part]:
                is_expert = ".experts." in tensor.name and self.job.layout.ep > 1
                if count and is_expert == experts:
                    apart = part == "embedding" and self._shares_embedding
                    (shared if apart else body)[math.prod(tensor.shape)] += count
        if chunk.has_head and self._shares_embedding and not experts:
            # The last stage computes logits with a copy of the embedding of its own.
            shared.update(math.prod(tensor.shape) for tensor in self._parts["embedding"])
        return [bucket for bucket in (body, shared) if bucket]


@lru_cache(maxsize=64)
def _parts(arch: Architecture, layout: ParallelLayout, world_size: int) -> dict[str, list[LocalTensor]]:
    """Local tensors by part of the model; every rank holds equally large ones."""
    parts: dict[str, list[LocalTensor]] = {"embedding": [], "head": [], "dense": [], "moe": []}
    for tensor in MegatronPlacement(two_layers(arch), layout, world_size).local(0).tensors:
        if not tensor.name.endswith(".expert_bias"):  # a buffer of the module, in no flat storage
            parts[_part(tensor.name)].append(tensor)
    return parts


def flat_numel(buckets: Iterable[Counter[int]], ranks: int) -> int:
    """Elements of a flat buffer that `ranks` ranks share, padding included.

    Embeddings that two pipeline stages share have a bucket of their own, everything else is in one: gradients are
    reduced without overlap.
    """
    multiple = math.lcm(ranks, _BUCKET_ALIGNMENT)
    lengths = [sum(_round_up(n, _PARAM_ALIGNMENT) * count for n, count in bucket.items()) for bucket in buckets]
    return sum(_round_up(length, multiple) for length in lengths)


def _part(name: str) -> str:
    if ".decoder.layers." in name:
        return "moe" if ".decoder.layers.1." in name else "dense"
    return "embedding" if ".embedding." in name else "head"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
