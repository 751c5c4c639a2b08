"""Is the exported file, and is each engine, still the model? Parity, contracts and the report."""

from validate.report import Check, Report
from validate.run import validate
from validate.tolerance import Deviation, deviation

__all__ = ["Check", "Deviation", "Report", "deviation", "validate"]
