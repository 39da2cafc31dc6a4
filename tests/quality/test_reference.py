"""The reference and the table of settings name all that the client library has."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from halfmq import client
from halfmq.client import blocking, codecs
from tests.support.documents import ROOT


def test_every_setting_stands_in_the_table_with_its_default() -> None:
    """One that is added, removed or changed is documented."""
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))

    # In a process of its own: this one has time limits for tests.
    program = (
        "import dataclasses; from halfmq.client import ClientConfig; settings = ClientConfig()\n"
        "print({one.name: repr(getattr(settings, one.name))"
        " for one in dataclasses.fields(settings)})"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert rows == ast.literal_eval(done.stdout.decode())


@pytest.mark.slow
def test_every_public_name_has_its_anchor_in_the_reference(tmp_path: Path) -> None:
    """A link to it leads there, from other pages and from editors."""
    pytest.importorskip("mkdocstrings")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "-d", tmp_path], cwd=ROOT, check=True
    )
    page = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    anchors = set(re.findall(r'id="([^"]+)"', page))

    public = {f"halfmq.client.{name}" for name in client.__all__}
    public |= {f"halfmq.client.blocking.{name}" for name in blocking.__all__}
    public |= {f"halfmq.client.codecs.{name}" for name in ("Codec", "json", "msgpack", "pydantic")}
    public |= {"halfmq.client.Consumer.run", "halfmq.client.blocking.MessageView.ack"}
    assert codecs.raw
    assert public - anchors == set()
