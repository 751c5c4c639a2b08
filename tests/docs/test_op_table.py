"""The table of custom ops in docs/export.md is what the specs say."""

from pathlib import Path

import pytest

from zoo.plugins import OPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"


def tensors(rules):
    return ", ".join(
        f"{rule.name} [{', '.join(rule.shape)}]" + ("" if rule.dtype == "T" else f" {rule.dtype}") for rule in rules
    )


@pytest.mark.parametrize("spec", OPS.values(), ids=OPS)
def test_the_export_page_lists_the_op_as_its_spec_states_it(spec):
    attributes = ", ".join(attribute.name for attribute in spec.attributes)
    row = f"| `{spec.name}` | {tensors(spec.inputs)} | {tensors(spec.outputs)} | {attributes} |"
    assert row in PAGE.read_text().splitlines()
