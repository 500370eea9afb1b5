"""Writing files that outlive a power cut."""

import os
from pathlib import Path


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Returns when the bytes are on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
