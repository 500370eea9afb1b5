"""`bootstrap(kind)` is the first importer of Megatron-core: it prepares it for the device of the run.

Call it before importing any other module of `rlite.megatron` (they import `megatron.core` at their top). On an NPU
MindSpeed has to patch torch before Megatron-core is imported; on a CPU Megatron-core gets a CPU view of torch.
"""

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlite.device import DeviceKind, detect_device_kind

SUPPORTED_VERSION = "0.16.1"
"""The Megatron-core release whose private names the compat modules know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What this process found; printed once at start-up."""

    device: DeviceKind
    megatron_version: str
    transformer_engine: bool
    mindspeed: bool
    gradient_accumulation_fusion: bool = False
    """A matrix product that adds to the gradient buffer: Transformer Engine's or APEX's."""

    def __str__(self) -> str:
        spec = "transformer-engine" if self.transformer_engine else "portable"
        return (
            f"megatron-core {self.megatron_version} on {self.device.value} (backend {self.device.backend}), "
            f"layer spec {spec}, mindspeed {'yes' if self.mindspeed else 'no'}"
        )


_capabilities: Capabilities | None = None


def bootstrap(kind: DeviceKind | None = None) -> Capabilities:
    """Import Megatron-core for `kind` (detected when None). Idempotent.

    Raises:
        RuntimeError: called again for another device, after somebody else imported Megatron-core on an NPU, or with a
            Megatron-core release other than `SUPPORTED_VERSION`.
    """
    global _capabilities
    if _capabilities is not None:
        if kind is not None and kind is not _capabilities.device:
            raise RuntimeError(f"Megatron-core was bootstrapped for {_capabilities.device}; {kind} needs a new process")
        return _capabilities
    kind = kind or detect_device_kind()
    if kind is DeviceKind.NPU:
        _import_mindspeed()
    with _without_compile(active=kind is DeviceKind.CPU), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core
    _check_version(megatron.core.__version__)
    has_te = kind is DeviceKind.CUDA and importlib.util.find_spec("transformer_engine") is not None
    with _without_compile(active=kind is DeviceKind.CPU), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _apply_fixes(kind, has_te=has_te)
    _capabilities = Capabilities(
        device=kind,
        megatron_version=megatron.core.__version__,
        transformer_engine=has_te,
        mindspeed="mindspeed" in sys.modules,
        gradient_accumulation_fusion=kind is DeviceKind.CUDA
        and (has_te or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None),
    )
    return _capabilities


def capabilities() -> Capabilities:
    """What `bootstrap` found. Raises RuntimeError before it ran."""
    if _capabilities is None:
        raise RuntimeError("rlite.megatron.bootstrap.bootstrap() has not run yet")
    return _capabilities


def _apply_fixes(kind: DeviceKind, *, has_te: bool) -> None:
    from rlite.megatron import compat_cpu, compat_fixes

    if kind is not DeviceKind.NPU and not has_te:
        compat_fixes.apply_without_transformer_engine()
    compat_fixes.apply()
    if kind is DeviceKind.CPU:
        compat_cpu.apply()


def _check_version(version: str) -> None:
    if version.split("+")[0] != SUPPORTED_VERSION and "mindspeed" not in sys.modules:
        raise RuntimeError(
            f"megatron-core {version} is installed, but rlite's compat modules are written for {SUPPORTED_VERSION}: "
            f"pip install megatron-core=={SUPPORTED_VERSION}"
        )


def _import_mindspeed() -> None:
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before MindSpeed could patch torch: call bootstrap() first")
    importlib.import_module("torch_npu")
    argv = sys.argv
    sys.argv = argv[:1]  # MindSpeed parses the command line when it is imported
    try:
        importlib.import_module("mindspeed.megatron_adaptor")
    finally:
        sys.argv = argv


@contextlib.contextmanager
def _without_compile(*, active: bool) -> Iterator[None]:
    """Megatron-core compiles about 25 small functions at import; on a CPU torch.compile needs a C++ compiler."""
    if not active:
        yield
        return
    real_compile = torch.compile
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)
    try:
        yield
    finally:
        torch.compile = real_compile
