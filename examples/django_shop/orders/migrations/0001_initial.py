"""The tables, and the inbox of halfmq."""

from django.db import migrations, models

from halfmq.client import Inbox


class Migration(migrations.Migration):
    """The first one."""

    initial = True
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[("number", models.SlugField(primary_key=True, serialize=False))],
        ),
        migrations.CreateModel(
            name="Parcel",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False)),
                ("order", models.ForeignKey("orders.Order", on_delete=models.PROTECT)),
            ],
        ),
        migrations.RunSQL(Inbox("shipping").create_statement, "drop table halfmq_inbox"),
    ]
