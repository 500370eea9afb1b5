"""A run's configuration (the YAML file, or what the CLI parsed of it) becomes a `PlanJob`."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from rlite.algorithms.presets import algorithm_config
from rlite.config import BatchConfig
from rlite.layout.parallel import ParallelLayout
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.memory.budget import DeviceBudget
from rlite.memory.phases import OffloadPolicy
from rlite.plan.job import GIB, Cluster, PlanJob
from rlite.reshard.plan import DEFAULT_STAGING_BUDGET_BYTES
from rlite.rollout.config import TransformersConfig, VLLMConfig
from rlite.types import SamplingConfig

Config = Mapping[str, Any]
Settings = TypeVar("Settings")

_ENGINES: dict[str, type] = {"VLLMRollout": VLLMConfig, "TransformersRollout": TransformersConfig}
_DTYPES = {"32-true": "float32", "bf16-mixed": "bfloat16", "bf16-true": "bfloat16"}
_DEFAULT_PROMPT_TOKENS = 1024


def job_from_config(config: Config, *, cluster: Cluster) -> PlanJob:
    """Reads the keys that decide memory; missing ones have the defaults of a run.

    Raises:
        ValueError: a key that the plan needs is missing or of a kind that it does not know.
        FileNotFoundError: no `config.json` in `model.policy`.
    """
    trainer, model, data = (_section(config, key) for key in ("trainer", "model", "data"))
    model_args, data_args = _arguments(model), _arguments(data)
    callbacks = {_class_name(callback): _arguments(callback) for callback in trainer.get("callbacks") or []}
    strategy = _arguments(trainer["strategy"]) if isinstance(trainer.get("strategy"), Mapping) else {}
    rollout = next((name for name in _ENGINES if name in callbacks), None)
    if rollout is None:
        raise ValueError(f"trainer.callbacks: rlite plan needs {' or '.join(_ENGINES)} there, to know the engine")
    sampling = _settings(SamplingConfig, callbacks[rollout].get("sampling"))
    policy_dir = _required(model_args, "policy", key="model.policy")
    batch, algorithm = _settings(BatchConfig, model_args.get("batch")), model_args.get("algorithm")
    has_critic = _class_name(model).endswith("PPOModule") or "critic" in model_args or "critic_optimizer" in model_args
    default = "ppo" if has_critic else "grpo"
    objective = algorithm_config(default if algorithm is None else algorithm)
    moves_away = batch.updates_per_rollout > 1 and objective.old_policy == "trainer"
    return PlanJob(
        cluster=cluster,
        hf_config=_read_config_json(Path(policy_dir)),
        layout=_settings(ParallelLayout, strategy.get("layout")),
        megatron=_settings(MegatronOptions, strategy.get("megatron")),
        train_dtype=_train_dtype(trainer.get("precision") or "32-true"),
        optimizer=_settings(OptimizerConfig, model_args.get("optimizer")),
        critic_optimizer=_settings(OptimizerConfig, model_args.get("critic_optimizer")),
        engine=_settings(_ENGINES[rollout], callbacks[rollout].get("engine")),
        batch=batch,
        prompts_per_step=int(_required(data_args, "batch_size", key="data.batch_size")),
        max_prompt_tokens=(data_args.get("prompt") or {}).get("max_prompt_tokens", _DEFAULT_PROMPT_TOKENS),
        max_completion_tokens=sampling.max_tokens,
        needs_reference=objective.needs_ref_logprobs,
        scores_policy=moves_away or objective.needs_old_logprobs,
        has_critic=has_critic,
        offload=_offload_policy(callbacks.get("MemoryOffload")),
        budget=_budget(callbacks.get("MemoryOffload")),
        on_cpu=trainer.get("accelerator") == "cpu",
        staging_budget_bytes=callbacks.get("EP2TPConversion", {}).get(
            "staging_budget_bytes", DEFAULT_STAGING_BUDGET_BYTES
        ),
    )


def world_size_of(config: Config) -> int:
    """`trainer.devices * trainer.num_nodes`. Raises ValueError where `devices` is not a number."""
    trainer = _section(config, "trainer")
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes") or 1
    count = len(devices) if isinstance(devices, list | tuple) else devices
    if not str(count).isdigit() or int(count) < 1:
        raise ValueError(f"trainer.devices = {devices!r} is not a number of devices: set it, or pass --world_size")
    return int(count) * int(nodes)


def _section(config: Config, key: str) -> Config:
    section = config.get(key)
    if not isinstance(section, Mapping):
        raise ValueError(f"config: the section {key!r} is missing; rlite plan reads the file that `rlite fit` runs")
    return section


def _class_name(spec: Any) -> str:
    """Last part of a class path."""
    return str(spec["class_path"] if isinstance(spec, Mapping) else spec).rsplit(".", 1)[-1]


def _arguments(spec: Any) -> dict[str, Any]:
    """`init_args` of a class; a section without class path holds them directly."""
    if not isinstance(spec, Mapping):
        return {}
    return dict(spec.get("init_args") or {}) if "class_path" in spec else dict(spec)


def _required(arguments: Config, name: str, *, key: str) -> Any:
    if arguments.get(name) is None:
        raise ValueError(f"{key} is missing: rlite plan needs it")
    return arguments[name]


def _settings(kind: type[Settings], values: Any) -> Settings:
    """A settings dataclass from its mapping. Raises ValueError for a key that it does not have."""
    if values is None or isinstance(values, kind):
        return values or kind()
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{kind.__name__}.{unknown[0]}: unknown setting; known: {', '.join(sorted(known))}")
    listed = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return kind(**listed)


def _offload_policy(arguments: Config | None) -> OffloadPolicy:
    if arguments is None:
        return OffloadPolicy(name="none")
    return OffloadPolicy(
        name=arguments.get("policy", "full"),
        budget_bytes=int((arguments.get("budget_gib") or 0) * GIB),
        overlap=arguments.get("overlap", True),
        rebuild_weights=arguments.get("rebuild_weights", False),
    )


def _budget(arguments: Config | None) -> DeviceBudget | None:
    if arguments is None:
        return None
    limit_gib = arguments.get("device_budget_gib")
    return DeviceBudget(
        limit_bytes=None if limit_gib is None else int(limit_gib * GIB),
        reserve_bytes=int(arguments.get("reserve_gib", 1.0) * GIB),
    )


def _train_dtype(precision: Any) -> Any:
    if str(precision) not in _DTYPES:
        raise ValueError(f"trainer.precision = {precision!r}: use one of {', '.join(_DTYPES)}")
    return _DTYPES[str(precision)]


def _read_config_json(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"model.policy = {directory}: no config.json there; the plan reads the model's sizes in it, from a directory "
            "on this machine (download a policy of the hub first)"
        )
    return json.loads(path.read_text())
