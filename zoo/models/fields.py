"""What the configurations of all models check of their fields, and how a copy with some of them changed is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from zoo.errors import ConfigError

Config = TypeVar("Config")

_KINDS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "text"),
}


def check_types(config: Any) -> None:
    """Raise ConfigError unless every field holds what its annotation says; true and false are no numbers."""
    for field in fields(config):
        value, (kind, wanted) = getattr(config, field.name), _KINDS[str(field.type)]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{field.name} is {value!r}; it must be {wanted}")


def check_one_or_more(config: Any, names: Iterable[str]) -> None:
    """Raise ConfigError unless each of these fields is finite and 1 or more."""
    for name in names:
        if not 1 <= getattr(config, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be 1 or more")


def overridden(model: str, config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a copy with some fields changed; an unknown field raises ConfigError that names ``model``."""
    known = [field.name for field in fields(config)]  # type: ignore[arg-type]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ConfigError(f"{model} has no field {unknown[0]!r}; its fields are {', '.join(known)}")
    return replace(config, **overrides)  # type: ignore[type-var]
