"""``manage.py halfmq_prune``: delete old rows of the ledger."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand
from django.db import DEFAULT_DB_ALIAS, connections

from halfmq.integrations.django import ledger


class Command(BaseCommand):  # type: ignore[misc] # Django has no types of its own
    """Prunes the ledger."""

    help = "Delete rows of the ledger of halfmq that are older than some days."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the age and the database."""
        parser.add_argument("--days", type=int, default=30, help="at least 1 (default: 30)")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS)

    def handle(self, *_arguments: Any, **options: Any) -> None:
        """Delete them and print how many."""
        connection = connections[options["database"]]
        pruned = ledger().prune(connection, timedelta(days=options["days"]))
        self.stdout.write(f"pruned {pruned}")
