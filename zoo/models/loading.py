"""From the weights of a bundle to a model."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from zoo.bundle import WEIGHTS, Bundle
from zoo.errors import BundleError
from zoo.models import presets


def load_model(bundle: Bundle) -> Any:
    """Return the model of a bundle with its weights, in evaluation mode, on the CPU.

    Raises:
        BundleError: no weights, damaged weights, or weights of another configuration.
    """
    path = bundle.file(WEIGHTS)
    model = presets.build(presets.config_from_json(bundle.config))
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{path} cannot be read ({error}); make it again with `zoo train`") from error
    _check_fit(str(path), model, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    model.load_state_dict(weights)
    return model.eval()


def _check_fit(path: str, model: nn.Module, found: dict[str, tuple[int, ...]]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    differences = [f"{name} is missing" for name in wanted if name not in found]
    differences += [f"{name} is unknown to it" for name in found if name not in wanted]
    differences += [
        f"{name} is {list(found[name])} and should be {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if differences:
        more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
        raise BundleError(f"{path} does not fit the bundle's configuration: {differences[0]}{more}; train it again")
