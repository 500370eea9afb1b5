"""Import and export of Hugging Face directories."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlite.layout.architecture import Architecture
from rlite.layout.catalogue import catalogue
from rlite.layout.megatron import MegatronPlacement, megatron_boxes
from rlite.layout.parallel import ParallelLayout
from rlite.reshard.safetensors_io import INDEX_FILE, hf_config, load_hf_weights, save_hf_weights
from tests.helpers.world import run_world
from tests.reshard.reference import megatron_reference, random_weights
from tests.reshard.tiny import CONFIGS


def _weights(config: dict, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    arch = Architecture.from_config(config)
    return random_weights({tensor.name: tensor.shape for tensor in catalogue(arch).values()}, dtype)


def _write_checkpoint(directory, config: dict, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")


def _import_on(rank: int, directory, config: dict, layout: ParallelLayout, dtype: str) -> dict[str, torch.Tensor]:
    local = megatron_boxes(Architecture.from_config(config), layout, 4, rank, dtype=dtype)
    tensors = {t.name: torch.full(t.shape, float("nan"), dtype=getattr(torch, t.dtype)) for t in local.tensors}
    load_hf_weights(directory, local, tensors)
    return tensors


@pytest.mark.parametrize("name", CONFIGS)
def test_import_gives_every_rank_its_slices(name, tmp_path):
    config = CONFIGS[name]
    experts = {"ep": 2} if Architecture.from_config(config).moe else {"etp": 2}
    layout = ParallelLayout(tp=2, pp=2, first_stage_layers=1, **experts)
    weights = _weights(config)
    _write_checkpoint(tmp_path, config, weights)
    for rank in range(4):
        imported = _import_on(rank, tmp_path, config, layout, "float32")
        expected = megatron_reference(config, weights, layout, 4, rank)
        assert imported.keys() == expected.keys()
        assert all(torch.equal(imported[key], expected[key]) for key in expected)


def test_import_casts_to_the_local_dtype_and_keeps_the_router_bias_fp32(tmp_path):
    config = CONFIGS["deepseek_v3"]
    weights = _weights(config)
    _write_checkpoint(tmp_path, config, weights)
    imported = _import_on(0, tmp_path, config, ParallelLayout(ep=4), "bfloat16")
    bias = imported["0.decoder.layers.1.mlp.router.expert_bias"]
    assert torch.equal(bias, weights["model.layers.1.mlp.gate.e_score_correction_bias"])
    norm = imported["0.decoder.final_layernorm.weight"]
    assert torch.equal(norm, weights["model.norm.weight"].bfloat16())


def test_import_names_a_missing_tensor(tmp_path):
    config = CONFIGS["llama"]
    weights = _weights(config)
    del weights["model.layers.2.mlp.up_proj.weight"]
    _write_checkpoint(tmp_path, config, weights)
    with pytest.raises(ValueError, match=r"safetensors has no tensor model.layers.2.mlp.up_proj.weight"):
        _import_on(0, tmp_path, config, ParallelLayout(), "float32")


def test_import_names_a_tensor_of_another_shape(tmp_path):
    config = CONFIGS["llama"]
    weights = _weights(config)
    weights["lm_head.weight"] = weights["lm_head.weight"][:50].clone()
    _write_checkpoint(tmp_path, config, weights)
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(50, 40\)"):
        _import_on(0, tmp_path, config, ParallelLayout(), "float32")


def test_import_names_a_tensor_that_the_config_of_the_checkpoint_does_not_have(tmp_path):
    _write_checkpoint(tmp_path, {**CONFIGS["llama"], "num_hidden_layers": 2}, _weights(CONFIGS["llama"]))
    with pytest.raises(ValueError, match=r"config.json has no tensor model.layers.2.input_layernorm.weight"):
        _import_on(0, tmp_path, CONFIGS["llama"], ParallelLayout(), "float32")


def test_import_refuses_quantised_weights(tmp_path):
    config = CONFIGS["llama"]
    weights = _weights(config)
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.float8_e4m3fn)
    _write_checkpoint(tmp_path, config, weights)
    with pytest.raises(ValueError, match=r"lm_head.weight is stored as F8_E4M3; convert"):
        _import_on(0, tmp_path, config, ParallelLayout(), "float32")


def test_import_without_weights_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        _import_on(0, tmp_path, CONFIGS["llama"], ParallelLayout(), "float32")


def _export(source_dir, out_dir, config: dict, layout: ParallelLayout, max_shard_bytes: int) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    placement = MegatronPlacement(Architecture.from_config(config), layout, world_size, dtype="float32")
    tensors = megatron_reference(config, _weights(config), layout, world_size, rank)
    save_hf_weights(
        out_dir,
        placement,
        tensors,
        config_dir=source_dir,
        max_shard_bytes=max_shard_bytes,
        staging_budget_bytes=2**16,
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [("deepseek_v3", ParallelLayout(pp=2, ep=1, first_stage_layers=1)), ("qwen3_moe", ParallelLayout(tp=2, ep=2)),
     ("qwen2", ParallelLayout(pp=2, first_stage_layers=2))],
)  # fmt: skip
def test_export_restores_the_checkpoint_in_bounded_files(name, layout, tmp_path):
    config, weights, limit = CONFIGS[name], _weights(CONFIGS[name]), 40_000
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    _write_checkpoint(source, config, weights)
    run_world(2, _export, source, out, config, layout, limit)
    index = json.loads((out / INDEX_FILE).read_text())
    files = sorted(out.glob("*.safetensors"))
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert len(files) > 2
    exported = {}
    for path in files:
        part = load_file(path)
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= limit
        exported |= part
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[key], weights[key]) for key in weights)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert (out / "tokenizer.json").exists()
    assert not list(out.glob("*.partial"))


def test_small_export_is_one_file_that_transformers_reads_with_equal_logits(tmp_path):
    from transformers import AutoModelForCausalLM

    config = {**CONFIGS["qwen3_moe"], "num_experts_per_tok": 2, "architectures": ["Qwen3MoeForCausalLM"]}
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    _write_checkpoint(source, config, _weights(config))
    run_world(2, _export, source, out, config, ParallelLayout(ep=2), 2**30)
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    tokens = torch.arange(12).unsqueeze(0)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, out)]
    with torch.no_grad():
        before, after = (model(tokens).logits for model in models)
    assert torch.equal(before, after)


def test_deepseek_config_says_what_vllm_needs():
    out = hf_config({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "torch_dtype": "float32"}, "bfloat16")
    assert out == {
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 0,
        "dtype": "bfloat16",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
