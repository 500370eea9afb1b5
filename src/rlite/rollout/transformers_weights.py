"""A transformers model's weights under their checkpoint names."""

import re

from torch import Tensor
from transformers import PreTrainedModel

_FUSED = re.compile(r"(?P<mlp>.*\.mlp)\.experts\.(?P<part>gate_up_proj|down_proj)$")
_ROUTER_BIAS = ".e_score_correction_bias"


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and router biases as transformers keeps them; a tied head appears once."""
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    return tensors | {name: buffer for name, buffer in model.named_buffers() if name.endswith(_ROUTER_BIAS)}


def keep_router_bias_fp32(model: PreTrainedModel) -> None:
    """As the checkpoint and the trainer do: rounded to bf16 it would choose other experts."""
    for name, buffer in model.named_buffers():
        if name.endswith(_ROUTER_BIAS):
            model.get_submodule(name.removesuffix(_ROUTER_BIAS)).e_score_correction_bias = buffer.float()


def canonical_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The same storages under checkpoint names: the experts that transformers fuses (`gate_up_proj [E, 2I, H]`,
    `down_proj [E, H, I]`) become views `experts.{e}.gate_proj.weight` and so on; Mixtral keeps its own names."""
    is_mixtral = model.config.model_type == "mixtral"
    weights: dict[str, Tensor] = {}
    for name, tensor in stored_tensors(model).items():
        if fused := _FUSED.match(name):
            weights |= _expert_views(fused["mlp"], fused["part"], tensor, is_mixtral)
        else:
            weights[name] = tensor
    if is_mixtral:
        weights = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in weights.items()}
    return weights


def _expert_views(mlp: str, part: str, tensor: Tensor, is_mixtral: bool) -> dict[str, Tensor]:
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    views: dict[str, Tensor] = {}
    for expert, weight in enumerate(tensor):
        prefix = f"{mlp}.experts.{expert}."
        if part == "down_proj":
            views[f"{prefix}{down}.weight"] = weight
        else:
            views[f"{prefix}{gate}.weight"], views[f"{prefix}{up}.weight"] = weight.chunk(2)
    return views
