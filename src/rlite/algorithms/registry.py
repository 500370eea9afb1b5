"""Names for advantage estimators and policy losses, so that a YAML file can pick them, its author's own included.

A name is a registered one (`@register_loss("mine")`) or a dotted path (`my_package.losses.Mine`) of a function, or of a
class whose instances are called. Keyword-only parameters are the options; the YAML's `*_args` must fit them.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)


class Registry:
    """Callables of one kind by name."""

    def __init__(self, config_key: str) -> None:
        self.config_key = config_key
        """Key of `AlgorithmConfig` that names an entry; errors quote it."""
        self._entries: dict[str, Callable] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator. Raises ValueError when the name is taken by something else."""

        def add(entry: F) -> F:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"model.algorithm.{self.config_key}: {name!r} is registered twice")
            return entry

        return add

    def names(self) -> list[str]:
        return sorted(self._entries)

    def get(self, name: str) -> Callable:
        """The entry called `name`, or what the dotted path leads to. Raises ValueError with the nearest name."""
        if name in self._entries:
            return self._entries[name]
        module_name, _, attribute = name.rpartition(".")
        if not module_name:
            close = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"model.algorithm.{self.config_key} = {name!r}: unknown; {hint}known: {', '.join(self.names())}, "
                f"or a dotted path such as my_package.module.name"
            )
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"model.algorithm.{self.config_key} = {name!r}: cannot be imported ({error})") from error

    def options(self, name: str) -> set[str] | None:
        """Names of the options of an entry; None when it takes any (`**kwargs`)."""
        parameters = inspect.signature(self.get(name)).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return None
        return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

    def bind(self, name: str, options: Mapping[str, Any]) -> Callable:
        """The entry with its options filled in. Raises ValueError for an option that it does not have."""
        known = self.options(name)
        for option in options:
            if known is not None and option not in known:
                close = difflib.get_close_matches(option, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ValueError(
                    f"model.algorithm: {self.config_key} {name!r} has no option {option!r}; {hint}"
                    f"it has: {', '.join(sorted(known)) or 'none'}"
                )
        entry = self.get(name)
        return entry(**options) if inspect.isclass(entry) else partial(entry, **options)


LOSSES = Registry("loss")
ADVANTAGES = Registry("advantage")


def register_loss(name: str) -> Callable[[F], F]:
    """Makes `fn(inputs: LossInputs, *, options...) -> PolicyLoss` available as `algorithm.loss: name`."""
    return LOSSES.register(name)


def register_advantage(name: str) -> Callable[[F], F]:
    """Makes `fn(batch: AdvantageInputs, *, options...) -> [B] or [N]` available as `algorithm.advantage: name`."""
    return ADVANTAGES.register(name)
