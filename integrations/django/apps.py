"""The Django application, for its migration and its command."""

from __future__ import annotations

from django.apps import AppConfig


class HalfmqConfig(AppConfig):  # type: ignore[misc] # Django has no types of its own
    """``halfmq.integrations.django`` in INSTALLED_APPS."""

    name = "halfmq.integrations.django"
    label = "halfmq"
    verbose_name = "halfmq"
