"""`run_plan`: what the command `rlite plan` does with a configuration."""

import json
from pathlib import Path

from rlite.plan.config import Config, job_from_config, world_size_of
from rlite.plan.job import Cluster
from rlite.plan.report import as_json as plan_as_json
from rlite.plan.report import as_text, make_plan
from rlite.plan.sizes import parse_size


def run_plan(
    config: Config,
    *,
    world_size: int | None = None,
    device_memory: str = "64GiB",
    node_size: int = 8,
    link_gbps: float = 40.0,
    node_link_gbps: float = 150.0,
    host_gbps: float = 25.0,
    as_json: bool = False,
    plot: Path | None = None,
) -> int:
    """Predicts memory, traffic and devices of a run, and prints whether it fits. Needs no device and starts nothing.

    Args:
        config: the parsed configuration of `rlite fit`, or the same YAML file as a mapping.
        world_size: devices in all; by default those that the configuration asks for.
        device_memory: of one device, for example 64GiB or 80GB.
        node_size: devices in one node.
        link_gbps: gigabytes a second between nodes, for one device.
        node_link_gbps: the same inside a node.
        host_gbps: the same between a device and host memory.
        as_json: print JSON instead of tables.
        plot: picture file to write as well.

    Returns:
        Exit code: 0 when it fits, 1 when it does not.

    Raises:
        ValueError, FileNotFoundError: a configuration that no run could start with; see `job_from_config`.
    """
    cluster = Cluster(
        world_size=world_size or world_size_of(config),
        node_size=node_size,
        memory_bytes=parse_size(device_memory, key="--device_memory"),
        link_gb_per_s=link_gbps,
        node_link_gb_per_s=node_link_gbps,
        host_gb_per_s=host_gbps,
    )
    plan = make_plan(job_from_config(config, cluster=cluster))
    if plot is not None:
        from rlite.plan.picture import draw

        draw(plan, Path(plot))
    print(json.dumps(plan_as_json(plan), indent=1) if as_json else as_text(plan))
    return 0 if plan.memory.fits else 1
