import itertools

import pytest

from rlite.data.sampler import EvalSampler, PromptSampler


def take(sampler, count):
    return list(itertools.islice(iter(sampler), count))


def global_batches(num_replicas, count, *, state=None, **kwargs):
    """Batches of all ranks, interleaved back into the global order."""
    samplers = [PromptSampler(num_replicas=num_replicas, rank=rank, **kwargs) for rank in range(num_replicas)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    shards = [take(sampler, count) for sampler in samplers]
    batches = [[index for group in zip(*step, strict=True) for index in group] for step in zip(*shards, strict=True)]
    return batches, [sampler.state_dict() for sampler in samplers]


def test_without_shuffle_a_batch_straddles_two_passes_in_order():
    sampler = PromptSampler(5, batch_size=2, shuffle=False)
    assert take(sampler, 5) == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


def test_each_pass_sees_every_prompt_once_in_another_order():
    sampler = PromptSampler(7, batch_size=1, seed=3)
    passes = [[index for (index,) in take(sampler, 7)] for _ in range(3)]
    assert [sorted(order) for order in passes] == [list(range(7))] * 3
    assert passes[0] != passes[1] != passes[2]


def test_the_seed_decides_the_order():
    orders = [take(PromptSampler(50, batch_size=10, seed=seed), 5) for seed in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


@pytest.mark.parametrize(("num_prompts", "batch_size"), [(5, 4), (7, 3), (7, 6), (10, 8), (4, 4), (9, 2)])
def test_a_straddling_batch_never_holds_a_prompt_twice(num_prompts, batch_size):
    batches = take(PromptSampler(num_prompts, batch_size=batch_size, seed=1), 12 * num_prompts)
    assert all(len(set(batch)) == batch_size for batch in batches)
    flat = list(itertools.chain(*batches))
    for start in range(0, len(flat) - num_prompts + 1, num_prompts):
        assert sorted(flat[start : start + num_prompts]) == list(range(num_prompts))


def test_ranks_split_the_global_batch_and_hold_the_same_state():
    one, _ = global_batches(1, 9, num_prompts=10, batch_size=4, seed=5)
    two, states = global_batches(2, 9, num_prompts=10, batch_size=4, seed=5)
    assert one == two
    assert states[0] == states[1]


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 7, 8])
@pytest.mark.parametrize("replicas_after", [1, 2, 4])
def test_resume_is_exact_also_under_another_dp_size(stop, replicas_after):
    kwargs = {"num_prompts": 10, "batch_size": 4, "seed": 5}
    whole, _ = global_batches(2, 20, **kwargs)
    before, states = global_batches(2, stop, **kwargs)
    after, _ = global_batches(replicas_after, 20 - stop, state=states[1], **kwargs)
    assert before + after == whole


def test_resume_refuses_other_data():
    state = PromptSampler(10, batch_size=4).state_dict()
    with pytest.raises(ValueError, match="num_prompts = 10, this run has 11"):
        PromptSampler(11, batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match="seed = 0, this run has 1"):
        PromptSampler(10, batch_size=4, seed=1).load_state_dict(state)


def test_length_is_large_enough_for_any_run():
    assert len(PromptSampler(3, batch_size=3)) == 2**31


def test_a_batch_larger_than_the_data_set_is_an_error():
    with pytest.raises(ValueError, match=r"data\.batch_size = 8 is larger than the data set \(3 prompts\)"):
        PromptSampler(3, batch_size=8)


def test_an_uneven_split_names_the_nearest_batch_sizes():
    with pytest.raises(ValueError, match="dp = 4 ranks: set it to 4 or 8"):
        PromptSampler(100, batch_size=6, num_replicas=4)
    with pytest.raises(ValueError, match="dp = 4 ranks: set it to 4"):
        PromptSampler(100, batch_size=3, num_replicas=4)


def test_evaluation_sees_every_prompt_once_with_equal_batch_counts():
    shards = [list(EvalSampler(7, batch_size=3, num_replicas=2, rank=rank)) for rank in (0, 1)]
    assert shards == [[[0, 2], [3, 5], [6]], [[1], [4], []]]
    assert len(EvalSampler(7, batch_size=3)) == 3
