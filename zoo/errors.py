"""Every error that a user can cause, under one root.

A message is one sentence that names the thing, the value seen, the value wanted and the way out. The command line
prints it without a traceback and exits with status 2. This module imports nothing, so every package may use it.
"""


class ZooError(Exception):
    """The root of all errors that a user can cause and mend."""


class ConfigError(ZooError, ValueError):
    """A preset, field or command-line value that does not exist or does not fit the others."""


class ShapeError(ZooError, ValueError):
    """A tensor whose shape does not fit the op or part that it was given to."""


class DTypeError(ZooError, TypeError):
    """A tensor whose dtype the op or part does not take."""


class LengthError(ZooError, ValueError):
    """A history that is longer than what was built, or a length outside the tensor."""


class DataError(ZooError, ValueError):
    """Interaction data that cannot be read or used as it is."""


class DownloadError(ZooError, RuntimeError):
    """A public data set that could not be had, or whose checksum is not the known one."""


class BundleError(ZooError, ValueError):
    """A bundle that is missing, incomplete, damaged or from another schema version."""


class BusyError(ZooError, RuntimeError):
    """A folder that another process is writing to."""


class CheckpointError(ZooError, ValueError):
    """A training checkpoint that is damaged or belongs to another run."""


class TrainingError(ZooError, RuntimeError):
    """A training run that cannot go on; what it had done is kept."""


class ExportError(ZooError, RuntimeError):
    """A module that cannot be exported; the message names the submodule and why."""


class EngineBuildError(ZooError, RuntimeError):
    """An engine that could not be built, or that was built without its plugins."""


class MissingDependencyError(ZooError, ImportError):
    """An optional package that this verb needs; the message says how to install it."""


class ParityError(ZooError, AssertionError):
    """Two executions of one part that differ by more than the tolerance rule allows."""
