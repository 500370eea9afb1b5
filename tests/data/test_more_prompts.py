"""Further prompts for a rollout step are the next of the one order, on every rank and after a resume."""

from types import SimpleNamespace

import pytest

from rlite.data import DataSource, LoaderOptions, PromptDataModule

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]


def data(tokenizer_dir, *, rank=0, num_replicas=1, **options) -> PromptDataModule:
    source = DataSource(kind="rows", rows=ROWS)
    module = PromptDataModule(source, batch_size=4, loader=LoaderOptions(seed=3, **options))
    module.trainer = SimpleNamespace(
        strategy=SimpleNamespace(distributed_sampler_kwargs={"num_replicas": num_replicas, "rank": rank}),
        lightning_module=SimpleNamespace(tokenizer_dir=tokenizer_dir),
    )
    module.setup("fit")
    return module


def uids(prompts) -> list[int]:
    return [prompt.uid for prompt in prompts]


def test_more_prompts_are_the_next_ones_and_the_loader_goes_on_after_them(tokenizer_dir) -> None:
    plain = iter(data(tokenizer_dir).train_dataloader())
    expected = [uids(next(plain).prompts) for _ in range(4)]
    module = data(tokenizer_dir)
    loader = iter(module.train_dataloader())
    got = [uids(next(loader).prompts), uids(module.more_prompts()), uids(module.more_prompts())]
    got.append(uids(next(loader).prompts))
    assert got == expected


def test_ranks_share_them_like_any_batch(tokenizer_dir) -> None:
    whole = data(tokenizer_dir)
    whole.train_dataloader()
    parts = [data(tokenizer_dir, rank=rank, num_replicas=2) for rank in range(2)]
    for part in parts:
        part.train_dataloader()
    expected = uids(whole.more_prompts())
    assert [uids(part.more_prompts()) for part in parts] == [expected[0::2], expected[1::2]]


def test_a_saved_loader_goes_on_after_them(tokenizer_dir) -> None:
    first = data(tokenizer_dir)
    loader = first.train_dataloader()
    batches = iter(loader)
    next(batches), first.more_prompts()
    state = loader.state_dict()
    expected = [uids(next(batches).prompts), uids(first.more_prompts())]
    second = data(tokenizer_dir)
    resumed = second.train_dataloader()
    resumed.load_state_dict(state)
    assert [uids(next(iter(resumed)).prompts), uids(second.more_prompts())] == expected


def test_loader_workers_are_refused(tokenizer_dir) -> None:
    module = data(tokenizer_dir, num_workers=1)
    module.train_dataloader()
    with pytest.raises(ValueError, match=r"data.loader.num_workers = 1.*needs 0"):
        module.more_prompts()
