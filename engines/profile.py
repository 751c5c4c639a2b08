"""The sizes that one engine serves: how a part's symbols become optimization-profile shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zoo.errors import ConfigError
from zoo.signature import BATCH, BEAMS, LENGTH, Signature, TensorSpec

EXTENTS = ("min", "opt", "max")

LARGEST_SIZE = 2**31 - 1
"""TensorRT profiles have 32-bit dimensions."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one engine. The length is static; batch and beams vary.

    Attributes:
        length: history length; the one that the engine is built for. None if the part has none, as a step of one event.
        batch: smallest, usual and largest batch.
        beams: most candidates a row; the usual number as well.
    """

    length: int | None
    batch: tuple[int, int, int]
    beams: int

    def at(self, extent: int) -> dict[str, int]:
        """Return the size of each symbol at extent 0 (min), 1 (opt) or 2 (max)."""
        sizes = {BATCH: self.batch[extent], BEAMS: 1 if extent == 0 else self.beams}
        return sizes if self.length is None else {**sizes, LENGTH: self.length}

    def of(self, signature: Signature) -> Sizes:
        """Return the sizes of a part's engine: without a length if the part has none."""
        return self if LENGTH in signature.symbols else replace(self, length=None)

    @property
    def suffix(self) -> str:
        """What an engine's name says of the length, ``-L64`` or nothing."""
        return "" if self.length is None else f"-L{self.length}"

    def __str__(self) -> str:
        return "any length" if self.length is None else f"length {self.length}"

    def shapes(self, spec: TensorSpec) -> dict[str, tuple[int, ...]]:
        """Return the min, opt and max shape of a tensor.

        Raises:
            ConfigError: the tensor has a symbol that engines do not know.
        """
        for dim in spec.shape:
            if isinstance(dim, str) and dim not in (BATCH, LENGTH, BEAMS):
                raise ConfigError(
                    f"{spec.name} has a dimension {dim!r}; engines know only {BATCH}, {LENGTH} and {BEAMS}"
                )
        return {name: spec.resolved_shape(self.at(extent)) for extent, name in enumerate(EXTENTS)}


def check_sizes(lengths: Sequence[int], batch: Sequence[int], beams: int) -> list[Sizes]:
    """Return the sizes of each engine, shortest first, lengths without repetition.

    Raises:
        ConfigError: a size that is no positive whole number, no length at all, a batch that is not three rising sizes.
    """
    if isinstance(lengths, int) or not lengths:
        raise ConfigError(f"lengths is {lengths!r}; give one or more history lengths, such as 64,128,256")
    for length in lengths:
        _check_size("length", length)
    if isinstance(batch, int) or len(batch) != 3:
        raise ConfigError(f"batch is {batch!r}; give the smallest, the usual and the largest, such as 1,8,32")
    for size in batch:
        _check_size("batch", size)
    smallest, usual, largest = batch
    if not smallest <= usual <= largest:
        raise ConfigError(f"batch is {smallest},{usual},{largest}; the three sizes must not fall, as in 1,8,32")
    _check_size("beams", beams)
    return [Sizes(length, (smallest, usual, largest), beams) for length in sorted(set(lengths))]


def _check_size(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
        raise ConfigError(f"{name} {value!r} is not a whole number from 1 to {LARGEST_SIZE}")
