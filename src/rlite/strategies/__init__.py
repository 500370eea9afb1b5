"""Lightning strategy and precision."""

from rlite.strategies.colocated import ColocatedRLStrategy
from rlite.strategies.precision import MegatronPrecision

__all__ = ["ColocatedRLStrategy", "MegatronPrecision"]
