"""The import direction of docs/architecture.md, read from the source of every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LEAVES = ("zoo.errors", "zoo.files", "zoo.signature")
"""Standard library only; anything may import them."""

COMPOSITION_ROOT = ("zoo.cli", "zoo.verbs", "zoo.demo")
"""The command line and its Python twin join every stage: they may import anything, and nothing imports them."""

# The most specific prefix of a module's name decides; "zoo" as a rule means everything in zoo but the roots.
ALLOWED: dict[str, tuple[str, ...]] = {
    "zoo.errors": (),
    "zoo.files": ("zoo.errors",),
    "zoo.signature": (),
    "zoo.bundle": (*LEAVES,),
    "zoo.kernels": ("zoo.kernels", *LEAVES),
    "zoo.plugins": ("zoo.plugins", "zoo.kernels", *LEAVES),
    "zoo": ("zoo",),
    "export": ("export", "zoo"),
    "engines": ("engines", "zoo.plugins", "zoo.kernels", "zoo.bundle", *LEAVES),
    "validate": ("validate", "engines", "export", "zoo"),
    "benchmarks": ("benchmarks", "validate", "engines", "export", "zoo"),
}
OURS = ("zoo", "export", "engines", "validate", "benchmarks")
ONLY_THESE_OUTSIDE = {"zoo.kernels": {"torch", "triton"}}


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports_of(path: Path, module: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} uses a relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def rule_for(module: str) -> tuple[str, ...]:
    return ALLOWED[max((prefix for prefix in ALLOWED if within(module, prefix)), key=len)]


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_run_only_downwards(module, path):
    if any(within(module, root) for root in COMPOSITION_ROOT):
        return
    for name in imports_of(path, module):
        if not any(within(name, package) for package in OURS):
            continue
        assert not any(within(name, root) for root in COMPOSITION_ROOT), f"{module} imports {name}"
        # `from zoo.plugins import OPS` also lists zoo.plugins.OPS; `from zoo import files` lists zoo itself.
        allowed = any(within(name, prefix) for prefix in rule_for(module)) or name in ("zoo", "zoo.__version__")
        assert allowed, f"{module} imports {name}, which its place in the layout does not allow"


@pytest.mark.parametrize("package", sorted(ONLY_THESE_OUTSIDE))
def test_the_kernels_need_nothing_but_torch_and_triton(package):
    import sys

    for module, path in modules():
        if within(module, package):
            outside = (
                {name.split(".")[0] for name in imports_of(path, module)} - set(OURS) - set(sys.stdlib_module_names)
            )
            assert outside <= ONLY_THESE_OUTSIDE[package], f"{module} imports {outside}"


def test_a_module_that_breaks_the_direction_would_be_found(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("from zoo.models import gbla\n")
    (name,) = imports_of(bad, "engines.bad") - {"zoo.models.gbla"}
    assert not any(within(name, prefix) for prefix in rule_for("engines.bad"))
