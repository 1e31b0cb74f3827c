"""The README's code runs and prints what it says; its links and paths lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SCRIPTS = [
    (code, BLOCKS[place + 1][1])
    for place, (language, code) in enumerate(BLOCKS)
    if language == "python"
]
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def run(*command: str, folder: Path) -> str:
    """Standard output of a Python command in an empty folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def words(text: str) -> list[str]:
    """The lines that are not empty, with one sign for every number and one space for many."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines() if line.strip()]


def contains_in_order(lines: list[str], wanted: list[str]) -> bool:
    remaining = iter(lines)
    return all(line in remaining for line in wanted)


@pytest.mark.parametrize("script", range(len(SCRIPTS)))
def test_script_prints_what_the_readme_says(script: int, tmp_path: Path) -> None:
    code, expected = SCRIPTS[script]
    (tmp_path / "train.py").write_text(code)
    printed = run("train.py", folder=tmp_path)
    assert contains_in_order(words(printed), words(expected)), printed
    found = [
        line
        for line in printed.splitlines()
        if words(line)[:1] in map(words, expected.splitlines())
    ]
    numbers = [float(n) for n in NUMBER.findall("\n".join(found))]
    assert numbers == pytest.approx([float(n) for n in NUMBER.findall(expected)], abs=0.1)


def test_demo_prints_the_table_of_the_readme(tmp_path: Path) -> None:
    (console,) = [text for language, text in BLOCKS if language == "console"]
    command, expected = console.split("\n", 1)
    assert command == "$ make demo"
    printed = run(str(ROOT / "examples/demo.py"), "--epochs", "3", folder=tmp_path)
    assert words(printed) == words(expected)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)|`make (\w+)| make (\w+)", README, re.MULTILINE)):
        (name,) = filter(None, target)
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


@pytest.mark.parametrize(
    "page", ["README.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    local = [(ROOT / page).parent / link for link in links if "://" not in link]
    named = [
        ROOT / path
        for path in re.findall(r"`((?:examples|lightning_sylvie|tests|docs)/[\w./-]+)`", text)
    ]
    missing = [str(path) for path in local + named if not path.exists()]
    assert not missing, missing
