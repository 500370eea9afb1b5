"""Preparing Megatron-core for a device, and the private names this relies on."""

import importlib
import subprocess
import sys

import pytest
import torch

import rlite.megatron.bootstrap as bootstrap_module
from rlite.device import DeviceKind
from rlite.megatron.bootstrap import bootstrap, capabilities
from rlite.megatron.patching import PATCHED, replace


def test_bootstrap_is_idempotent_and_reports_one_line() -> None:
    assert bootstrap() is bootstrap(DeviceKind.CPU) is capabilities()
    assert str(capabilities()).startswith("megatron-core 0.16.1 on cpu (backend gloo), layer spec portable")


def test_another_device_needs_a_new_process() -> None:
    with pytest.raises(RuntimeError, match="needs a new process"):
        bootstrap(DeviceKind.CUDA)


def test_another_release_of_megatron_core_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.17\.0 is installed"):
        bootstrap_module._check_version("0.17.0")


@pytest.mark.parametrize("target", sorted(PATCHED))
def test_patched_name_exists(target: str) -> None:
    module_name, path = target.split(":")
    owner = importlib.import_module(f"megatron.core.{module_name}")
    for name in path.split("."):
        assert hasattr(owner, name), (
            f"megatron.core.{module_name} lost {path}; it was patched because: {PATCHED[target]}"
        )
        owner = getattr(owner, name)


def test_a_missing_private_name_fails_loudly() -> None:
    with pytest.raises(RuntimeError, match="has no DistributedOptimizer"):
        replace("optimizer.distrib_optimizer:DistributedOptimizer.renamed", lambda old: old, why="test")


@pytest.mark.parametrize("method", ["_postprocess", "shared_embedding_or_output_weight"])
def test_overridden_model_methods_exist(method: str) -> None:
    from megatron.core.models.gpt import GPTModel

    assert hasattr(GPTModel, method)


def test_torch_itself_is_not_changed() -> None:
    """In a fresh process: vLLM and transformers must see the torch that was imported."""
    script = """
import torch
names = ["compile", "zeros", "tensor", "device", "empty", "autocast"]
before = [getattr(torch, name) for name in names] + [torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda]
from rlite.device import DeviceKind
from rlite.megatron.bootstrap import bootstrap
bootstrap(DeviceKind.CPU)
after = [getattr(torch, name) for name in names] + [torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda]
assert all(a is b for a, b in zip(before, after)), "torch was changed"
import megatron.core.pipeline_parallel.schedules as schedules
assert schedules.torch is not torch and schedules.torch.zeros(1, device="cuda").device.type == "cpu"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_view_maps_cuda_to_the_cpu() -> None:
    from rlite.megatron.torch_view import TorchView

    view = TorchView()
    assert view.device("cuda") == torch.device("cpu")
    assert isinstance(torch.device("cpu"), view.device)
    assert view.empty(2, device=torch.device("cuda"), pin_memory=True).device.type == "cpu"
    assert view.cuda.current_device() == torch.device("cpu")
    assert view.nn is torch.nn
