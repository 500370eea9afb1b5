"""Coefficients that follow a measured value. Plain state machines: one `update` after each rollout step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlite.algorithms.config import AlgorithmConfig

KL_ERROR_BOUND = 0.2


@dataclass(slots=True, kw_only=True)
class AdaptiveKL:
    """coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * completions / horizon (arXiv 1909.08593)."""

    coef: float
    target: float
    horizon: int

    def update(self, kl: float, *, completions: int) -> float:
        """`kl`: measured mean, nats per token. Returns the coefficient of the next step."""
        error = min(max(kl / self.target - 1.0, -KL_ERROR_BOUND), KL_ERROR_BOUND)
        self.coef *= 1.0 + error * completions / self.horizon
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])


@dataclass(slots=True, kw_only=True)
class AdaptiveEntropy:
    """Raises the bonus by `delta` while the entropy is at or below `target`, else lowers it.

    Skywork-OR1, arXiv 2505.22312. The bonus applies only while the entropy is at or below the target.
    """

    coef: float
    target: float
    delta: float = 0.005
    coef_min: float = 0.0
    coef_max: float = 1.0
    active: bool = False
    """Whether the last measured entropy was at or below the target."""

    def update(self, entropy: float) -> float:
        """`entropy`: token mean of the last step, in nats. Returns the coefficient that the next step applies."""
        self.active = entropy <= self.target
        step = self.delta if self.active else -self.delta
        self.coef = min(max(self.coef + step, self.coef_min), self.coef_max)
        return self.applied

    @property
    def applied(self) -> float:
        return self.coef if self.active else 0.0

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef, "active": float(self.active)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef, self.active = float(state["coef"]), bool(state["active"])


class Coefficients:
    """`kl_coef` and `entropy_coef` of the coming step: fixed, or following their targets in the config."""

    def __init__(self, config: "AlgorithmConfig") -> None:
        self._config = config
        self._kl = self._entropy = None
        if config.kl_target is not None:
            self._kl = AdaptiveKL(coef=config.kl_coef, target=config.kl_target, horizon=config.kl_horizon)
        if config.entropy_target is not None:
            self._entropy = AdaptiveEntropy(coef=config.entropy_coef, target=config.entropy_target)

    @property
    def kl(self) -> float:
        return self._config.kl_coef if self._kl is None else self._kl.coef

    @property
    def entropy(self) -> float:
        return self._config.entropy_coef if self._entropy is None else self._entropy.applied

    def update(self, metrics: Mapping[str, float], *, completions: int) -> None:
        """After a step, with its summarised metrics (`kl`, `entropy`) and the number of completions it trained on."""
        if self._kl is not None and "kl" in metrics:
            self._kl.update(metrics["kl"], completions=completions)
        if self._entropy is not None and "entropy" in metrics:
            self._entropy.update(metrics["entropy"])

    def state_dict(self) -> dict[str, dict[str, float]]:
        controllers = {"kl": self._kl, "entropy": self._entropy}
        return {name: controller.state_dict() for name, controller in controllers.items() if controller is not None}

    def load_state_dict(self, state: Mapping[str, dict[str, float]]) -> None:
        """Takes what the state has for the controllers that the config switches on; the others start afresh."""
        for name, controller in (("kl", self._kl), ("entropy", self._entropy)):
            if controller is not None and name in state:
                controller.load_state_dict(state[name])
