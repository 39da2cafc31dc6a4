"""The tables, and the inbox of halfmq."""

import django.db.models.deletion
from django.db import migrations, models

from halfmq.client import Inbox


class Migration(migrations.Migration):
    """As Django writes it, but for the inbox."""

    initial = True
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[("number", models.SlugField(primary_key=True, serialize=False))],
        ),
        migrations.CreateModel(
            name="Parcel",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "order",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, to="orders.order"
                    ),
                ),
            ],
        ),
        migrations.RunSQL(Inbox("shipping").create_statement, "drop table halfmq_inbox"),
    ]
