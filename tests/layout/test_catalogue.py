import json
import math

import pytest
from safetensors import safe_open

from rlite.layout.architecture import Architecture
from rlite.layout.catalogue import catalogue
from tests.layout.published import DEEPSEEK_V3, QWEN3_30B_A3B, QWEN3_235B_A22B
from tests.reshard.tiny import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_that_transformers_saves(name, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(CONFIGS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    for hf_config in (CONFIGS[name], json.loads((tmp_path / "config.json").read_text())):
        arch = Architecture.from_config(hf_config)
        assert {tensor.name: tensor.shape for tensor in catalogue(arch).values()} == saved


@pytest.mark.parametrize(
    ("config", "billions"),
    [(DEEPSEEK_V3, 671.026), (QWEN3_30B_A3B, 30.532), (QWEN3_235B_A22B, 235.094)],
)
def test_published_models_have_their_published_size(config, billions):
    total = sum(math.prod(tensor.shape) for tensor in catalogue(Architecture.from_config(config)).values())
    assert total / 1e9 == pytest.approx(billions, abs=2e-3)


def test_router_bias_is_fp32_and_everything_else_follows_the_model():
    tensors = catalogue(Architecture.from_config(CONFIGS["deepseek_v3"])).values()
    fixed = {tensor.name: tensor.dtype for tensor in tensors if tensor.dtype}
    assert fixed == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias": "float32" for layer in (1, 2)}


def test_mtp_layer_is_named_behind_the_last_layer_and_off_by_default():
    arch = Architecture.from_config({**CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 1})
    extra = catalogue(arch, mtp=True).keys() - catalogue(arch).keys()
    assert all(name.startswith("model.layers.3.") for name in extra)
    assert {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.head.weight", "shared_head.norm.weight"} <= {
        name.removeprefix("model.layers.3.") for name in extra
    }
    assert catalogue(arch, mtp=True)["model.layers.3.eh_proj.weight"].shape == (40, 80)
