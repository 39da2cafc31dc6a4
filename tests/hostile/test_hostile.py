"""A hostile peer takes neither memory nor messages from others."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final

import pytest

from halfmq.client.testing import broker_process
from tests.support.seeds import printed_seed

from .attacks import ATTACKS
from .rig import run, run_on

MIXED: Final = 3
"""Attacks of a mix, which lasts some ten seconds."""


@pytest.mark.campaign
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_harms_nobody_else(name: str, tmp_path: Path) -> None:
    """Nothing is lost, cut off or kept, and memory stays below its ceiling."""
    result = run(name, ATTACKS[name], tmp_path, Random(printed_seed()))

    print(result)
    assert not result.complaints


def test_a_mix_of_attacks_harms_nobody_else(tmp_path: Path) -> None:
    """What one attack leaves does not help the next."""
    random = Random(printed_seed())
    names = [name for name, attack in ATTACKS.items() if not attack.settings]
    chosen = {name: ATTACKS[name] for name in random.sample(names, min(MIXED, len(names)))}
    with broker_process(tmp_path) as broker:
        result = run_on(broker, chosen, random)

    print(result)
    assert not result.complaints
