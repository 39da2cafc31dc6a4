"""Every example of README, docs and `examples/`, and the public API, passes type checkers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import Final

import pytest

from tests.support.documents import ROOT, examples, examples_of

API: Final = ROOT / "tests" / "quality" / "api.py"

SPARK: Final = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
log = spark.table("log")
path, root = "log", "store"
"""
LEDGER: Final = """
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from halfmq.client import Message, TransactionLedger, TransactionProducer
producer, ledger = TransactionProducer("orders-tx"), TransactionLedger()
"""
CHECKER: Final = """
from datetime import UTC, datetime, timedelta
from halfmq.client import Decision, MessageView
LONGEST_LOCAL_TRANSACTION = timedelta(minutes=1)
def order_exists(key: str) -> bool: return bool(key)
"""

GIVEN: Final = (
    ("docs/audit.md", "", SPARK),
    ("docs/ledger.md", "async def create_order", LEDGER),
    ("docs/transactions.md", "def checker", CHECKER),
)
"""What the text around an example has introduced: page, beginning of the example, declarations."""

PAGES: Final = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
APPLICATIONS: Final = sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir())
DJANGO: Final = """plugins = mypy_django_plugin.main
[mypy.plugins.django-stubs]
django_settings_module = shop.settings
"""


SETTINGS: Final = """
SECRET_KEY = "secret"
INSTALLED_APPS = ["django.contrib.contenttypes"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
"""
"""What ``django-admin startproject`` has written before."""


def _projects() -> dict[str, dict[str, str]]:
    """The files that a section of a page tells its reader to write, by section."""
    found = {}
    for page in PAGES:
        for section in re.split(r"\n## ", (ROOT / page).read_text(encoding="utf-8")):
            files = {one.file: one.code for one in examples_of(section) if one.file is not None}
            if files:
                found[f"{page}: {section.partition(chr(10))[0]}"] = files
    return found


PROJECTS: Final = _projects()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy knows of libraries, which takes it longer than the examples."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each example as a module."""
    folder = tmp_path_factory.mktemp("examples")
    for page in PAGES:
        # A file of a project needs the rest of it.
        programs = [
            one.code for one in examples(page) if one.language == "python" and one.file is None
        ]
        for number, code in enumerate(programs, 1):
            module = re.sub(r"\W", "_", page.removesuffix(".md"))
            (folder / f"{module}_{number}.py").write_text(_program(page, code), encoding="utf-8")
    assert len(list(folder.iterdir())) > 20
    return folder


def _program(page: str, code: str) -> str:
    if re.search("^async with", code, re.MULTILINE):  # the body of a coroutine
        code = "async def example() -> None:\n" + indent(code, "    ")
    given = [text for where, start, text in GIVEN if where == page and code.startswith(start)]
    return "".join([*given, code])


def _run(*command: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_accepts_every_example(programs: Path, cache: Path, tmp_path: Path) -> None:
    """A reader who pastes one into a strictly checked program adds nothing to it."""
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\nwarn_unreachable = True\n")

    _run("mypy", f"--config-file={settings}", f"--cache-dir={cache}", ".", folder=programs)


@pytest.mark.parametrize("mode", ["standard", "strict"])
def test_pyright_accepts_every_example(programs: Path, tmp_path: Path, mode: str) -> None:
    """So do editors; the strict mode is for the public API, without libraries of others."""
    included = programs if mode == "standard" else API
    _run_pyright(tmp_path, mode, included, folder=programs)


def _run_pyright(tmp_path: Path, mode: str, *included: Path, folder: Path) -> None:
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        json.dumps(
            {
                "include": [str(path) for path in included],
                "typeCheckingMode": mode,
                "reportUnnecessaryIsInstance": False,  # a reader of events names each kind
                "pythonVersion": f"{sys.version_info.major}.{sys.version_info.minor}",
            }
        )
    )
    arguments = ("--pythonpath", sys.executable, "--project", str(settings))
    _run("basedpyright", *arguments, folder=folder)


@pytest.mark.parametrize("application", APPLICATIONS, ids=lambda path: path.name)
def test_checkers_accept_every_application(application: Path, cache: Path, tmp_path: Path) -> None:
    """As they are: mypy strictly, with the plugin that Django needs; pyright in its usual mode."""
    folder = tmp_path / application.name  # there, no setting of this repository counts
    shutil.copytree(application, folder)
    _check_project(folder, cache)


@pytest.mark.parametrize("project", PROJECTS)
def test_checkers_accept_every_project_of_a_page(project: str, cache: Path, tmp_path: Path) -> None:
    """In the same way."""
    folder = tmp_path / "project"
    for name, code in PROJECTS[project].items():
        path = folder / name.replace(".conf.py", "_conf.py")  # a module's name has no dot
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent != folder:
            (path.parent / "__init__.py").touch()
        path.write_text(SETTINGS + code if path.name == "settings.py" else code, encoding="utf-8")
    _check_project(folder, cache)


def _check_project(folder: Path, cache: Path) -> None:
    settings = folder.parent / "mypy.ini"
    is_django = (folder / "shop/settings.py").exists()
    plugin = DJANGO if is_django else ""
    settings.write_text(f"[mypy]\nstrict = True\nwarn_unreachable = True\n{plugin}")
    own = f"--cache-dir={cache / 'django' if is_django else cache}"

    _run("mypy", f"--config-file={settings}", own, ".", folder=folder)
    _run_pyright(folder, "standard", folder, folder=folder)
