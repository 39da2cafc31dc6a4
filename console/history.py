"""Figures of the last hour, sampled from the first sign-in on."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from halfmq.client.admin import Admin

SAMPLE_S: Final = 5.0
"""Seconds between two samples."""
SAMPLES_MAX: Final = 720
"""An hour."""

CHARTS: Final = {
    "Messages stored per second": ("putTps", True),
    "Messages delivered per second": ("getTransferredTps", True),
    "Undecided transactions": ("halfmq.transactions.pending", False),
    "Connections": ("halfmq.connections", False),
}
"""Title → key of ``Admin.metrics``, and whether it is a list of rates of which the first counts."""


class ChartSamples:
    """Samples of all brokers together, by chart."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=SAMPLES_MAX)

    async def sample(self, admin: Admin) -> None:
        """Take a sample, unless another page has just done so."""
        now = time.time()
        if self._samples and now - self._samples[-1][0] < SAMPLE_S / 2:
            return
        tables = (await admin.metrics()).values()
        self._samples.append(
            (
                now,
                {
                    title: sum(_number(table.get(key, "0"), is_rate) for table in tables)
                    for title, (key, is_rate) in CHARTS.items()
                },
            )
        )

    def chart(self, title: str) -> dict[str, Any]:
        """Return the options of a chart."""
        points = [[at * 1000, round(values[title], 1)] for at, values in self._samples]
        return {
            "title": {"text": title, "textStyle": {"fontSize": 13}},
            "grid": {"left": 50, "right": 10, "top": 35, "bottom": 25},
            "tooltip": {"trigger": "axis"},
            "aria": {"enabled": True},
            "xAxis": {
                "type": "time",
                "min": (time.time() - SAMPLES_MAX * SAMPLE_S) * 1000,
                "axisLabel": {"hideOverlap": True},
            },
            "yAxis": {"type": "value", "min": 0},
            "series": [{"type": "line", "showSymbol": False, "areaStyle": {}, "data": points}],
        }


def _number(text: str, is_rate: bool) -> float:
    try:
        return float(text.split(maxsplit=1)[0] if is_rate else text)
    except (ValueError, IndexError):
        return 0.0


SAMPLES: Final = ChartSamples()
"""Of all browsers."""
