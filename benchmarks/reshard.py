"""Direct transfer against gather-all-then-slice, in turn, on real gloo processes of this machine.

    python benchmarks/reshard.py --arch tiny_qwen3_moe --train ep4 --infer tp4 --world 4 --megabytes 256

The last line is JSON. Times are medians over the rounds of the slowest rank; `ratio` is direct / bucketed baseline. CPU
seconds add up all ranks; unlike wall times they hardly depend on what else the machine does.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gather_baseline import GatherAll, GatherStats
from reshard_cases import engine_layout, tiny_architecture, training_layout
from torch import Tensor

from rlite.layout.boxes import LocalLayout
from rlite.layout.megatron import MegatronPlacement
from rlite.layout.vllm import VLLMPlacement
from rlite.reshard.plan import plan_transfer
from rlite.reshard.routes import Topology
from rlite.reshard.transfer import Transfer, TransferStats

BUCKET_BYTES = 16 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("tiny_dsv3", "tiny_qwen3_moe"), default="tiny_qwen3_moe")
    parser.add_argument("--train", default="ep4", help="training layout, for example tp2,ep2")
    parser.add_argument("--infer", default="tp4", help="generation layout, for example tp4 or tp4,ep1")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=256, help="of routed experts, in bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--staging_megabytes", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (args, folder), nprocs=args.world, start_method="fork")


def _rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    # torch renames all_gather_into_tensor; the old name exists in every version that is supported here.
    warnings.simplefilter("ignore", FutureWarning)
    store = dist.FileStore(f"{folder}/store", args.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.world)
    arch = tiny_architecture(args.arch, args.megabytes)
    sources = MegatronPlacement(arch, training_layout(args.train, arch.num_layers), args.world)
    destinations = VLLMPlacement(arch, engine_layout(args.infer), args.world)
    source = _source(sources.local(rank), sources)
    outputs = [_empty(destinations.local(rank)) for _ in range(3)]
    plan = plan_transfer(
        sources,
        destinations,
        topology=Topology(node_size=args.world),
        rank=rank,
        exact=True,
        staging_budget_bytes=args.staging_megabytes * 2**20,
    )
    direct = Transfer(plan)
    bucketed = GatherAll(sources, destinations, rank, bucket_bytes=BUCKET_BYTES)
    per_tensor = GatherAll(sources, destinations, rank, bucket_bytes=0)
    seconds: list[list[float]] = [[], [], []]
    cpu_seconds: list[list[float]] = [[], [], []]
    stats: list[TransferStats | GatherStats | None] = [None] * 3
    for _ in range(args.rounds + 1):
        for i, method in enumerate((direct.run, bucketed.run, per_tensor.run)):
            elapsed, cpu, stats[i] = _timed(method, source, outputs[i])
            seconds[i].append(elapsed)
            cpu_seconds[i].append(cpu)
    equal = all(torch.equal(outputs[0][name], other[name]) for name in outputs[0] for other in outputs[1:])
    wall, cpu = ([statistics.median(times[1:]) for times in both] for both in (seconds, cpu_seconds))
    _report(args, stats, wall, cpu, equal)
    dist.destroy_process_group()


def _timed(method: Callable, source: dict[str, Tensor], output: dict[str, Tensor]) -> tuple[float, float, object]:
    """(wall seconds of the slowest rank, CPU seconds of all ranks, what the method returned)."""
    dist.barrier()
    started, started_cpu = time.perf_counter(), time.process_time()
    stats = method(source, output)
    wall, cpu = torch.tensor(time.perf_counter() - started), torch.tensor(time.process_time() - started_cpu)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return float(wall), float(cpu), stats


def _report(args: argparse.Namespace, stats: list, seconds: list[float], cpu: list[float], equal: bool) -> None:
    """Byte counts are those of the rank that has the most."""
    direct, bucketed, _ = stats
    mine = {
        "bytes_received": direct.bytes_recv,
        "bytes_lower_bound": direct.bytes_lower_bound,
        "bytes_local": direct.bytes_local,
        "gather_bytes_received": bucketed.bytes_received,
        "ops": direct.ops,
        "gather_ops": bucketed.ops,
        "staging_peak_bytes": direct.staging_peak_bytes,
        "gather_peak_bytes": bucketed.peak_bytes,
        "bitwise_equal": equal,
    }
    everyone: list[dict] = [{}] * args.world
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        result = {key: max(part[key] for part in everyone) for key in mine if key != "bitwise_equal"}
        result["bitwise_equal"] = all(part["bitwise_equal"] for part in everyone)
        result |= {"direct_s": seconds[0], "gather_s": seconds[1], "gather_per_tensor_s": seconds[2]}
        result |= {"ratio": seconds[0] / seconds[1], "ratio_per_tensor": seconds[0] / seconds[2]}
        result |= {"direct_cpu_s": cpu[0], "gather_cpu_s": cpu[1], "gather_per_tensor_cpu_s": cpu[2]}
        print(json.dumps(result))


def _source(layout: LocalLayout, placement: MegatronPlacement) -> dict[str, Tensor]:
    """Every canonical tensor gets the same values on every rank that holds part of it."""
    tensors = _empty(layout)
    for box in layout.boxes:
        generator = torch.Generator().manual_seed(zlib.crc32(box.tensor.encode()))
        full = torch.randint(-4096, 4096, placement.tensors[box.tensor].shape, generator=generator)
        index = tuple(map(slice, box.start, box.stop))
        tensors[box.local][box.local_index(box.start, box.stop)] = full[index].to(tensors[box.local].dtype)
    return tensors


def _empty(layout: LocalLayout) -> dict[str, Tensor]:
    return {tensor.name: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype)) for tensor in layout.tensors}


if __name__ == "__main__":
    main()
