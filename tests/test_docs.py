"""The documentation site builds without a warning, and everything public is in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_sylvie

ROOT = Path(__file__).resolve().parents[1]


def test_site_builds_and_documents_what_is_public(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api/index.html").read_text()
    for name in lightning_sylvie.__all__:
        assert f'id="lightning_sylvie.{name}"' in api, name
    for page in ("sharp_bits", "epoch"):  # taken from the README
        assert "--8<--" not in (tmp_path / page / "index.html").read_text()
