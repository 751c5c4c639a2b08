"""``python -m benchmarks.docs``: put the tables of benchmarks/results/ between their marks in the pages.

A page holds ``<!-- table: NAME -->`` and, lines later, ``<!-- end of table -->``; what is between becomes the table of
results/NAME.json with its machine and command. ``NAME:short`` asks for the few columns that a reader in a hurry wants,
where there is such a table. A mark whose result does not exist is left as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import gated_delta, gbla_layer
from benchmarks.run import REGISTRY, RESULTS
from zoo import files
from zoo.errors import DataError, ZooError

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "kernels.md", ROOT / "docs" / "sinkrec.md")
SHORT = {"gated_delta": gated_delta.short_table, "gbla_layer": gbla_layer.short_table}
MARK = re.compile(r"^(<!-- table: (\S+) -->\n)(.*?)^(<!-- end of table -->)$", re.MULTILINE | re.DOTALL)


def fill(text: str, results: Path = RESULTS) -> str:
    """Return a page with every table whose result exists.

    Raises:
        DataError: a result is not what ``benchmarks.run`` writes.
    """

    def filled(mark: re.Match[str]) -> str:
        name, _, kind = mark[2].partition(":")
        path = results / f"{name}.json"
        return f"{mark[1]}{section(path, short=kind == 'short')}{mark[4]}" if path.exists() else mark[0]

    return MARK.sub(filled, text)


def section(path: Path, *, short: bool = False) -> str:
    """Return the table of a result as Markdown, and under it what it was measured on.

    Raises:
        DataError: the file is not what ``benchmarks.run`` writes.
    """
    try:
        result = json.loads(path.read_text())
        name = result["benchmark"]
        whole = REGISTRY[name][1]
        table = SHORT.get(name, whole) if short else whole
        text, machine = table(result["rows"]), result["machine"]
        return f"\n{text}\n{_machine(machine)}\n\n"
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        kind = type(error).__name__
        raise DataError(f"{path} is no result of benchmarks.run ({kind}: {error}); measure it again") from error


def _machine(machine: dict[str, Any]) -> str:
    gpu, _, driver = (machine["gpu"] or machine["cpu"]).splitlines()[0].partition(", ")
    tools = machine["tools"]
    versions = ", ".join(f"{name} {tools[name]}" for name in ("torch", "triton", "cuda", "cudnn") if tools.get(name))
    command = " ".join(["python -m benchmarks.run", *machine["command"][1:]])
    where = f"{gpu}, driver {driver}" if driver else gpu
    return f"{where}; {versions}; commit {machine['commit']}; {machine['time'][:10]}; `{command}`."


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the pages; with --check only say whether they are up to date."""
    parser = argparse.ArgumentParser(prog="benchmarks.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, help="default: the README and the docs")
    chosen = parser.parse_args(arguments)
    stale = []
    try:
        for page in chosen.pages:
            before = page.read_text()
            after = fill(before)
            if after != before:
                stale.append(page)
                if not chosen.check:
                    files.write_bytes(page, after.encode())
    except (ZooError, OSError, UnicodeDecodeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for page in stale:
        print(f"{page} {'is out of date' if chosen.check else 'written'}")
    return int(chosen.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
