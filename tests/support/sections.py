"""How the walk through a segment is divided, so that small logs of tests have many sections too."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from halfmq.spark_jobs.log import walk


@contextmanager
def sections_of(size: int) -> Iterator[None]:
    """Walk in sections of so many bytes."""
    searched = min(size, 4 << 10)
    with patch.multiple(walk, SECTION_BYTES=size, _SEARCHED=searched):
        yield


def some_sections(seed: int) -> AbstractContextManager[None]:
    """Walk in sections of some size: of less than a record, of some records, or of many."""
    return sections_of(random.Random(seed).choice([128, 1 << 10, 1 << 16]))
