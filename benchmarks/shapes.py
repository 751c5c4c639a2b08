"""Shapes as options write them: whole numbers between the letter x."""

from __future__ import annotations

from zoo.errors import ConfigError


def numbers_of(benchmark: str, shape: str, form: str, example: str) -> tuple[int, ...]:
    """Return the numbers of a shape such as 8x2048, as many as ``form`` (BxT) has letters.

    Raises:
        ConfigError: another number of them, or one that is not a whole number of 1 or more.
    """
    try:
        numbers = tuple(int(word) for word in shape.split("x"))
    except ValueError:
        numbers = ()
    if len(numbers) != len(form.split("x")) or min(numbers) < 1:
        raise ConfigError(f"{benchmark} cannot read the shape {shape!r}; write it {form}, each 1 or more, as {example}")
    return numbers
