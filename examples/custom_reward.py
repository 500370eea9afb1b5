"""A reward of your own: subclass `GRPOModule`, name the columns you want.

rlite fit --config configs/grpo_demo_cpu.yaml --model examples.custom_reward.CloseEnough --model.init_from runs/...
"""

from rlite import GRPOModule


class CloseEnough(GRPOModule):
    """Full marks for the right sum, some for a near one."""

    def reward(self, completions: list[str], answer: list[str]) -> list[float]:
        return [score(c.strip(), int(a)) for c, a in zip(completions, answer, strict=True)]


def score(completion: str, answer: int) -> float:
    return 1.0 / (1 + abs(int(completion) - answer)) if completion.isdigit() else 0.0
