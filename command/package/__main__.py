"""``python -m halfmq`` is the command ``halfmq``."""

import sys

from halfmq.command.main import main

if __name__ == "__main__":
    sys.exit(main())
