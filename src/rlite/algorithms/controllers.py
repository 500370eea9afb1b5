"""Coefficients that follow a measured value. Plain state machines: one `update` after each rollout step."""

from dataclasses import dataclass

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
