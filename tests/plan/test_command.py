"""`run_plan` on configurations as they are in files: verdict, exit code, suggestions, JSON, errors."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlite.plan import Cluster, job_from_config, plan_memory, run_plan
from rlite.plan.changes import changes_that_fit, single_changes
from rlite.plan.config import world_size_of
from rlite.rollout.config import VLLMConfig
from tests.plan.jobs import job

ROOT = Path(__file__).parents[2]


def load(name: str) -> dict[str, Any]:
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    arguments = config["model"]["init_args"]
    arguments["policy"] = str(ROOT / arguments["policy"])
    return config


def apply(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the settings of a suggestion."""
    config = copy.deepcopy(config)
    for key, value in settings.items():
        owner, *path, last = key.split(".")
        if path[:1] == ["strategy"]:
            place, path = config["trainer"]["strategy"].setdefault("init_args", {}), path[1:]
        elif owner == "trainer":
            place = config["trainer"]
        else:
            (callback,) = (c for c in config["trainer"]["callbacks"] if c["class_path"].endswith(owner))
            place = callback.setdefault("init_args", {})
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return config


def as_json(capsys: pytest.CaptureFixture[str], config: dict[str, Any], **options: Any) -> tuple[int, dict[str, Any]]:
    code = run_plan(config, as_json=True, **options)
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "enough", "too_little"),
    [
        ("grpo_demo_cpu", "512MiB", "256MiB"),
        ("grpo_qwen3_30b_a3b", "141GB", "64GiB"),
        ("grpo_qwen3_30b_a3b", "141GB", "78GiB"),
        ("grpo_dsv3", "64GiB", "60GiB"),
    ],
)
def test_first_suggestion_applied_makes_it_fit(name, enough, too_little, capsys):
    config = load(name)
    assert as_json(capsys, config, device_memory=enough)[0] == 0
    code, plan = as_json(capsys, config, device_memory=too_little)
    assert code == 1 and not plan["fits"] and plan["headroom_bytes"] < 0
    costs = [change["cost"] for change in plan["changes"]]
    assert costs and costs == sorted(costs)
    changed = apply(config, plan["changes"][0]["settings"])
    code, plan = as_json(capsys, changed, device_memory=too_little)
    assert code == 0 and plan["changes"] == []


def test_several_changes_are_combined_when_one_is_not_enough():
    """Training needs smaller micro-batches, generation a smaller KV cache."""
    engine = VLLMConfig(tp=2, dtype="float32", max_model_len=64, kv_cache_memory_bytes=8 * 2**20)
    plan = job(memory_bytes=20 * 2**20, prompts_per_step=64, engine=engine)
    assert not any(plan_memory(change.job).fits for change in single_changes(plan, plan_memory(plan)))
    (change,) = changes_that_fit(plan)
    assert plan_memory(change.job).fits
    keys = {"trainer.strategy.megatron.max_tokens_per_microbatch", "VLLMRollout.engine.kv_cache_memory_bytes"}
    assert keys <= change.settings.keys()


def test_combined_changes_leave_out_what_a_dearer_one_makes_needless():
    """Optimizer state decides: a larger tp is a step in the right direction, but only twice the devices get there."""
    config = load("grpo_dsv3")
    (change,) = changes_that_fit(job_from_config(config, cluster=Cluster(world_size=256, memory_bytes=50 * 2**30)))
    assert "trainer.num_nodes" in change.settings and "trainer.strategy.layout.tp" not in change.settings


def test_kv_cache_that_holds_no_sequence_does_not_fit(capsys):
    config = load("grpo_demo_cpu")
    rollout = config["trainer"]["callbacks"][0]["init_args"]["engine"]
    rollout["kv_cache_memory_bytes"] = 1000
    code = run_plan(config, device_memory="64GiB")
    text = capsys.readouterr().out
    assert code == 1 and "the KV cache cannot hold one sequence of 32 tokens" in text
    assert "1. VLLMRollout.engine.kv_cache_memory_bytes = " in text


def test_flagship_prints_tables_and_both_device_counts(capsys):
    assert run_plan(load("grpo_dsv3")) == 0
    text = capsys.readouterr().out
    for words in ("671 billion weights, on 256 devices", "GENERATE", "optimizer state", "FITS", "stages 1-14"):
        assert words in text
    counts = [int(line.split()[n]) for line in text.splitlines() for n in [-1] if line.startswith("  colocated ")]
    separated = [int(line.split()[2]) for line in text.splitlines() if line.startswith("  separated, on-policy")]
    assert counts == [256] and separated[0] > 256


def test_json_holds_every_kind_of_rank(capsys):
    _, plan = as_json(capsys, load("grpo_dsv3"), node_size=16, world_size=512)
    assert plan["cluster"]["world_size"] == 512 and plan["cluster"]["node_size"] == 16
    assert sum(len(c["ranks"]) for c in plan["rank_classes"]) == 512
    generate = plan["rank_classes"][0]["phases"]["generate"]
    assert generate["peak_bytes"] >= generate["held_bytes"] >= sum(generate["residents"].values())


def test_picture_is_written(tmp_path, capsys):
    run_plan(load("grpo_demo_cpu"), device_memory="512MiB", plot=tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"--plot needs matplotlib: pip install 'rlite\[plot\]'"):
        run_plan(load("grpo_demo_cpu"), plot=tmp_path / "plan.png")


def test_reads_what_a_run_would_do():
    config = load("grpo_dsv3")
    config["model"]["init_args"]["algorithm"] = {"preset": "dapo", "kl_coef": 0.01}
    plan = job_from_config(config, cluster=Cluster(world_size=256))
    assert (
        plan.needs_reference and plan.scores_policy and plan.train_dtype == "bfloat16" and plan.offload.name == "full"
    )
    assert (plan.layout.tp, plan.layout.pp, plan.layout.ep) == (2, 16, 16)
    assert (plan.engine.tp, plan.prompts_per_step, plan.max_completion_tokens) == (32, 512, 4096)
    config["model"]["init_args"]["batch"] = {"group_size": 8}
    assert not job_from_config(config, cluster=Cluster(world_size=256)).scores_policy, "one update is on-policy"
    offload = config["trainer"]["callbacks"][2].setdefault("init_args", {})
    offload |= {"rebuild_weights": True, "overlap": False, "device_budget_gib": 60.0, "reserve_gib": 2.0}
    plan = job_from_config(config, cluster=Cluster(world_size=256))
    assert plan.offload.rebuild_weights and not plan.offload.overlap and not plan.on_cpu
    assert (plan.budget.limit_bytes, plan.budget.reserve_bytes) == (60 * 2**30, 2 * 2**30)
    del config["trainer"]["callbacks"][2]
    assert job_from_config(config, cluster=Cluster(world_size=256)).offload.name == "none"
    assert job_from_config(config, cluster=Cluster(world_size=256)).budget is None
    config["trainer"]["strategy"] = "colocated_rl"
    assert job_from_config(config, cluster=Cluster(world_size=256)).layout.pp == 1


def test_ppo_counts_its_critic(capsys):
    config = load("ppo_demo_cpu")
    plan = job_from_config(config, cluster=Cluster(world_size=2))
    assert plan.has_critic and plan.on_cpu and not plan.needs_reference
    assert run_plan(config) == 0
    text = capsys.readouterr().out
    assert "CRITIC" in text and "critic optimizer" in text and "VACANT" in text
    for mine in ({"class_path": "mine.MyPPOModule"}, {"class_path": "mine.Other", "critic_optimizer": {"lr": 1e-5}}):
        model = {"class_path": mine.pop("class_path"), "init_args": config["model"]["init_args"] | mine}
        assert job_from_config(config | {"model": model}, cluster=Cluster(world_size=2)).has_critic


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("data"), "the section 'data' is missing"),
        (lambda c: c["trainer"].update(callbacks=[]), "rlite plan needs VLLMRollout"),
        (lambda c: c["trainer"].update(devices="auto"), "trainer.devices = 'auto' is not a number"),
        (lambda c: c["trainer"].update(precision="16-mixed"), "trainer.precision = '16-mixed'"),
        (lambda c: c["model"]["init_args"].pop("policy"), "model.policy is missing"),
        (lambda c: c["model"]["init_args"].update(policy="nowhere"), "nowhere: no config.json there"),
        (lambda c: c["trainer"]["strategy"]["init_args"]["layout"].update(xp=2), "ParallelLayout.xp: unknown setting"),
        (lambda c: c["trainer"]["strategy"]["init_args"]["layout"].update(ep=3), r"etp\*ep\*pp = 1\*3\*1"),
    ],
)
def test_errors_name_the_key(change, message):
    config = load("grpo_demo_cpu")
    change(config)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_plan(config)


@pytest.mark.parametrize("name", ["grpo_qwen3_30b_a3b", "grpo_dsv3"])
def test_what_the_command_line_parsed_gives_the_same_plan_as_the_file(name):
    """The flagship files parse, and every default that the parser fills in is the one that the plan assumes."""
    command = [sys.executable, "-m", "rlite", "fit", "--config", f"configs/{name}.yaml", "--print_config"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    parsed = yaml.safe_load(done.stdout)
    parsed["model"]["init_args"]["policy"] = str(ROOT / parsed["model"]["init_args"]["policy"])
    cluster = Cluster(world_size=world_size_of(parsed))
    assert job_from_config(parsed, cluster=cluster) == job_from_config(load(name), cluster=cluster)


def test_plan_imports_no_trainer_and_no_engine():
    script = (
        "import sys, yaml; from rlite.plan import run_plan\n"
        "run_plan(yaml.safe_load(open('configs/grpo_demo_cpu.yaml')))\n"
        "print([m for m in ('lightning', 'megatron', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
