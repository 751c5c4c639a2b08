"""The zoo's presets by name: which model, which sizes, which twins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from zoo.errors import BundleError, ConfigError
from zoo.models import gbla

MODELS = {"gbla": (gbla.GBLAConfig, gbla.GBLA)}
PRESETS = {name: ("gbla", config) for name, config in gbla.PRESETS.items()}
TWINS = {"gbla": gbla.TWINS}


def resolve(name: str, *, twin: str | None = None, overrides: Mapping[str, Any] | None = None) -> gbla.GBLAConfig:
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
        config = config.with_overrides(**TWINS[model_name][twin])
    return config.with_overrides(**(overrides or {}))


def build(config: gbla.GBLAConfig, *, device: torch.device | str = "cpu") -> gbla.GBLA:
    """Return the model of a configuration, with fresh weights (none at all on the meta device)."""
    with torch.device(device):
        return gbla.GBLA(config)


def config_to_json(config: gbla.GBLAConfig) -> dict[str, Any]:
    """Return ``{"model": name, fields...}``."""
    model = next(name for name, (config_type, _) in MODELS.items() if isinstance(config, config_type))
    return {"model": model, **asdict(config)}


def config_from_json(value: Mapping[str, Any]) -> gbla.GBLAConfig:
    """Read what ``config_to_json`` wrote.

    Raises:
        BundleError: an unknown model, or fields that this version does not know.
    """
    fields = dict(value)
    model = fields.pop("model", None)
    if model not in MODELS:
        raise BundleError(f"the bundle holds a model {model!r}; this version knows {', '.join(MODELS)}")
    try:
        return MODELS[model][0](**fields)
    except TypeError as error:
        raise BundleError(f"the bundle's {model} configuration does not fit this version ({error})") from error


def parameter_counts(config: gbla.GBLAConfig) -> dict[str, int]:
    """Return the number of parameters by top-level module, and ``total``; nothing is allocated."""
    counts: dict[str, int] = {}
    for name, parameter in build(config, device="meta").named_parameters():
        top = name.split(".")[0]
        counts[top] = counts.get(top, 0) + parameter.numel()
    return {**counts, "total": sum(counts.values())}
