"""The nouns ``user`` and ``acl`` of the command ``halfmq``: manage users and their permissions.

They correspond to mqadmin's ``createUser``, ``createAcl`` and so on, with the same requests.
Passwords are typed, or read from a file or standard input, and shown only with ``--show-secrets``.
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
    users = nouns.add_parser("user", help="who may sign requests")
    _add_user_verbs(users.add_subparsers(metavar="VERB", required=True))
    acls = nouns.add_parser("acl", help="what users may do")
    _add_acl_verbs(acls.add_subparsers(metavar="VERB", required=True))


# -- arguments ---------------------------------------------------------------------------------


def _add_user_verbs(verbs: Any) -> None:
    listing = add_verb(verbs, "list", _list_users, "list them by name")
    listing.add_argument("--filter", default="", metavar="TEXT", help="whose name has this part")
    show = add_verb(verbs, "show", _show_user, "show one")
    for parser in (listing, show):
        parser.add_argument("--show-secrets", action="store_true", help="passwords too")
    create = add_verb(verbs, "create", _create_user, "add one")
    create.add_argument("--super", action="store_true", help="may do everything")
    update = add_verb(verbs, "update", _update_user, "change one; what is not named stays")
    update.add_argument("--password", action="store_true", help="ask for another password")
    update.add_argument("--type", choices=("super", "normal"), help="may do everything, or not")
    update.add_argument("--status", choices=("enable", "disable"), help="may sign requests, or not")
    create.set_defaults(prepare=_take_password, password=True)
    update.set_defaults(prepare=_take_password)
    for parser in (create, update):
        parser.add_argument(
            "--password-file",
            metavar="FILE",
            help="read the password from it and do not ask; - is standard input",
        )
    delete = add_verb(verbs, "delete", _delete_user, "remove one, and what it may do")
    for parser in (show, create, update, delete):
        parser.add_argument("name", metavar="NAME", help="of the user")
    copy = add_verb(verbs, "copy", _copy_users, "copy them to another broker")
    copy.add_argument("names", metavar="NAME", nargs="*", help="of users (default: all)")
    _add_places(copy)


def _add_acl_verbs(verbs: Any) -> None:
    listing = add_verb(verbs, "list", _list_acls, "list them by subject")
    listing.add_argument(
        "--subject", default="", metavar="TEXT", help="whose subject has this part"
    )
    listing.add_argument(
        "--resource", default="", metavar="TEXT", help="only what is about such a resource"
    )
    show = add_verb(verbs, "show", _show_acl, "show what one may do")
    create = add_verb(verbs, "create", _create_acl, "add to what one may do")
    update = add_verb(verbs, "update", _update_acl, "change what one may do with a resource")
    delete = add_verb(verbs, "delete", _delete_acl, "remove what is said about a resource, or all")
    for parser in (show, create, update, delete):
        parser.add_argument("subject", metavar="USER", help="NAME, or User:NAME")
    for parser in (create, update):
        parser.add_argument(
            "--resource",
            required=True,
            type=_texts,
            metavar="R,…",
            help="Topic:NAME, Group:NAME, Cluster:NAME; NAME* for all that begin so, * for all",
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
            "--source", type=_texts, default=[], metavar="IP,…", help="addresses where it counts"
        )
    delete.add_argument("--resource", metavar="R", help="only what is said about this one")
    for parser in (create, update, delete):
        parser.add_argument(
            "--policy-type",
            choices=_POLICY_TYPES,
            default="Custom",
            help="Default is asked where no Custom one matches (default: Custom)",
        )
    copy = add_verb(verbs, "copy", _copy_acls, "copy them to another broker")
    copy.add_argument("names", metavar="USER", nargs="*", help="NAME or User:NAME (default: all)")
    _add_places(copy)


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="of the other broker")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="HOST:PORT",
        help="of the broker to read (default: the first)",
    )


def _texts(text: str) -> list[str]:
    """Split ``a,b`` into its parts."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return parts


# -- verbs of user -----------------------------------------------------------------------------


async def _list_users(admin: Admin, options: argparse.Namespace) -> int:
    users = await admin.users(options.filter)
    if options.json:
        print_line(json.dumps([_user_fields(user, options) for user in users], indent=2))
    elif users:
        titles = ["NAME", "TYPE", "STATUS"] + ["PASSWORD"] * options.show_secrets
        print_table(titles, [list(_user_cells(user, options).values()) for user in users])
    else:
        print_line("no user has such a name" if options.filter else "there are no users")
    return DONE


async def _show_user(admin: Admin, options: argparse.Namespace) -> int:
    user = await admin.user(options.name)
    if user is None:
        return _no_user(options.name)
    if options.json:
        print_line(json.dumps(_user_fields(user, options), indent=2))
    else:
        print_pairs(_user_cells(user, options))
    return DONE


async def _create_user(admin: Admin, options: argparse.Namespace) -> int:
    await admin.create_user(options.name, options.secret, is_super=options.super)
    return _changed(options, "create", "created user")


async def _update_user(admin: Admin, options: argparse.Namespace) -> int:
    if options.secret is None and options.type is None and options.status is None:
        print_error("nothing to change: name --password, --password-file, --type or --status")
        return USAGE
    if await admin.user(options.name) is None:
        return _no_user(options.name)
    await admin.update_user(
        options.name,
        password=options.secret,
        is_super=None if options.type is None else options.type == "super",
        enabled=None if options.status is None else options.status == "enable",
    )
    return _changed(options, "update", "updated user")


async def _delete_user(admin: Admin, options: argparse.Namespace) -> int:
    if await admin.user(options.name) is None:
        return _no_user(options.name)
    await admin.delete_user(options.name)
    return _changed(options, "delete", "deleted user")


async def _copy_users(admin: Admin, options: argparse.Namespace) -> int:
    copied = await admin.copy_users(options.to, options.names, source=options.source)
    missing = [name for name in options.names if name not in copied]
    return _copied(options, copied, missing)


def _take_password(options: argparse.Namespace) -> None:
    options.secret = None
    if options.password or options.password_file is not None:
        prompt = f"password of {options.name}"
        options.secret = read_password(options.password_file, prompt=prompt)


def _no_user(name: str) -> int:
    print_error(f"there is no user {name}")
    return FAILED


def _user_cells(user: User, options: argparse.Namespace) -> dict[str, str]:
    cells = {
        "name": user.name,
        "type": "super" if user.is_super else "normal",
        "status": "enable" if user.enabled else "disable",
    }
    return cells | ({"password": user.password or "-"} if options.show_secrets else {})


def _user_fields(user: User, options: argparse.Namespace) -> dict[str, Any]:
    fields = asdict(user)
    if not options.show_secrets:
        del fields["password"]
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
            "nobody has such entries" if options.subject or options.resource else "no entries"
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
    return _changed(options, "create", "created entries of")


async def _update_acl(admin: Admin, options: argparse.Namespace) -> int:
    await admin.update_acl(options.subject, *_entries(options))
    return _changed(options, "update", "updated entries of")


async def _delete_acl(admin: Admin, options: argparse.Namespace) -> int:
    await admin.delete_acl(options.subject, options.resource, options.policy_type)
    return _changed(options, "delete", "deleted entries of")


async def _copy_acls(admin: Admin, options: argparse.Namespace) -> int:
    copied = await admin.copy_acls(options.to, options.names, source=options.source)
    names = {subject.partition(":")[2] for subject in copied}
    missing = [name for name in options.names if name not in names and name not in copied]
    return _copied(options, copied, missing)


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


def _changed(options: argparse.Namespace, action: str, words: str) -> int:
    name = getattr(options, "name", None) or options.subject
    return report_done(options, {"name": name, "action": action}, f"{words} {name}")


def _copied(options: argparse.Namespace, copied: Sequence[str], missing: Sequence[str]) -> int:
    fields = {"action": "copy", "to": options.to, "copied": list(copied)}
    report_done(options, fields, f"copied to {options.to}: {', '.join(copied) or 'nothing'}")
    for name in missing:
        print_error(f"there is nothing of {name} to copy")
    return FAILED if missing else DONE
