"""What an OpSpec demands of the attributes, dtypes and shapes of a node, and where its output shapes come from.

Sizes may be -1: TensorRT does not know dynamic ones while it builds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.errors import ConfigError, DTypeError, ShapeError
from zoo.plugins.spec import DOMAIN, FLOATS, AttributeSpec, OpSpec

UNKNOWN = -1
"""A size that is not known yet."""


def checked_attributes(spec: OpSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a node in the spec's order, as Python values of the spec's kinds.

    Raises:
        ConfigError: one is missing, or is a string that is not among its choices.
    """
    missing = [attribute.name for attribute in spec.attributes if attribute.name not in values]
    if missing:
        wanted = ", ".join(attribute.name for attribute in spec.attributes)
        raise ConfigError(f"{DOMAIN}.{spec.name}: the node has no {', '.join(missing)}; it needs {wanted}")
    return {attribute.name: _checked(spec, attribute, values[attribute.name]) for attribute in spec.attributes}


def check_dtypes(spec: OpSpec, dtypes: Sequence[str]) -> None:
    """Raise DTypeError, naming the input, unless the inputs have the dtypes that the spec gives them."""
    first_float: tuple[str, str] | None = None
    shared = ", ".join(rule.name for rule in spec.inputs if rule.dtype == "T")
    for rule, dtype in zip(spec.inputs, dtypes, strict=True):
        if rule.dtype != "T":
            if dtype != rule.dtype:
                raise DTypeError(f"{DOMAIN}.{spec.name}: input {rule.name} is {dtype}, but must be {rule.dtype}")
        elif dtype not in FLOATS:
            raise DTypeError(
                f"{DOMAIN}.{spec.name}: input {rule.name} is {dtype}, but must be one of {', '.join(FLOATS)}"
            )
        elif first_float is None:
            first_float = (rule.name, dtype)
        elif dtype != first_float[1]:
            raise DTypeError(
                f"{DOMAIN}.{spec.name}: input {rule.name} is {dtype}, but {first_float[0]} is {first_float[1]}; "
                f"{shared} of a node must have one dtype"
            )


def bind_sizes(spec: OpSpec, attributes: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the size of each letter of the spec, UNKNOWN where neither an input nor an attribute says it.

    Raises:
        ShapeError: an input has another rank or size than the spec, the attributes or an earlier input say; the message
            names the input.
    """
    fixed = spec.fixed_sizes(attributes)
    sizes = dict(fixed)
    giver = dict.fromkeys(fixed, "")
    for rule, shape in zip(spec.inputs, shapes, strict=True):
        if len(shape) != len(rule.shape):
            raise ShapeError(
                f"{DOMAIN}.{spec.name}: input {rule.name} has {len(shape)} dimensions, shape {list(shape)}, but needs "
                f"[{', '.join(rule.shape)}]"
            )
        for axis, (letter, size) in enumerate(zip(rule.shape, shape, strict=True)):
            known = sizes.get(letter, UNKNOWN)
            if UNKNOWN in (size, known):
                sizes[letter] = max(size, known)
                giver.setdefault(letter, rule.name)
            elif size != known:
                raise ShapeError(_size_message(spec, attributes, rule.name, shape, axis, known, giver[letter]))
    return sizes


def output_sources(spec: OpSpec, output: int) -> list[tuple[int, int] | None]:
    """Return, for each dimension of an output, the (input, axis) that it equals; None where attributes fix it."""
    places = spec.size_sources
    return [places.get(letter) for letter in spec.outputs[output].shape]


def _checked(spec: OpSpec, attribute: AttributeSpec, value: Any) -> Any:
    if attribute.kind == "string":
        if value not in attribute.choices:
            choices = ", ".join(attribute.choices)
            raise ConfigError(f"{DOMAIN}.{spec.name}: {attribute.name} is {value!r}, but must be one of {choices}")
        return value
    return {"int": int, "float": float, "bool": bool}[attribute.kind](value)


def _size_message(
    spec: OpSpec, attributes: Mapping[str, Any], name: str, shape: Sequence[int], axis: int, wanted: int, giver: str
) -> str:
    if giver:
        reason = f"to agree with {giver}"
    else:
        values = {key: f"{value:g}" if isinstance(value, float) else value for key, value in attributes.items()}
        reason = "for " + ", ".join(f"{key}={value}" for key, value in values.items())
    letter = next(rule for rule in spec.inputs if rule.name == name).shape[axis]
    columns = "columns" if axis == len(shape) - 1 else f"in dimension {axis}"
    return (
        f"{DOMAIN}.{spec.name}: input {name} has shape {list(shape)}, {shape[axis]} {columns}, "
        f"but {letter} must be {wanted} {reason}"
    )
