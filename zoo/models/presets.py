"""The zoo's presets by name: which model, which sizes, which twins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from zoo.errors import BundleError, ConfigError
from zoo.models import gbla, sinkrec, sinkrec_config

Config = gbla.GBLAConfig | sinkrec_config.SinkRecConfig
Model = gbla.GBLA | sinkrec.SinkRec

MODELS: dict[str, tuple[type[Any], type[Any]]] = {
    "gbla": (gbla.GBLAConfig, gbla.GBLA),
    "sinkrec": (sinkrec_config.SinkRecConfig, sinkrec.SinkRec),
}
PRESETS: dict[str, tuple[str, Config]] = {
    **{name: ("gbla", config) for name, config in gbla.PRESETS.items()},
    **{name: ("sinkrec", config) for name, config in sinkrec_config.PRESETS.items()},
}
TWINS = {"gbla": gbla.TWINS, "sinkrec": sinkrec_config.TWINS}


def resolve(name: str, *, twin: str | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return the configuration of a preset, of one of its twins, with some fields changed.

    Raises:
        ConfigError: no such preset, twin or field; the message lists what there is.
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; the zoo has {', '.join(PRESETS)} (see `zoo list`)")
    model_name, config = PRESETS[name]
    if twin is not None:
        if twin not in TWINS[model_name]:
            raise ConfigError(f"{name} has no twin {twin!r}; it has {', '.join(TWINS[model_name])}")
        config = config.twin(twin)
    return config.with_overrides(**(overrides or {}))


def model_name(config: Config) -> str:
    """Return which model a configuration is of, ``gbla`` or ``sinkrec``."""
    return next(name for name, (config_type, _) in MODELS.items() if isinstance(config, config_type))


def build(config: Config, *, device: torch.device | str = "cpu") -> Any:
    """Return the model of a configuration, with fresh weights (none at all on the meta device)."""
    with torch.device(device):
        return MODELS[model_name(config)][1](config)


def config_to_json(config: Config) -> dict[str, Any]:
    """Return ``{"model": name, fields...}``."""
    return {"model": model_name(config), **asdict(config)}


def config_from_json(value: Mapping[str, Any]) -> Config:
    """Read what ``config_to_json`` wrote.

    Raises:
        BundleError: an unknown model, or fields that this version does not know.
    """
    fields = dict(value)
    model = fields.pop("model", None)
    if model not in MODELS:
        raise BundleError(f"the bundle holds a model {model!r}; this version knows {', '.join(MODELS)}")
    try:
        found: Config = MODELS[model][0](**fields)
        return found
    except TypeError as error:
        raise BundleError(f"the bundle's {model} configuration does not fit this version ({error})") from error


def parameter_counts(config: Config) -> dict[str, int]:
    """Return the number of parameters by top-level module, and ``total``; nothing is allocated."""
    counts: dict[str, int] = {}
    for name, parameter in build(config, device="meta").named_parameters():
        top = name.split(".")[0]
        counts[top] = counts.get(top, 0) + parameter.numel()
    return {**counts, "total": sum(counts.values())}
