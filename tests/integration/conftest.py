"""Engines are imported once here, in the parent; every run is a fork of it."""

import pytest

from rlite.device import DeviceKind
from rlite.megatron.bootstrap import bootstrap


@pytest.fixture(scope="session", autouse=True)
def engines() -> None:
    bootstrap(DeviceKind.CPU)
    from rlite.rollout import vllm_compat

    vllm_compat.apply_cpu_fixes()
    import rlite.cli.app  # noqa: F401
