"""The nouns ``user`` and ``acl`` of the command ``halfmq``: manage users and their permissions.

They correspond to mqadmin's ``createUser``, ``createAcl`` and so on, with the same requests.
Passwords are typed, or read from a file or standard input; the broker shows them to nobody.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from halfmq.client.access import Acl, AclEntry, User
from halfmq.client.admin import Admin

from .broker import add_verb
from .connection_options import read_password
from .output import (
    DONE,
    FAILED,
    USAGE,
    print_error,
    print_line,
    print_pairs,
    print_table,
    report_done,
)

_POLICY_TYPES: Final = ("Custom", "Default")


def add_nouns(nouns: Any) -> None:
    """Add the nouns to the command's parser."""
    users = nouns.add_parser("user", help="user accounts")
    _add_user_verbs(users.add_subparsers(metavar="VERB", required=True))
    acls = nouns.add_parser("acl", help="permissions of users")
    _add_acl_verbs(acls.add_subparsers(metavar="VERB", required=True))


# -- arguments ---------------------------------------------------------------------------------


def _add_user_verbs(verbs: Any) -> None:
    listing = add_verb(verbs, "list", _list_users, "list users by name")
    listing.add_argument("--filter", default="", metavar="TEXT", help="only names that contain it")
    show = add_verb(verbs, "show", _show_user, "show a user")
    create = add_verb(verbs, "create", _create_user, "create a user")
    create.add_argument("--super", action="store_true", help="with all permissions")
    update = add_verb(
        verbs, "update", _update_user, "change a user; omitted options change nothing"
    )
    update.add_argument("--password", action="store_true", help="prompt for a new password")
    update.add_argument("--type", choices=("super", "normal"), help="with all permissions, or not")
    update.add_argument("--status", choices=("enable", "disable"), help="may sign requests, or not")
    create.set_defaults(prepare=_read_password, password=True)
    update.set_defaults(prepare=_read_password)
    for parser in (create, update):
        parser.add_argument(
            "--password-file",
            metavar="FILE",
            help="read the password from a file instead of a prompt; - is standard input",
        )
    delete = add_verb(verbs, "delete", _delete_user, "delete a user and its permissions")
    for parser in (show, create, update, delete):
        parser.add_argument("name", metavar="NAME", help="of the user")


def _add_acl_verbs(verbs: Any) -> None:
    listing = add_verb(verbs, "list", _list_acls, "list permissions by subject")
    listing.add_argument(
        "--subject", default="", metavar="TEXT", help="only subjects that contain it"
    )
    listing.add_argument(
        "--resource", default="", metavar="TEXT", help="only resources that contain it"
    )
    show = add_verb(verbs, "show", _show_acl, "show the permissions of a user")
    create = add_verb(verbs, "create", _create_acl, "add permissions to a user")
    update = add_verb(
        verbs, "update", _update_acl, "change the permissions of a user on a resource"
    )
    delete = add_verb(
        verbs, "delete", _delete_acl, "delete permissions of a user, all or those on a resource"
    )
    for parser in (show, create, update, delete):
        parser.add_argument("subject", metavar="USER", help="NAME, or User:NAME")
    for parser in (create, update):
        parser.add_argument(
            "--resource",
            required=True,
            type=_texts,
            metavar="R,…",
            help="Topic:NAME, Group:NAME, Cluster:NAME; NAME* for a prefix, * for all",
        )
        parser.add_argument(
            "--actions",
            required=True,
            type=_texts,
            metavar="A,…",
            help="Pub, Sub, Create, Update, Delete, Get, List or All",
        )
        parser.add_argument(
            "--decision", choices=("allow", "deny"), default="allow", help="(default: allow)"
        )
        parser.add_argument(
            "--source",
            type=_texts,
            default=[],
            metavar="IP,…",
            help="addresses for which it applies",
        )
    delete.add_argument("--resource", metavar="R", help="only the entry of this resource")
    for parser in (create, update, delete):
        parser.add_argument(
            "--policy-type",
            choices=_POLICY_TYPES,
            default="Custom",
            help="Default entries apply if no Custom entry matches (default: Custom)",
        )
    copy = add_verb(verbs, "copy", _copy_acls, "copy permissions to another broker")
    copy.add_argument("names", metavar="USER", nargs="*", help="NAME or User:NAME (default: all)")
    copy.add_argument("--to", required=True, metavar="HOST:PORT", help="of the other broker")
    copy.add_argument(
        "--from",
        dest="source",
        metavar="HOST:PORT",
        help="of the broker to read (default: the first)",
    )


def _texts(text: str) -> list[str]:
    """Split ``a,b`` into its parts."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r} is empty")
    return parts


# -- verbs of user -----------------------------------------------------------------------------


async def _list_users(admin: Admin, options: argparse.Namespace) -> int:
    users = await admin.users(options.filter)
    if options.json:
        print_line(json.dumps([_user_fields(user) for user in users], indent=2))
    elif users:
        rows = [list(_user_cells(user).values()) for user in users]
        print_table(["NAME", "TYPE", "STATUS"], rows)
    else:
        print_line("no user has such a name" if options.filter else "there are no users")
    return DONE


async def _show_user(admin: Admin, options: argparse.Namespace) -> int:
    user = await admin.user(options.name)
    if user is None:
        return _user_not_found(options.name)
    if options.json:
        print_line(json.dumps(_user_fields(user), indent=2))
    else:
        print_pairs(_user_cells(user))
    return DONE


async def _create_user(admin: Admin, options: argparse.Namespace) -> int:
    await admin.create_user(options.name, options.secret, is_super=options.super)
    return _report_change(options, "create", "created user")


async def _update_user(admin: Admin, options: argparse.Namespace) -> int:
    if options.secret is None and options.type is None and options.status is None:
        print_error("nothing to change: give --password, --password-file, --type or --status")
        return USAGE
    if await admin.user(options.name) is None:
        return _user_not_found(options.name)
    await admin.update_user(
        options.name,
        password=options.secret,
        is_super=None if options.type is None else options.type == "super",
        enabled=None if options.status is None else options.status == "enable",
    )
    return _report_change(options, "update", "updated user")


async def _delete_user(admin: Admin, options: argparse.Namespace) -> int:
    if await admin.user(options.name) is None:
        return _user_not_found(options.name)
    await admin.delete_user(options.name)
    return _report_change(options, "delete", "deleted user")


def _read_password(options: argparse.Namespace) -> None:
    options.secret = None
    if options.password or options.password_file is not None:
        prompt = f"password of {options.name}"
        options.secret = read_password(options.password_file, prompt=prompt)


def _user_not_found(name: str) -> int:
    print_error(f"there is no user {name}")
    return FAILED


def _user_cells(user: User) -> dict[str, str]:
    return {
        "name": user.name,
        "type": "super" if user.is_super else "normal",
        "status": "enable" if user.enabled else "disable",
    }


def _user_fields(user: User) -> dict[str, Any]:
    fields = asdict(user)
    del fields["password"]  # RocketMQ's brokers show it
    return fields


# -- verbs of acl ------------------------------------------------------------------------------


async def _list_acls(admin: Admin, options: argparse.Namespace) -> int:
    acls = await admin.acls(options.subject, options.resource)
    if options.json:
        print_line(json.dumps([asdict(acl) for acl in acls], indent=2))
    elif acls:
        _print_entries(acls)
    else:
        print_line(
            "no subject has such entries" if options.subject or options.resource else "no entries"
        )
    return DONE


async def _show_acl(admin: Admin, options: argparse.Namespace) -> int:
    acl = await admin.acl(options.subject)
    if acl is None:
        print_error(f"{options.subject} has no entries")
        return FAILED
    if options.json:
        print_line(json.dumps(asdict(acl), indent=2))
    else:
        _print_entries([acl])
    return DONE


async def _create_acl(admin: Admin, options: argparse.Namespace) -> int:
    await admin.create_acl(options.subject, *_entries(options))
    return _report_change(options, "create", "created entries of")


async def _update_acl(admin: Admin, options: argparse.Namespace) -> int:
    await admin.update_acl(options.subject, *_entries(options))
    return _report_change(options, "update", "updated entries of")


async def _delete_acl(admin: Admin, options: argparse.Namespace) -> int:
    await admin.delete_acl(options.subject, options.resource, options.policy_type)
    return _report_change(options, "delete", "deleted entries of")


async def _copy_acls(admin: Admin, options: argparse.Namespace) -> int:
    copied = await admin.copy_acls(options.to, options.names, source=options.source)
    names = {subject.partition(":")[2] for subject in copied}
    missing = [name for name in options.names if name not in names and name not in copied]
    fields = {"action": "copy", "to": options.to, "copied": list(copied)}
    report_done(options, fields, f"copied to {options.to}: {', '.join(copied) or 'nothing'}")
    for name in missing:
        print_error(f"nothing to copy for {name}")
    return FAILED if missing else DONE


def _entries(options: argparse.Namespace) -> list[AclEntry]:
    return [
        AclEntry(
            resource=resource,
            actions=options.actions,
            allow=options.decision == "allow",
            sources=options.source,
            policy_type=options.policy_type,
        )
        for resource in options.resource
    ]


def _print_entries(acls: Sequence[Acl]) -> None:
    rows = [
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
    print_table(("SUBJECT", "POLICY", "RESOURCE", "ACTIONS", "DECISION", "FROM"), rows)


# -- output ------------------------------------------------------------------------------------


def _report_change(options: argparse.Namespace, action: str, words: str) -> int:
    name = getattr(options, "name", None) or options.subject
    return report_done(options, {"name": name, "action": action}, f"{words} {name}")
