"""Plans a transfer of a published model on many ranks, without weights.

    python benchmarks/plan_scale.py --arch deepseek-v3 --train pp16,ep16 --infer tp32 --world 256

The last line is JSON. Bytes are bf16 and per rank; `gather_bytes_received_mean` is what gathering every full tensor on
every rank would receive.
"""

import argparse
import json
import math
import resource
import time

from reshard_cases import PUBLISHED, engine_layout, training_layout

from rlite.layout.architecture import Architecture
from rlite.layout.megatron import MegatronPlacement
from rlite.layout.vllm import VLLMPlacement
from rlite.reshard.moves import ITEMSIZE
from rlite.reshard.plan import TransferPlanner
from rlite.reshard.routes import Topology


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=tuple(PUBLISHED), default="deepseek-v3")
    parser.add_argument("--train", default="pp16,ep16")
    parser.add_argument("--infer", default="tp32")
    parser.add_argument("--world", type=int, default=256)
    parser.add_argument("--node_size", type=int, default=8, help="devices on a node")
    parser.add_argument("--staging_megabytes", type=int, default=256)
    args = parser.parse_args()

    started, started_cpu = time.perf_counter(), time.process_time()
    planner = _planner(args)
    planner.plan(0)
    one_rank_s, one_rank_cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    size = {name: ITEMSIZE[planner.sources.dtype(name)] for name in planner.sources.tensors}
    totals = [_summary(planner, rank, size) for rank in range(args.world)]
    all_ranks_s = time.perf_counter() - started
    model = sum(math.prod(tensor.shape) * size[name] for name, tensor in planner.sources.tensors.items())
    mean = {key: sum(total[key] for total in totals) / args.world for key in totals[0]}
    result = {
        "bytes_received_mean": mean["recv"],
        "bytes_received_max": max(total["recv"] for total in totals),
        "bytes_sent_max": max(total["sent"] for total in totals),
        "bytes_local_mean": mean["local"],
        "bytes_lower_bound_mean": mean["lower_bound"],
        "gather_bytes_received_mean": model - mean["own"],
        "internode_bytes_mean": mean["internode"],
        "ops_max": max(total["ops"] for total in totals),
        "buckets_max": max(total["buckets"] for total in totals),
        "staging_peak_bytes_max": max(total["staging"] for total in totals),
        "planning_s_one_rank": one_rank_s,
        "planning_cpu_s_one_rank": one_rank_cpu_s,
        "planning_s_all_ranks": all_ranks_s,
        "planning_cpu_s_all_ranks": time.process_time() - started_cpu,
        "planner_peak_bytes": peak_bytes,
    }
    print(json.dumps(result))


def _planner(args: argparse.Namespace) -> TransferPlanner:
    arch = Architecture.from_config(PUBLISHED[args.arch])
    return TransferPlanner(
        MegatronPlacement(arch, training_layout(args.train, arch.num_layers), args.world),
        VLLMPlacement(arch, engine_layout(args.infer), args.world),
        topology=Topology(node_size=args.node_size),
        staging_budget_bytes=args.staging_megabytes * 2**20,
    )


def _summary(planner: TransferPlanner, rank: int, size: dict[str, int]) -> dict[str, int]:
    plan = planner.plan(rank)
    own = sum(box.numel * size[box.tensor] for box in planner.sources.local(rank).boxes)
    return {
        "recv": plan.bytes_recv,
        "sent": plan.bytes_sent,
        "local": plan.bytes_local,
        "lower_bound": plan.bytes_lower_bound,
        "own": own,
        "internode": plan.bytes_internode,
        "ops": plan.ops,
        "buckets": len(plan.buckets),
        "staging": plan.staging_peak_bytes,
    }


if __name__ == "__main__":
    main()
