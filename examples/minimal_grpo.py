"""GRPO without the command line: a Lightning module, a Trainer, three callbacks.

python examples/minimal_grpo.py        # two CPU processes, a random tiny Llama, a few rollouts

The order of events in a rollout step:

    VLLMRollout      enters GENERATE: gradients freed, optimizer state to the host, engine woken,
    EP2TPConversion      weights converted into it, policy off the device; then a group of completions for each prompt
    GRPOModule       rewards -> log-probabilities -> advantages -> optimizer steps (phases LOGPROB and TRAIN)
    MemoryOffload    says what may leave the device in between
"""

from pathlib import Path

from lightning.pytorch import seed_everything

from rlite import ColocatedRLStrategy, GRPOModule, PromptDataModule, RLiteTrainer
from rlite.callbacks import EP2TPConversion, MemoryOffload, VLLMRollout
from rlite.config import BatchConfig
from rlite.data import DataSource
from rlite.layout.parallel import ParallelLayout
from rlite.megatron.options import OptimizerConfig
from rlite.rollout.config import VLLMConfig
from rlite.types import SamplingConfig

POLICY = Path(__file__).parent.parent / "configs" / "models" / "tiny_llama"


class ShortAnswers(GRPOModule):
    """Rewards digits, and few of them: a random policy finds that out by itself."""

    def reward(self, completions: list[str], answer: list[str]) -> list[float]:
        return [score(text.strip(), wanted) for text, wanted in zip(completions, answer, strict=True)]


def score(text: str, wanted: str) -> float:
    if not text.isdigit():
        return 0.0
    return 1.0 if text == wanted else 0.5 / len(text)


def main() -> None:
    seed_everything(0, verbose=False)
    module = ShortAnswers(
        policy=str(POLICY),
        algorithm="dapo",
        optimizer=OptimizerConfig(lr=2e-3),
        batch=BatchConfig(group_size=8),
    )
    data = PromptDataModule(train=DataSource(kind="arithmetic"), batch_size=16)
    engine = VLLMConfig(tp=2, dtype="float32", max_model_len=32, kv_cache_memory_bytes=2**25)
    trainer = RLiteTrainer(
        accelerator="cpu",
        devices=2,
        strategy=ColocatedRLStrategy(layout=ParallelLayout(tp=2, etp=2)),
        limit_train_batches=10,
        callbacks=[
            VLLMRollout(engine=engine, sampling=SamplingConfig(max_tokens=4)),
            EP2TPConversion(),
            MemoryOffload(),
        ],
    )
    trainer.fit(module, datamodule=data)


if __name__ == "__main__":
    main()
