"""`python -m halfmq.broker` is the command `broker`."""

import sys

from halfmq.broker.cli import main

if __name__ == "__main__":
    sys.exit(main())
