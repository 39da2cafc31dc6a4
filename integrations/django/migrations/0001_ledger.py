"""Create the ledger's table. It has no model, so ``makemigrations`` finds nothing to change."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from halfmq.integrations.django import ledger


def _create(_apps: Any, editor: Any) -> None:
    with editor.connection.cursor() as cursor:
        cursor.execute(ledger().create_statement)


def _drop(_apps: Any, editor: Any) -> None:
    with editor.connection.cursor() as cursor:
        cursor.execute(f"drop table {ledger().table}")


class Migration(migrations.Migration):  # type: ignore[misc] # Django has no types
    """The ledger."""

    operations = [migrations.RunPython(_create, _drop)]  # noqa: RUF012 -- Django's form
