"""``halfmq doctor``: checks a set-up from the client's side, and names remedies."""

from __future__ import annotations

from .output import print_line, printable
from .verbs import DONE, FAILED, Cli, verb


@verb("doctor")
async def doctor(cli: Cli) -> int:
    """Check the connection, brokers, clocks, disks, groups and transactions."""
    admin = await cli.admin()
    found = [one async for one in admin.diagnose()]

    def show() -> None:
        for one in found:
            print_line(printable(f"{one.level:8} {one.subject}: {one.text}"))
            if one.remedy:
                print_line(printable(f"{'':8} → {one.remedy}"))

    cli.show(found, show)
    return FAILED if any(one.level == "problem" for one in found) else DONE
