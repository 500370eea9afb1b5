"""Which engine call is legal in which state."""

import pytest

from rlite.rollout.engine import EngineStateError, StaleWeightsError
from rlite.rollout.lifecycle import Lifecycle


def _asleep() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.on_weights_updated(1)
    lifecycle.on_sleep()
    return lifecycle


def test_a_new_engine_is_awake_and_stale() -> None:
    lifecycle = Lifecycle()
    assert lifecycle.policy_version == -1
    lifecycle.check_sleep()
    with pytest.raises(StaleWeightsError, match="finish_weight_update"):
        lifecycle.check_generate()
    lifecycle.on_weights_updated(0)
    lifecycle.check_generate()


def test_sleeping_twice_is_an_error() -> None:
    with pytest.raises(EngineStateError, match="already asleep"):
        _asleep().check_sleep()


def test_waking_twice_is_an_error() -> None:
    lifecycle = _asleep()
    lifecycle.check_wake_weights()
    lifecycle.on_wake_weights()
    with pytest.raises(EngineStateError, match="weights are already awake"):
        lifecycle.check_wake_weights()
    lifecycle.check_wake_kv_cache()
    lifecycle.on_wake_kv_cache()
    with pytest.raises(EngineStateError, match="KV cache is already awake"):
        lifecycle.check_wake_kv_cache()


def test_kv_cache_cannot_wake_before_the_weights() -> None:
    with pytest.raises(EngineStateError, match="wake_weights"):
        _asleep().check_wake_kv_cache()


def test_generating_needs_weights_then_kv_cache_then_an_update() -> None:
    lifecycle = _asleep()
    with pytest.raises(EngineStateError, match="engine is asleep"):
        lifecycle.check_generate()
    lifecycle.on_wake_weights()
    with pytest.raises(EngineStateError, match="KV cache is asleep"):
        lifecycle.check_generate()
    lifecycle.on_wake_kv_cache()
    with pytest.raises(StaleWeightsError):
        lifecycle.check_generate()
    lifecycle.on_weights_updated(2)
    lifecycle.check_generate()


def test_handing_out_weights_makes_the_engine_stale() -> None:
    lifecycle = Lifecycle()
    lifecycle.on_weights_updated(1)
    lifecycle.on_weights_handed_out()
    with pytest.raises(StaleWeightsError):
        lifecycle.check_generate()


def test_an_engine_with_only_its_weights_awake_can_go_back_to_sleep() -> None:
    lifecycle = _asleep()
    lifecycle.on_wake_weights()
    lifecycle.check_sleep()


def test_weights_of_a_sleeping_engine_cannot_be_written() -> None:
    with pytest.raises(EngineStateError, match="weights: the weights are asleep"):
        _asleep().check_weights("weights")


def test_a_dead_engine_refuses_everything_and_says_why() -> None:
    lifecycle = Lifecycle()
    lifecycle.on_dead("generate failed with RuntimeError: boom")
    for check in (lifecycle.check_sleep, lifecycle.check_wake_weights, lifecycle.check_generate):
        with pytest.raises(EngineStateError, match="boom"):
            check()
