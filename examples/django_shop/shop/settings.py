"""Settings of the project, from the environment where they differ."""

import os

SECRET_KEY = os.environ.get("SECRET_KEY", "only for this example")
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["halfmq.integrations.django", "orders"]
HALFMQ = {"GROUP": "shop", "NAMESRV": os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876")}
DATABASES = {
    "default": {
        "ENGINE": os.environ.get("DATABASE_ENGINE", "django.db.backends.sqlite3"),
        "NAME": os.environ.get("DATABASE_NAME", "shop.db"),
        "USER": os.environ.get("DATABASE_USER", ""),
        "HOST": os.environ.get("DATABASE_HOST", ""),
        "PORT": os.environ.get("DATABASE_PORT", ""),
    }
}
