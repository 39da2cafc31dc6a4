"""Tables of the shop."""

from django.db import models


class Order(models.Model):
    """What a customer ordered."""

    number = models.SlugField(primary_key=True)


class Parcel(models.Model):
    """What is on its way: one for each order."""

    order = models.ForeignKey(Order, on_delete=models.PROTECT)
