"""`rlite plan`: what fits, what moves and how many devices it takes, before anything is launched.

Imports neither Lightning nor Megatron-core nor vLLM, and touches no device.
"""

from rlite.plan.command import run_plan
from rlite.plan.config import job_from_config
from rlite.plan.job import Cluster, PlanJob, Throughput
from rlite.plan.memory import MemoryPlan, plan_memory
from rlite.plan.report import Plan, make_plan

__all__ = [
    "Cluster",
    "MemoryPlan",
    "Plan",
    "PlanJob",
    "Throughput",
    "job_from_config",
    "make_plan",
    "plan_memory",
    "run_plan",
]
