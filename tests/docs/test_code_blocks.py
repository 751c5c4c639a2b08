"""Every code block of the README and docs/ is run: Python whole, `zoo` command lines as far as their parse."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from zoo.cli import app, main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text()), 1):
            if match[1] in languages:
                found.append((f"{page.relative_to(ROOT)}#{number}", match[2]))
    return found


def zoo_commands() -> list[tuple[str, list[str]]]:
    commands = []
    for name, text in blocks("bash", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ").split("#")[0]
            for command in re.split(r"&&|;", line):
                words = shlex.split(command)
                if words and Path(words[0]).name == "zoo":
                    commands.append((f"{name}: {command.strip()}", words[1:]))
    return commands


@pytest.mark.parametrize(("name", "code"), blocks("python"), ids=[name for name, _ in blocks("python")])
def test_python_blocks_run(name, code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "words"), zoo_commands(), ids=[name for name, _ in zoo_commands()])
def test_command_lines_name_verbs_and_options_that_exist(name, words):
    context = typer.main.get_command(app).make_context("zoo", [*words], resilient_parsing=False)
    verb, arguments = words[0], words[1:]
    if verb.startswith("-"):
        return
    command = context.command.get_command(context, verb)
    assert command is not None, f"there is no verb {verb}"
    command.make_context(verb, arguments, parent=context)


LOOKS = [(name, words) for name, words in zoo_commands() if words[:2] == ["inspect", "kernels"] or words == ["list"]]


@pytest.mark.parametrize(("name", "words"), LOOKS, ids=[name for name, _ in LOOKS])
def test_command_lines_that_only_look_run(name, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert not stopped.value.code and capsys.readouterr().out


def test_there_are_blocks_to_run():
    assert blocks("python") and zoo_commands()


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
