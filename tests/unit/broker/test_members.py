"""The brokers of one command: which stores would be left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.broker.config_file import load_config
from halfmq.broker.errors import BrokerConfigError
from halfmq.broker.members import check_members


def test_a_store_of_its_own_is_not_one_that_is_left_out(tmp_path: Path) -> None:
    """A broker starts again on its store; digests lie there in folders as the store's files do."""
    for folder in ("commitlog", "digests/commitlog", "digests/consumequeue", "config"):
        (tmp_path / folder).mkdir(parents=True)

    check_members(load_config(None, [f"storePathRootDir={tmp_path}"]).config)

    (tmp_path / "broker-a-1/commitlog").mkdir(parents=True)
    with pytest.raises(BrokerConfigError, match="no broker would serve"):
        check_members(load_config(None, [f"storePathRootDir={tmp_path}"]).config)
