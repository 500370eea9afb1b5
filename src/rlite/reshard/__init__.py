"""Moves weights from any layout to any other: a planner (`plan`), an executor (`transfer`), and files as endpoints."""

from rlite.reshard.plan import TransferPlan, TransferPlanner, plan_transfer
from rlite.reshard.routes import Topology
from rlite.reshard.transfer import Transfer, TransferStats

__all__ = ["Topology", "Transfer", "TransferPlan", "TransferPlanner", "TransferStats", "plan_transfer"]
