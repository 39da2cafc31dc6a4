"""Addresses of the project."""

from django.urls import path
from orders.views import order

urlpatterns = [path("orders/<slug:number>", order)]
