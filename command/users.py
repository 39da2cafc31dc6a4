"""The nouns ``user`` and ``acl`` of the command ``halfmq``: manage users and their permissions.

They correspond to mqadmin's ``createUser``, ``createAcl`` and so on, with the same requests.
Passwords are typed, or read from a file or standard input; the broker shows them to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal

import typer

from halfmq.client.access import Acl, AclEntry, User

from .connection_options import read_password
from .output import print_error, print_table
from .verbs import DONE, FAILED, USAGE, Cli, CommandError, noun, texts, verb

USER: Final = noun("user", "user accounts")
ACL: Final = noun("acl", "permissions of users")

Name = Annotated[str, typer.Argument(metavar="NAME", help="of the user", show_default=False)]
PasswordFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="read the password from a file instead of a prompt; - is standard input",
    ),
]
Subject = Annotated[
    str, typer.Argument(metavar="USER", help="NAME, or User:NAME", show_default=False)
]
Resources = Annotated[
    list[str],
    typer.Option(
        "--resource",
        parser=texts,
        metavar="R,…",
        help="Topic:NAME, Group:NAME, Cluster:NAME; NAME* for a prefix, * for all",
    ),
]
Actions = Annotated[
    list[str],
    typer.Option(
        parser=texts,
        metavar="A,…",
        help="Pub, Sub, Create, Update, Delete, Get, List or All",
    ),
]
Allows = Annotated[Literal["allow", "deny"], typer.Option("--decision")]
Sources = Annotated[
    list[str] | None,
    typer.Option(parser=texts, metavar="IP,…", help="addresses for which it applies"),
]
PolicyType = Annotated[
    Literal["Custom", "Default"],
    typer.Option("--policy-type", help="Default entries apply if no Custom entry matches"),
]


@verb("list", USER)
async def list_users(
    cli: Cli,
    filter: Annotated[str, typer.Option(metavar="TEXT", help="only names that contain it")] = "",  # noqa: A002
) -> None:
    """List users by name."""
    users = await (await cli.admin()).users(filter)
    rows = [list(_cells(user).values()) for user in users]
    empty = "no user has such a name" if filter else "there are no users"
    cli.rows([_fields(user) for user in users], ["NAME", "TYPE", "STATUS"], rows, empty)


@verb("show", USER)
async def show_user(cli: Cli, name: Name) -> None:
    """Show a user."""
    user = await _user(cli, name)
    cli.pairs(_fields(user), _cells(user))


@verb("create", USER)
async def create_user(
    cli: Cli,
    name: Name,
    is_super: Annotated[bool, typer.Option("--super", help="with all permissions")] = False,
    password_file: PasswordFile = None,
) -> None:
    """Create a user."""
    password = read_password(password_file, prompt=f"password of {name}")
    await (await cli.admin()).create_user(name, password, is_super=is_super)
    cli.done(f"created user {name}", name=name, action="create")


@verb("update", USER)
async def update_user(
    cli: Cli,
    name: Name,
    password: Annotated[bool, typer.Option("--password", help="prompt for a new password")] = False,
    type: Annotated[  # noqa: A002
        Literal["super", "normal"] | None, typer.Option(help="with all permissions, or not")
    ] = None,
    status: Annotated[
        Literal["enable", "disable"] | None, typer.Option(help="may sign requests, or not")
    ] = None,
    password_file: PasswordFile = None,
) -> None:
    """Change a user; omitted options change nothing."""
    secret = None
    if password or password_file is not None:
        secret = read_password(password_file, prompt=f"password of {name}")
    elif type is None and status is None:
        text = "nothing to change: give --password, --password-file, --type or --status"
        raise CommandError(text, USAGE)
    await _user(cli, name)
    await (await cli.admin()).update_user(
        name,
        password=secret,
        is_super=None if type is None else type == "super",
        enabled=None if status is None else status == "enable",
    )
    cli.done(f"updated user {name}", name=name, action="update")


@verb("delete", USER)
async def delete_user(cli: Cli, name: Name) -> None:
    """Delete a user and its permissions."""
    await _user(cli, name)
    await (await cli.admin()).delete_user(name)
    cli.done(f"deleted user {name}", name=name, action="delete")


async def _user(cli: Cli, name: str) -> User:
    user = await (await cli.admin()).user(name)
    if user is None:
        raise CommandError(f"there is no user {name}")
    return user


def _cells(user: User) -> dict[str, str]:
    return {
        "name": user.name,
        "type": "super" if user.is_super else "normal",
        "status": "enable" if user.enabled else "disable",
    }


def _fields(user: User) -> dict[str, Any]:
    fields = asdict(user)
    del fields["password"]  # RocketMQ's brokers show it
    return fields


@verb("list", ACL)
async def list_acls(
    cli: Cli,
    subject: Annotated[
        str, typer.Option(metavar="TEXT", help="only subjects that contain it")
    ] = "",
    resource: Annotated[
        str, typer.Option(metavar="TEXT", help="only resources that contain it")
    ] = "",
) -> None:
    """List permissions by subject."""
    acls = await (await cli.admin()).acls(subject, resource)
    empty = "no subject has such entries" if subject or resource else "no entries"
    cli.rows(acls, TITLES, _rows(acls), empty)


@verb("show", ACL)
async def show_acl(cli: Cli, subject: Subject) -> None:
    """Show the permissions of a user."""
    acl = await (await cli.admin()).acl(subject)
    if acl is None:
        raise CommandError(f"{subject} has no entries")
    cli.show(acl, lambda: print_table(TITLES, _rows([acl])))


def _setting(action: Literal["create", "update"], text: str) -> None:
    """Register a verb that sets permissions of a user."""

    async def change(
        cli: Cli,
        subject: Subject,
        resource: Resources,
        actions: Actions,
        decision: Allows = "allow",
        source: Sources = None,
        policy_type: PolicyType = "Custom",
    ) -> None:
        entries = _entries(resource, actions, decision, source, policy_type)
        admin = await cli.admin()
        await (admin.create_acl if action == "create" else admin.update_acl)(subject, *entries)
        cli.done(f"{action}d entries of {subject}", name=subject, action=action)

    change.__doc__ = text
    verb(action, ACL)(change)


_setting("create", "Add permissions to a user.")
_setting("update", "Change the permissions of a user on a resource.")


@verb("delete", ACL)
async def delete_acl(
    cli: Cli,
    subject: Subject,
    resource: Annotated[
        str | None, typer.Option(metavar="R", help="only the entry of this resource")
    ] = None,
    policy_type: PolicyType = "Custom",
) -> None:
    """Delete permissions of a user, all or those on a resource."""
    await (await cli.admin()).delete_acl(subject, resource, policy_type)
    cli.done(f"deleted entries of {subject}", name=subject, action="delete")


@verb("copy", ACL)
async def copy_acls(
    cli: Cli,
    to: Annotated[str, typer.Option(metavar="HOST:PORT", help="of the other broker")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[USER]…", help="NAME or User:NAME; none: all")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="HOST:PORT", help="of the broker to read; else the first"),
    ] = None,
) -> int:
    """Copy permissions to another broker."""
    wanted = names or []
    copied = await (await cli.admin()).copy_acls(to, wanted, source=source)
    known = {subject.partition(":")[2] for subject in copied} | set(copied)
    missing = [name for name in wanted if name not in known]
    text = f"copied to {to}: {', '.join(copied) or 'nothing'}"
    cli.done(text, action="copy", to=to, copied=list(copied))
    for name in missing:
        print_error(f"nothing to copy for {name}")
    return FAILED if missing else DONE


def _entries(
    resources: Sequence[Any],
    actions: Sequence[Any],
    decision: str,
    sources: Sequence[Any] | None,
    policy_type: Literal["Custom", "Default"],
) -> list[AclEntry]:
    return [
        AclEntry(
            resource=resource,
            actions=_flat(actions),
            allow=decision == "allow",
            sources=_flat(sources or []),
            policy_type=policy_type,
        )
        for resource in _flat(resources)
    ]


def _flat(lists: Sequence[list[str]]) -> list[str]:
    """Join the parts of an option that was given several times, each ``a,b``."""
    return [part for one in lists for part in one]


TITLES = ("SUBJECT", "POLICY", "RESOURCE", "ACTIONS", "DECISION", "FROM")


def _rows(acls: Sequence[Acl]) -> list[tuple[str, ...]]:
    return [
        (
            acl.subject,
            entry.policy_type,
            entry.resource,
            ",".join(entry.actions),
            "allow" if entry.allow else "deny",
            ",".join(entry.sources) or "anywhere",
        )
        for acl in acls
        for entry in acl.entries
    ]
