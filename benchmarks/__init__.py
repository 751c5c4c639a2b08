"""Measurements with their machine: ``python -m benchmarks.run NAME`` prints a table and writes raw JSON to results/."""
