"""Expert load, FLOPs and adaptive coefficients against the golden file and by hand."""

from pathlib import Path

import pytest
import torch

from benchmarks.golden import Golden, to_tensor
from rlite import algorithms as alg

DATA = Golden(Path(__file__).parents[1] / "golden" / "losses.json").data
SHAPE_NAMES = {
    "inter": "ffn",
    "moe_inter": "expert_ffn",
    "shared": "shared_experts",
    "qk_nope": "qk_nope_head_dim",
    "qk_rope": "qk_rope_head_dim",
    "v_head": "v_head_dim",
}
MODELS = [name for name in DATA["flops"] if name != "seqlens"]


def model_shape(name):
    return alg.ModelShape(**{SHAPE_NAMES.get(key, key): value for key, value in DATA["flops"][name]["config"].items()})


def test_expert_load_and_violation():
    moe = DATA["moe"]
    load_E = alg.expert_load(torch.tensor(moe["native_topk"]), 4)
    assert load_E.tolist() == moe["load"]
    assert alg.load_violation(load_E) == pytest.approx({name: moe[name] for name in ("max_vio", "min_vio", "avg_vio")})
    assert alg.load_violation(torch.zeros(4)) == {"max_vio": 0.0, "min_vio": 0.0, "avg_vio": 0.0}


def test_routing_mismatch():
    routes_Nk, replayed_Nk = torch.tensor(DATA["moe"]["native_topk"]), torch.tensor(DATA["moe"]["replay_idx"])
    got_N = alg.routing_mismatch(routes_Nk, replayed_Nk)
    assert got_N.tolist() == [0.5, 0.0, 0.5]
    assert got_N.mean().item() == pytest.approx(DATA["moe"]["routing_mismatch_fraction"])
    assert not alg.routing_mismatch(routes_Nk, routes_Nk.flip(1)).any()


def test_load_balancing_loss():
    logits_NE = to_tensor(DATA["moe"]["router_logits"])
    got = alg.load_balancing_loss(logits_NE, torch.tensor(DATA["moe"]["native_topk"]))
    assert got.item() == pytest.approx(DATA["moe"]["aux_switch"], abs=1e-12, rel=0)


@pytest.mark.parametrize("name", MODELS)
def test_train_flops(name):
    want = DATA["flops"][name]["train"]
    shape, lengths = model_shape(name), DATA["flops"]["seqlens"]
    assert shape.active_weights == want["active_matmul_params"]
    assert alg.train_flops(shape, lengths) == want["total"]
    assert alg.forward_flops(shape, lengths) == want["total"] / 3


@pytest.mark.parametrize("name", ["qwen3_0.6b", "qwen3_30b_a3b"])
def test_generate_flops_is_prefill_plus_one_step_for_each_later_token(name):
    shape = model_shape(name)
    steps = [2 * shape.active_weights + 2 * shape.layers * shape.score_dim * context for context in (11, 12, 13)]
    assert alg.generate_flops(shape, 10, 4) == alg.forward_flops(shape, [10]) + sum(steps)


def test_absorbed_latent_attention_decodes_over_the_latent():
    # 2 L nh (2 rkv + dr) c with L 61, nh 128, rkv 512, dr 64.
    shape = model_shape("deepseek_v3")
    step = alg.generate_flops(shape, 1000, 2) - alg.forward_flops(shape, [1000])
    assert step == 2 * shape.active_weights + 2 * 61 * 128 * (2 * 512 + 64) * 1001


def test_model_shape_from_hugging_face():
    config = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    }
    lengths = [512, 1024]
    assert alg.train_flops(alg.ModelShape.from_hf(config), lengths) == alg.train_flops(
        model_shape("qwen3_30b_a3b"), lengths
    )


def test_mfu():
    assert alg.mfu(4e15, seconds=2.0, devices=8, peak_flops=1e15) == 0.25


def test_update_metrics_know_the_peak_of_some_devices_only() -> None:
    shape = alg.ModelShape(hidden=4, layers=1, heads=1, vocab=10, ffn=8, kv_heads=1, head_dim=4)
    flops = 2 * alg.train_flops(shape, [3, 5])
    known = alg.update_metrics(shape, [3, 5], epochs=2, seconds=0.5, devices=2, device_name="NVIDIA H100 80GB HBM3")
    assert known == {"perf/tflops/actor": flops / 1e12, "perf/mfu/actor": flops / 989e12}
    unknown = alg.update_metrics(shape, [3, 5], epochs=2, seconds=0.5, devices=2, device_name="cpu")
    assert unknown.keys() == {"perf/tflops/actor"}


def test_adaptive_kl():
    case = DATA["controllers"]["adaptive_kl"]
    controller = alg.AdaptiveKL(coef=case["beta"], target=case["target"], horizon=case["horizon"])
    assert controller.update(case["kl"], completions=case["n"]) == pytest.approx(case["beta_next"], abs=1e-15, rel=0)
    lowered = alg.AdaptiveKL(coef=0.1, target=0.05, horizon=1000)
    assert lowered.update(0.0, completions=1000) == pytest.approx(0.08)


def test_adaptive_entropy():
    case = DATA["controllers"]["adaptive_entropy"]
    for entropy, coef, applied in zip(case["entropy"], case["coef_next"], case["applied_next_step"], strict=True):
        controller = alg.AdaptiveEntropy(coef=case["coef"], target=case["target"], delta=case["delta"])
        assert controller.update(entropy) == (pytest.approx(coef) if applied else 0.0)
        assert controller.coef == pytest.approx(coef)


def test_adaptive_entropy_stays_in_its_range():
    controller = alg.AdaptiveEntropy(coef=0.0, target=0.2, delta=0.6)
    assert controller.update(0.5) == 0.0 and controller.coef == 0.0
    assert [controller.update(0.1), controller.update(0.1)] == [0.6, 1.0]


@pytest.mark.parametrize(
    "controller",
    [alg.AdaptiveKL(coef=0.3, target=1.0, horizon=10), alg.AdaptiveEntropy(coef=0.3, target=1.0, active=True)],
)
def test_controllers_resume(controller):
    fresh = type(controller)(
        **{"coef": 0.0, "target": 1.0} | ({"horizon": 10} if hasattr(controller, "horizon") else {})
    )
    fresh.load_state_dict(controller.state_dict())
    assert fresh == controller


def test_high_entropy_threshold_is_the_linear_quantile():
    entropy_N = torch.tensor([0.3, 0.1, 2.0, 1.0, 0.7])
    for fraction in (0.2, 0.33, 1.0):
        want = torch.quantile(entropy_N.double(), 1.0 - fraction).item()
        assert alg.high_entropy_threshold(entropy_N, fraction) == pytest.approx(want, abs=1e-12, rel=0)
    assert alg.high_entropy_threshold(torch.zeros(0), 0.2) == 0.0


def test_tokens_at_the_threshold_keep_their_gradient():
    entropy_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    threshold = alg.high_entropy_threshold(entropy_N, 0.5)
    assert threshold == 3.0
    assert alg.high_entropy_mask(entropy_N, threshold).tolist() == [False, False, True, True, True]


def test_fixed_coefficients_stay():
    coefficients = alg.Coefficients(alg.AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01))
    coefficients.update({"kl": 5.0, "entropy": 0.0}, completions=1000)
    assert (coefficients.kl, coefficients.entropy) == (0.1, 0.01)
    assert coefficients.state_dict() == {}


def test_adaptive_coefficients_follow_the_metrics_and_resume():
    config = alg.AlgorithmConfig(kl_coef=0.1, kl_target=0.05, kl_horizon=1000, entropy_coef=0.01, entropy_target=0.2)
    coefficients, resumed = alg.Coefficients(config), alg.Coefficients(config)
    assert (coefficients.kl, coefficients.entropy) == (0.1, 0.0)
    coefficients.update({"kl": 0.08, "entropy": 0.15}, completions=64)
    assert coefficients.kl == pytest.approx(0.10128, abs=1e-15, rel=0)
    assert coefficients.entropy == pytest.approx(0.015, abs=1e-15, rel=0)
    resumed.load_state_dict(coefficients.state_dict())
    assert (resumed.kl, resumed.entropy) == (coefficients.kl, coefficients.entropy)
