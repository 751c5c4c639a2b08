"""Checks of settings that several modules of the data stage take."""

from __future__ import annotations

from zoo.errors import ConfigError

_SEEDS = 2**32
"""scikit-learn takes seeds below this."""


def check_whole(**settings: object) -> None:
    """Raise ``ConfigError`` unless every setting is an int; true and false are none."""
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number (int)")


def check_seed(seed: int, levels: int = 1) -> None:
    """Raise ``ConfigError`` unless ``seed`` and the ones after it, one for each of ``levels``, can be seeds."""
    check_whole(seed=seed)
    if not 0 <= seed <= _SEEDS - levels:
        raise ConfigError(f"seed is {seed}; it must be from 0 to {_SEEDS - levels}")
