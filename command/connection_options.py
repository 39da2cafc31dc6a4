"""Options of the command ``halfmq`` for credentials and TLS, and reading of passwords.

Credentials come from a file or the environment, never from the command line, which every user of
the machine can read. The file is YAML with ``accessKey`` and ``secretKey``, like RocketMQ's
``tools.yml``.
"""

from __future__ import annotations

import getpass
import os
import ssl
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from halfmq.client.config import ClientConfig, Credentials
from halfmq.client.errors import ConfigurationError

FILE_VARIABLE: Final = "HALFMQ_CREDENTIALS"
KEY_VARIABLE: Final = "HALFMQ_ACCESS_KEY"
SECRET_VARIABLE: Final = "HALFMQ_SECRET_KEY"  # noqa: S105 -- the name of a variable
STANDARD_INPUT: Final = "-"
FILE_SIZE_MAX: Final = 65_536
"""Bytes read from a file with a secret; a longer file is the wrong one."""

_YAML_EXPECTED: Final = "YAML with the two lines accessKey: NAME and secretKey: SECRET"


def client_config(options: Mapping[str, Any], environment: Mapping[str, str]) -> ClientConfig:
    """Return the client configuration for the parsed options and the environment.

    Raises:
        ConfigurationError: A file cannot be used; says which, and what was expected.
    """
    found = _credentials(options["credentials"], environment)
    tls: bool | ssl.SSLContext = options["tls"]
    if options["ca"] is not None:
        try:
            tls = ssl.create_default_context(cafile=options["ca"])
        except OSError as error:  # ssl.SSLError among them
            expected = f"a readable file of certificates in PEM ({error.strerror or error})"
            raise ConfigurationError("--ca", options["ca"], expected) from error
    return ClientConfig(
        namesrv=options["namesrv"],
        access_key=None if found is None else found.access_key,
        secret_key=None if found is None else found.secret_key,
        tls=tls,
    )


def read_password(file: str | None, *, prompt: str) -> str:
    """Read a password from a file, from standard input (``-``), or from a prompt without echo.

    The line end is not part of it.

    Raises:
        ConfigurationError: The file cannot be used, or there is no terminal for a prompt.
    """
    if file == STANDARD_INPUT:
        text = sys.stdin.read(FILE_SIZE_MAX)
    elif file is not None:
        text = read_private_file(Path(file), "--password-file")
    elif sys.stdin.isatty():
        text = getpass.getpass(f"{prompt}: ")
        if getpass.getpass(f"{prompt}, again: ") != text:
            raise ConfigurationError("password", "(not shown)", "the same text twice")
    else:
        raise ConfigurationError(
            "--password-file", None, "a file, or - for standard input, as there is no terminal"
        )
    password = text.rstrip("\r\n")
    if not password or "\n" in password:
        raise ConfigurationError("password", "(not shown)", "one line that is not empty")
    return password


def read_private_file(path: Path, name: str) -> str:
    """Read a text file that must be accessible to its owner only.

    Raises:
        ConfigurationError: It cannot be read, or others can access it; ``name`` is the setting's.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
                expected = (
                    f"a file for its owner alone, but its mode is {stat.S_IMODE(mode):03o}: "
                    f"chmod 600 {path}"
                )
                raise ConfigurationError(name, str(path), expected)
            return file.read(FILE_SIZE_MAX).decode("utf-8-sig")
    except OSError as error:
        expected = f"a readable file ({error.strerror})"
        raise ConfigurationError(name, str(path), expected) from error
    except UnicodeDecodeError:
        raise ConfigurationError(name, str(path), "a file of text in UTF-8") from None


def _credentials(option: str | None, environment: Mapping[str, str]) -> Credentials | None:
    file = option or environment.get(FILE_VARIABLE)
    if file:
        return _from_yaml(Path(file), "--credentials" if option else FILE_VARIABLE)
    key, secret = environment.get(KEY_VARIABLE), environment.get(SECRET_VARIABLE)
    if not key and not secret:
        return None
    if not key or not secret:
        missing = SECRET_VARIABLE if key else KEY_VARIABLE
        raise ConfigurationError(missing, None, f"both {KEY_VARIABLE} and {SECRET_VARIABLE}")
    return Credentials(key, secret)


def _from_yaml(path: Path, name: str) -> Credentials:
    import yaml  # noqa: PLC0415 -- most commands need none

    text = read_private_file(path, name)
    try:
        # Every scalar is text: 12345678 is a secret and not a number.
        content = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 -- it makes only texts
    except (yaml.YAMLError, RecursionError):  # which would show lines of the file
        raise ConfigurationError(name, str(path), _YAML_EXPECTED) from None
    fields = content if isinstance(content, dict) else {}
    key, secret = fields.get("accessKey"), fields.get("secretKey")
    if not isinstance(key, str) or not isinstance(secret, str) or not key or not secret:
        raise ConfigurationError(name, str(path), _YAML_EXPECTED)
    return Credentials(key, secret)
