import pytest

from rlite.types import Completion, Prompt, Rollout


def make_rollout(text, *, uid=0, sample_index=0, finish_reason="stop", **columns):
    prompt = Prompt(uid=uid, token_ids=(5, 6), text=f"prompt {uid}", columns=columns)
    completion = Completion(
        token_ids=tuple(range(len(text))), logprobs=(0.0,) * len(text), finish_reason=finish_reason, text=text
    )
    return Rollout(prompt=prompt, completion=completion, sample_index=sample_index)


@pytest.fixture
def rollouts():
    """Two prompts with two completions each, one of which is right."""
    return [
        make_rollout("7", uid=3, sample_index=0, answer="7", level=1),
        make_rollout("8", uid=3, sample_index=1, answer="7", level=1, finish_reason="length"),
        make_rollout("", uid=4, sample_index=0, answer="2", level=2),
        make_rollout("2", uid=4, sample_index=1, answer="2", level=2),
    ]
