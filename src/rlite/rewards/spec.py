"""What a reward is, how it is named in a config, and what its signature asks for."""

import asyncio
import difflib
import importlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol


class RewardFn(Protocol):
    """A reward: called once for all completions of a rollout step, it names the arguments it wants.

    Each argument is a list with one entry per completion. Offered are `prompts`, `completions` (texts),
    `completion_ids` (token ids), `finish_reasons` (`stop`, `length` or `abort`) and every column of the data set by its
    name; `**kwargs` receives them all. Returns one number per completion, or None in place of a number to abstain. May
    be `async`.
    """

    def __call__(self, **arguments: list[Any]) -> list[float | None]: ...


OFFERED = ("prompts", "completions", "completion_ids", "finish_reasons")
"""Arguments that every reward can name, besides the columns of the data set."""


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """A reward in a config."""

    fn: str | Callable[..., Any]
    """Name in `rlite.rewards` (such as `exact_match`), dotted path of a function or class, or the callable itself."""
    weight: float = 1.0
    """Factor in the total. 0 makes it a metric: computed and logged, never part of the total."""
    name: str | None = None
    """Name in logs; the function's own when not given."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function that do not come from the data, or of the constructor of a class."""


@dataclass(frozen=True)
class ResolvedReward:
    """A reward ready to run."""

    name: str
    weight: float
    fn: Callable[..., Any]
    options: Mapping[str, Any]

    def call(self, arguments: Mapping[str, list[Any]]) -> Any:
        """Calls it with what it names out of `arguments`; waits for the result of an async function."""
        result = self.fn(**select_arguments(self.fn, arguments, taken=self.options), **self.options)
        return _wait_for(result) if inspect.isawaitable(result) else result

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises ValueError when it names an argument that neither rlite nor the data set has."""
        available = [*OFFERED, *columns]
        for name, parameter in named_parameters(self.fn).items():
            if name in available or name in self.options or parameter.default is not parameter.empty:
                continue
            near = difflib.get_close_matches(name, available, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"reward {self.name!r}: column {name!r} not in the data set (have: {', '.join(available)}); "
                f"did you mean {near!r}? Constants belong in the reward's options."
            )


RewardLike = str | Callable[..., Any] | RewardSpec | Mapping[str, Any]
"""A name, a callable, a spec, or a dict with the keys of a spec."""


def resolve_reward(reward: RewardLike) -> ResolvedReward:
    """A reward ready to run.

    Raises:
        ValueError: nothing of that name, not a callable, unknown option; names the nearest existing one.
    """
    if isinstance(reward, Mapping):
        reward = RewardSpec(**reward)
    spec = reward if isinstance(reward, RewardSpec) else RewardSpec(fn=reward)
    fn = _import(spec.fn) if isinstance(spec.fn, str) else spec.fn
    if not callable(fn):
        raise ValueError(f"rewards: {spec.fn!r} is a {type(fn).__name__}, expected a callable")
    name = spec.name or getattr(fn, "__name__", type(fn).__name__)
    options: Mapping[str, Any] = spec.options
    if inspect.isclass(fn):
        _check_options(name, fn, options)
        fn, options = fn(**options), {}
    _check_options(name, fn, options)
    for parameter in named_parameters(fn).values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"reward {name!r}: parameter {parameter.name!r} is positional-only; arguments go by name")
    return ResolvedReward(name=name, weight=spec.weight, fn=fn, options=options)


def named_parameters(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of `fn` without `*args` and `**kwargs`."""
    parameters = inspect.signature(fn).parameters
    return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def takes_everything(fn: Callable[..., Any]) -> bool:
    """Whether `fn` has `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(fn).parameters.values())


def select_arguments(
    fn: Callable[..., Any], arguments: Mapping[str, Any], *, taken: Iterable[str] = ()
) -> dict[str, Any]:
    """The entries of `arguments` that `fn` names (all of them when it has `**kwargs`), without those in `taken`."""
    named = named_parameters(fn)
    everything = takes_everything(fn)
    return {k: v for k, v in arguments.items() if (everything or k in named) and k not in taken}


def _wait_for(awaitable: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    # A notebook already runs an event loop in this thread, and a loop cannot be entered twice.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def _check_options(name: str, fn: Callable[..., Any], options: Mapping[str, Any]) -> None:
    known = named_parameters(fn)
    for option in options:
        if option not in known and not takes_everything(fn):
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"reward {name!r}: no option {option!r}{hint}")


def _import(path: str) -> Any:
    module_name, _, attribute = path.rpartition(".")
    module_name = module_name or "rlite.rewards"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"rewards: {path!r}: cannot import module {module_name!r} ({error})") from error
    if not hasattr(module, attribute):
        candidates = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        near = difflib.get_close_matches(attribute, candidates, n=1, cutoff=0.0)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"rewards: module {module_name!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)
