"""`DeviceBudget`: what is really free on a device, for whoever may have the rest of it."""

from dataclasses import dataclass

from rlite import device
from rlite.device import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """How much of the device residents may hold together."""

    limit_bytes: int | None = None
    """None: as much as the device has. A CPU has no memory of its own, so there None means that nothing is planned."""
    reserve_bytes: int = 0
    """Kept free: workspace of the engine, communication buffers, fragmentation."""

    def free_bytes(self, kind: DeviceKind, *, held_bytes: int) -> int | None:
        """What a new resident may take beside `held_bytes` of residents; None where nothing is known.

        On an accelerator what its driver calls free counts, also below the limit.
        """
        bounds = [] if self.limit_bytes is None else [self.limit_bytes - held_bytes]
        if kind.is_accelerator:
            device.empty_cache(kind)
            bounds.append(device.free_bytes(kind))
        return max(0, min(bounds) - self.reserve_bytes) if bounds else None
