"""Stateless sampling seeds, and a fingerprint of a batch of requests."""

import hashlib
from collections.abc import Sequence

from rlite.rollout.engine import GenerationRequest


def sampling_seed(run_seed: int, rollout_step: int, prompt_uid: int, sample_index: int) -> int:
    """Seed of one completion, 0 <= seed < 2**63: a hash of its coordinates and of nothing else.

    So it does not depend on the batch, the order, the number of ranks or on what ran before: a resumed run samples the
    same. The low 32 bits, all that torch's CPU generator uses, are as well mixed as the rest.
    """
    coordinates = f"{run_seed}/{rollout_step}/{prompt_uid}/{sample_index}"
    digest = hashlib.blake2b(coordinates.encode(), digest_size=8, person=b"rlite.sampling").digest()
    return int.from_bytes(digest, "big") >> 1


def requests_fingerprint(requests: Sequence[GenerationRequest]) -> int:
    """63-bit hash of the requests, order and every sampling option included; equal in every process."""
    digest = hashlib.blake2b(digest_size=8, person=b"rlite.requests")
    for request in requests:
        digest.update(repr((request.prompt_token_ids, request.seed, request.sampling)).encode())
    return int.from_bytes(digest.digest(), "big") >> 1
