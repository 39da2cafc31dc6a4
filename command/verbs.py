"""The verbs of the command ``halfmq``: common options, the connection, results and errors."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

import typer

from halfmq.client.admin import Admin
from halfmq.client.errors import ClientError, ConfigurationError, TlsError

from .connection_options import client_config
from .output import print_error, print_json, print_line, print_pairs, print_table

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2

_F = TypeVar("_F", bound=Callable[..., Awaitable[int | None]])


class CommandError(Exception):
    """A verb ends without success; the text says why, and how to go on."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class Cli:
    """The connection of a verb, opened when it is first used, and its way to show results."""

    def __init__(self, options: Mapping[str, Any], stack: AsyncExitStack) -> None:
        self.json: bool = options["json"]
        self._options, self._stack = options, stack
        self._admin: Admin | None = None

    async def admin(self) -> Admin:
        """Return the connected client."""
        if self._admin is None:
            config = client_config(self._options, os.environ)
            self._admin = await self._stack.enter_async_context(Admin(config=config))
        return self._admin

    def show(self, data: object, text: Callable[[], None]) -> None:
        """Show data as JSON, or call ``text``, which prints them."""
        if self.json:
            print_json(data)
        else:
            text()

    def rows(
        self, data: object, titles: Sequence[str], rows: Sequence[Sequence[object]], empty: str
    ) -> None:
        """Show a list as JSON or as a table; ``empty`` is printed if it has no rows."""
        self.show(data, lambda: print_table(titles, rows) if rows else print_line(empty))

    def pairs(self, data: object, pairs: Mapping[str, object]) -> None:
        """Show one thing as JSON or as names and values."""
        self.show(data, lambda: print_pairs(pairs))

    def done(self, text: str, **fields: object) -> None:
        """Show the result of a change."""
        if self.json:
            print_json(fields, indent=None)
        else:
            print_line(text)


NameServer = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="name server or halfmq broker (default: NAMESRV_ADDR, else 127.0.0.1:9876)",
    ),
]
Tls = Annotated[bool, typer.Option("--tls", help="encrypt, and trust what the system does")]
Ca = Annotated[
    str | None, typer.Option(metavar="FILE", help="encrypt, and trust these certificates (PEM)")
]


def _common(
    *,
    namesrv: NameServer = None,
    credentials: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="YAML with accessKey and secretKey (default: the file that HALFMQ_CREDENTIALS "
            "names, else HALFMQ_ACCESS_KEY and HALFMQ_SECRET_KEY)",
        ),
    ] = None,
    tls: Tls = False,
    ca: Ca = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Have the options of every verb that connects."""


_OPTIONS: Final = inspect.signature(_common, eval_str=True).parameters


app: Final = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Inspect and operate halfmq brokers, their messages and files. Exit codes: 0 done, "
    "1 refused, not found, not reached or damage found, 2 usage or an unreadable directory.",
)
"""The command, with the nouns and verbs of the modules that are imported."""


def noun(name: str, text: str) -> typer.Typer:
    """Add a noun to the command and return it."""
    made = typer.Typer(no_args_is_help=True, help=f"{text[0].upper()}{text[1:]}.")
    app.add_typer(made, name=name, help=text)
    return made


def verb(name: str, of: typer.Typer = app) -> Callable[[_F], _F]:
    """Register ``async def f(cli, …)`` as a verb with the common options; return it unchanged.

    Its docstring is the help, its annotations are the options. It returns an exit code, or None for
    success.
    """

    def register(function: _F) -> _F:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        both = [*own, *_OPTIONS.values()]

        def command(**values: Any) -> None:
            options = {key: values.pop(key) for key in _OPTIONS}
            run(lambda: _connected(function, options, values))

        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in both}
        of.command(name)(command)
        return function

    return register


async def _connected(
    function: Callable[..., Awaitable[int | None]],
    options: Mapping[str, Any],
    values: Mapping[str, Any],
) -> int | None:
    async with AsyncExitStack() as stack:
        return await function(Cli(options, stack), **values)


def run(work: Callable[[], Awaitable[int | None]]) -> None:
    """Run a verb; end the command with its exit code, or with the one line of an error."""
    logging.basicConfig(level=logging.ERROR, format="halfmq: %(message)s")

    async def main() -> int | None:
        return await work()

    try:
        with reader_may_leave():
            code = asyncio.run(main()) or DONE
    except CommandError as error:
        print_error(str(error))
        code = error.code
    except ConfigurationError as error:
        print_error(str(error))
        code = USAGE
    except TlsError as error:
        print_error(f"{error}; of this command: --tls, or --ca FILE")
        code = FAILED
    except ClientError as error:
        print_error(str(error))
        code = FAILED
    if code != DONE:
        raise typer.Exit(code)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the command with success if the reader of its output, such as ``head``, has left."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Without this, Python reports the broken pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(DONE) from None


def a_time(text: str) -> datetime:
    """Parse a time such as ``2026-01-31T08:00``; without a zone it is local."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is no time such as 2026-01-31T08:00Z") from None


def texts(text: str) -> list[str]:
    """Split ``a,b`` into its parts."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise typer.BadParameter(f"{text!r} is empty")
    return parts


Time = Annotated[datetime | None, typer.Option(parser=a_time, metavar="TIME")]
