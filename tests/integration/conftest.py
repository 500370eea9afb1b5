"""Engines are imported once here, in the parent; every run is a fork of it."""

from typing import Any

import pytest

from rlite.device import DeviceKind
from rlite.megatron.bootstrap import bootstrap


@pytest.fixture(scope="session", autouse=True)
def engines(original_functions: dict[str, Any]) -> None:
    bootstrap(DeviceKind.CPU)
    import rlite.cli.app  # noqa: F401
