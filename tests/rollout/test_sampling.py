"""Stateless seeds and request fingerprints."""

import dataclasses
import subprocess
import sys

from rlite.rollout.engine import GenerationRequest
from rlite.rollout.sampling import requests_fingerprint, sampling_seed
from rlite.types import SamplingConfig


def test_seed_is_the_same_in_every_process() -> None:
    code = "from rlite.rollout.sampling import sampling_seed; print(sampling_seed(42, 7, 123, 5))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(other.stdout) == sampling_seed(42, 7, 123, 5)


def test_seed_changes_with_every_coordinate_and_coordinates_do_not_run_together() -> None:
    seeds = {
        sampling_seed(*c) for c in [(1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5), (12, 3, 4, 0)]
    }
    assert len(seeds | {sampling_seed(1, 23, 4, 0)}) == 7


def test_seeds_fit_a_signed_64_bit_integer_and_do_not_collide_in_their_low_32_bits() -> None:
    seeds = [sampling_seed(0, step, uid, sample) for step in range(10) for uid in range(40) for sample in range(8)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)


def test_fingerprint_sees_tokens_seed_sampling_and_order() -> None:
    base = GenerationRequest(prompt_token_ids=(1, 2), seed=3, sampling=SamplingConfig())
    variants = [
        [base],
        [base, base],
        [dataclasses.replace(base, prompt_token_ids=(12,))],
        [dataclasses.replace(base, seed=4)],
        [dataclasses.replace(base, sampling=SamplingConfig(top_p=0.9))],
        [base, dataclasses.replace(base, seed=4)],
        [dataclasses.replace(base, seed=4), base],
    ]
    assert len({requests_fingerprint(variant) for variant in variants}) == len(variants)
    assert requests_fingerprint([base]) == requests_fingerprint([dataclasses.replace(base)])
