"""One accelerator, a few minutes: is the trainer right there, how fast does memory move, and does the plan hold?

python benchmarks/device_check.py [--device cuda|npu|cpu] [--megabytes 512]

Needs torch, megatron-core and lightning, no engine. Prints one JSON line last:
  loss_diff, grad_norm_rel_diff     a training step on the device against the same step on the CPU (fp32)
  offload_gb_per_s, onload_gb_per_s of flat buffers; pinned_gb_per_s, a plain pinned copy to the host
  peak_bytes, planned_bytes         in TRAIN: allocated at most, and weights + gradients + optimizer state as laid out
The first line names what was found. On a CPU it compares the CPU with itself: a check of the script, not of a device.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "configs" / "models" / "tiny_dsv3" / "config.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), help="by default the best one here")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the buffers that are moved")
    parser.add_argument("--step_only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from rlite import device as devices

    kind = devices.DeviceKind(options.device) if options.device else devices.detect_device_kind()
    if options.step_only:
        print(json.dumps(training_step(kind)))
        return
    # Megatron-core is prepared for one kind of device in a process, so the CPU's step runs in another.
    command = [sys.executable, __file__, "--step_only", "--device", "cpu"]
    reference = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    step = training_step(kind)
    result = {
        "device": kind.value,
        "loss_diff": abs(step["loss"] - reference["loss"]),
        "grad_norm_rel_diff": abs(step["grad_norm"] / reference["grad_norm"] - 1.0),
        "peak_bytes": step["peak_bytes"],
        "planned_bytes": step["planned_bytes"],
        **moves(kind, options.megabytes * 2**20),
    }
    print(json.dumps(result))


def training_step(kind: Any) -> dict[str, float]:
    """One optimizer step of the tiny model on fixed rows."""
    from rlite import device as devices
    from rlite.layout.parallel import ParallelLayout
    from rlite.megatron.bootstrap import bootstrap

    print(bootstrap(kind), file=sys.stderr)
    devices.local_device(kind)
    dist.init_process_group(kind.backend, store=dist.HashStore(), rank=0, world_size=1)
    from rlite.megatron.buffers import flat_gradients, flat_optimizer_state, flat_parameters
    from rlite.megatron.groups import build_process_groups
    from rlite.megatron.model import build_policy
    from rlite.megatron.optimizer import build_optimizer, wrap_for_training
    from rlite.megatron.options import OptimizerConfig
    from rlite.megatron.runner import PolicyRunner

    layout = ParallelLayout()
    build_process_groups(layout)
    chunks = wrap_for_training(list(build_policy(json.loads(POLICY.read_text()), layout)))
    optimizer = build_optimizer(chunks, OptimizerConfig(lr=1e-3))
    state = flat_optimizer_state(optimizer)
    planned = sum(t.numel() * t.element_size() for t in [*flat_parameters(chunks), *flat_gradients(chunks), *state])
    devices.reset_peak(kind)
    result = PolicyRunner(chunks, layout, optimizer=optimizer).update(fixed_rows(), mean_loss)
    measured = devices.peak_bytes(kind)
    dist.destroy_process_group()
    return {
        "loss": result.metric_sums["loss"],
        "grad_norm": result.grad_norm,
        "peak_bytes": measured,
        "planned_bytes": planned,
    }


def fixed_rows() -> list[Any]:
    from rlite.types import TokenRow

    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (24, 17, 31, 8):
        mask = torch.ones(length, dtype=torch.bool)
        mask[: length // 2] = False
        rows.append(TokenRow(token_ids=torch.randint(0, 64, (length,), generator=generator), loss_mask=mask))
    return rows


def mean_loss(rows: Any, scores: Any) -> Any:
    from rlite.types import LossOutput

    total = sum(row.num_loss_tokens for row in fixed_rows())
    loss = -scores.logprobs.sum() / total
    return LossOutput(loss=loss, metric_sums={"loss": loss.detach()})


def moves(kind: Any, num_bytes: int) -> dict[str, float]:
    """Speeds of leaving and coming back, the second time, when the host arena exists."""
    from rlite import device as devices
    from rlite.memory import FlatBuffers

    where = devices.local_device(kind)
    buffers = FlatBuffers("buffers", [torch.ones(num_bytes // 4, device=where)])
    host = devices.host_buffer(num_bytes, kind)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=where)

    def gb_per_s(action: Any) -> float:
        devices.synchronize(kind)
        started = time.perf_counter()
        action()
        devices.synchronize(kind)
        return num_bytes / (time.perf_counter() - started) / 1e9

    speeds = {}
    for _ in range(2):
        speeds["offload_gb_per_s"] = gb_per_s(buffers.offload)
        speeds["onload_gb_per_s"] = gb_per_s(buffers.onload)
        speeds["pinned_gb_per_s"] = gb_per_s(lambda: host.copy_(source))
    return speeds


if __name__ == "__main__":
    main()
