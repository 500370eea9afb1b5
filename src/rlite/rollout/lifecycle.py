"""The states of an engine and which call is legal when. No tensors: every engine owns one `Lifecycle`."""

from rlite.rollout.engine import EngineStateError, StaleWeightsError


class Lifecycle:
    """Starts awake and stale. `check_*` raise, `on_*` record; an engine checks, acts, then records, so that a call that
    failed half way leaves the state that is true."""

    def __init__(self) -> None:
        self.weights_awake = True
        self.kv_cache_awake = True
        self.policy_version = -1
        self._fresh = False
        self._dead: str | None = None

    def check_sleep(self) -> None:
        self._check_alive("sleep")
        if not self.weights_awake:
            raise EngineStateError("sleep: the engine is already asleep; wake_weights() comes first")

    def check_wake_weights(self) -> None:
        self._check_alive("wake_weights")
        if self.weights_awake:
            raise EngineStateError("wake_weights: the weights are already awake; sleep() comes first")

    def check_wake_kv_cache(self) -> None:
        self._check_alive("wake_kv_cache")
        if self.kv_cache_awake:
            raise EngineStateError("wake_kv_cache: the KV cache is already awake; sleep() comes first")
        if not self.weights_awake:
            raise EngineStateError("wake_kv_cache: the weights are asleep; wake_weights() comes first")

    def check_weights(self, call: str) -> None:
        self._check_alive(call)
        if not self.weights_awake:
            raise EngineStateError(f"{call}: the weights are asleep; wake_weights() comes first")

    def check_generate(self) -> None:
        self._check_alive("generate")
        if not self.weights_awake:
            raise EngineStateError("generate: the engine is asleep; wake_weights() and wake_kv_cache() come first")
        if not self.kv_cache_awake:
            raise EngineStateError("generate: the KV cache is asleep; wake_kv_cache() comes first")
        if not self._fresh:
            raise StaleWeightsError(
                "generate: the weights are stale since they were asleep or handed out for writing; "
                "write them and call finish_weight_update() first"
            )

    def on_sleep(self) -> None:
        self.weights_awake = self.kv_cache_awake = self._fresh = False

    def on_wake_weights(self) -> None:
        self.weights_awake = True

    def on_wake_kv_cache(self) -> None:
        self.kv_cache_awake = True

    def on_weights_handed_out(self) -> None:
        self._fresh = False

    def on_weights_updated(self, policy_version: int) -> None:
        self._fresh = True
        self.policy_version = policy_version

    def on_dead(self, reason: str) -> None:
        self._dead = reason

    @property
    def dead(self) -> bool:
        return self._dead is not None

    def _check_alive(self, call: str) -> None:
        if self._dead is not None:
            raise EngineStateError(f"{call}: the engine is gone: {self._dead}. Build a new one.")
