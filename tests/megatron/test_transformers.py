"""Log-probabilities and entropies equal those of the same weights in transformers, in fp32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlite.layout.parallel import ParallelLayout
from rlite.types import TokenRow, TokenScores
from tests.helpers.world import run_world
from tests.megatron.tiny import CONFIGS, bring_up, make_rows, shard_rows

ROPE_VARIANTS = {
    "llama_llama3_rope": {
        **CONFIGS["llama"],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "deepseek_v3_yarn": {
        **CONFIGS["deepseek_v3"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3_moe_with_dense_layer": {**CONFIGS["qwen3_moe"], "norm_topk_prob": False, "mlp_only_layers": [1]},
}
ALL = {**CONFIGS, **ROPE_VARIANTS}


def _random_model(config: dict[str, Any]) -> torch.nn.Module:
    arguments = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(config["model_type"], **arguments)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.05)
    return model


def _score(config: dict, layout: ParallelLayout, weights: dict[str, Tensor], rows: list[TokenRow]) -> Any:
    policy = bring_up(config, layout, weights=weights)
    indices, mine = shard_rows(rows, layout)
    return list(zip(indices, policy.runner.score(mine), strict=True))


def _expected(model: torch.nn.Module, row: TokenRow) -> TokenScores:
    with torch.no_grad():
        logprobs_TV = model(row.token_ids[None]).logits[0].log_softmax(-1)
    trained = row.loss_mask.nonzero()[:, 0]
    logprobs_NV = logprobs_TV[trained - 1]
    return TokenScores(
        logprobs=logprobs_NV.gather(-1, row.token_ids[trained, None])[:, 0],
        entropy=-(logprobs_NV.exp() * logprobs_NV).sum(-1),
    )


@pytest.mark.parametrize("name", sorted(ALL))
def test_scores_equal_transformers(name: str, tmp_path: Path) -> None:
    model = _random_model(ALL[name])
    model.save_pretrained(tmp_path)
    weights = {key: value for file in tmp_path.glob("*.safetensors") for key, value in load_file(file).items()}
    config = json.loads((tmp_path / "config.json").read_text())
    rows = make_rows(5)
    is_moe = "num_experts_per_tok" in config
    layout = ParallelLayout(ep=2) if is_moe else ParallelLayout()
    scored = dict(item for rank in run_world(2, _score, config, layout, weights, rows) for item in rank)
    for index, row in enumerate(rows):
        expected = _expected(model, row)
        torch.testing.assert_close(scored[index].logprobs, expected.logprobs, rtol=0, atol=1e-4)
        torch.testing.assert_close(scored[index].entropy, expected.entropy, rtol=0, atol=1e-4)
