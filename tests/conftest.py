"""vLLM is imported once, by a fixture; every test world is a fork of this process."""

import gc
import os
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")


@pytest.fixture(scope="session")
def original_functions() -> dict[str, Any]:
    """Applies the CPU fixes, imports vLLM, and returns what stock vLLM had at each fix's target."""
    pytest.importorskip("vllm")
    from rlite.rollout import vllm_compat

    originals = {}
    for fix in vllm_compat.CPU_FIXES:
        owner, name = vllm_compat.resolve(fix)
        originals[fix.target] = getattr(owner, name)
        setattr(owner, name, fix.replacement)
    import vllm.v1.worker.cpu_model_runner  # noqa: F401
    from vllm import LLM  # noqa: F401

    # Otherwise every collection in every fork walks, and so copies, all that was imported: seconds a world.
    gc.freeze()
    return originals
