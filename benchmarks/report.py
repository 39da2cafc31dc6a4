"""Turn measurements into a table, a comparison and a JSON file."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from .generator import LoadResult
from .limits import Limits
from .machine import Machine
from .peers import ECHO, HALFMQ
from .scenarios import BODY_SIZE, FlushDiskType, LoadKind, MessageShape, Scenario

_BESIDE_MEMORY: Final = frozenset({LoadKind.BATCH, LoadKind.TRANSACTION})
_SATURATED: Final = 0.95  # share of its core from which the generator may be the bottleneck


class Measurement(msgspec.Struct, frozen=True):
    """One server under one load in one round, with the disk limit taken just before."""

    scenario: Scenario
    server: str
    round: int
    disk: Limits
    result: LoadResult | None  # None: it failed, and ``error`` says how
    error: str | None = None


class Report(msgspec.Struct, frozen=True):
    """Everything one call measured; the JSON file is this, field by field."""

    machine: Machine
    settings: dict[str, dict[str, str]]  # by server; "run" holds those of the run
    limits: Limits
    measurements: list[Measurement]
    rows: list["Row"]


class Row(msgspec.Struct, frozen=True):
    """Medians over the rounds of one server under one load.

    A ratio is taken within a round and only then over the rounds, so that a machine that slows down
    between two rounds does not bend it.
    """

    scenario: str
    server: str
    rounds: int
    rate: float  # messages (transactions) per second
    rate_lowest: float
    rate_highest: float
    cpu_us: float
    p50_us: float
    p99_us: float
    generator_cpu_us: float
    generator_busy: float
    others_busy: float
    cpu_to_echo: float | None  # CPU per message in units of F
    rate_to_disk: float | None  # durable loads: messages per second in units of D
    cpu_to_memory: float | None  # batches and transactions: CPU per message in units of M
    delivered: float | None  # of transactions: which share of those committed can be read
    our_rate: float | None  # of a peer: our rate in units of its rate
    our_cpu: float | None  # of a peer: our CPU per message in units of its
    our_p99_us: float | None  # of a peer: ours, to be read beside its
    beside: str  # the load with a plainer message that the next three are about, or empty
    rate_beside: float | None  # rate in units of its rate
    cpu_beside: float | None  # CPU per message in units of its
    p99_beside_us: float | None  # its p99
    rate_to_send: float | None  # of transactions: their rate in units of that of plain sends
    cpu_to_send: float | None  # of transactions: their CPU in units of that of a plain send
    flaws: list[str]


def make_rows(measurements: Sequence[Measurement], limits: Limits) -> list[Row]:
    """One row per load and server, in the order in which they were first measured."""
    keys = dict.fromkeys((m.scenario.name, m.server) for m in measurements)
    return [_row(measurements, limits, scenario, server) for scenario, server in keys]


def _row(measurements: Sequence[Measurement], limits: Limits, scenario: str, server: str) -> Row:
    mine = [m for m in measurements if m.scenario.name == scenario and m.server == server]
    results = [m.result for m in mine if m.result is not None]
    rates = [result.rate for result in results]
    is_durable = mine[0].scenario.mode is FlushDiskType.SYNC and server != ECHO
    memory_us = limits.memory_us if mine[0].scenario.kind in _BESIDE_MEMORY else None
    cpu_us = _median(result.cpu_us for result in results)
    ours = {} if server in {HALFMQ, ECHO} else _by_round(measurements, scenario, HALFMQ)
    beside = _plainer(mine[0].scenario, {m.scenario.name for m in measurements})
    plainer = _by_round(measurements, beside, server)
    echo = _by_round(measurements, scenario, ECHO)
    sends = _by_round(measurements, _plain_send_of(mine[0].scenario), server)
    disk = [m.result.rate / m.disk.fdatasync_per_second for m in mine if m.result is not None]
    return Row(
        scenario=scenario,
        server=server,
        rounds=len(results),
        rate=_median(rates),
        rate_lowest=min(rates, default=0.0),
        rate_highest=max(rates, default=0.0),
        cpu_us=cpu_us,
        p50_us=_median(result.latency_us.p50 for result in results),
        p99_us=_median(result.latency_us.p99 for result in results),
        generator_cpu_us=_median(result.generator_cpu_us for result in results),
        generator_busy=_median(result.generator_busy for result in results),
        others_busy=_median(result.others_busy for result in results),
        cpu_to_echo=_ratio((m.result, echo.get(m.round)) for m in mine),
        rate_to_disk=_median(disk) if is_durable and disk else None,
        cpu_to_memory=cpu_us / memory_us if memory_us else None,
        delivered=_median_or_none(result.delivered for result in results),
        our_rate=_rate_ratio((ours.get(m.round), m.result) for m in mine),
        our_cpu=_ratio((ours.get(m.round), m.result) for m in mine),
        our_p99_us=_median_or_none(result.latency_us.p99 for result in ours.values()),
        beside=beside,
        rate_beside=_rate_ratio((m.result, plainer.get(m.round)) for m in mine),
        cpu_beside=_ratio((m.result, plainer.get(m.round)) for m in mine),
        p99_beside_us=_median_or_none(result.latency_us.p99 for result in plainer.values()),
        rate_to_send=_rate_ratio((m.result, sends.get(m.round)) for m in mine),
        cpu_to_send=_ratio((m.result, sends.get(m.round)) for m in mine),
        flaws=_flaws(mine),
    )


def _plain_send_of(scenario: Scenario) -> str:
    """The name of the plain sends under the same load; of what is no transaction, nothing's."""
    is_transaction = scenario.kind is LoadKind.TRANSACTION
    return replace(scenario, kind=LoadKind.SEND).name if is_transaction else ""


def _plainer(scenario: Scenario, measured: Collection[str]) -> str:
    """The name of the same load with lean messages; where there is none, with usual ones."""
    plain = replace(scenario, body_size=BODY_SIZE, header="", half_load=False)
    for message in (MessageShape.LEAN, MessageShape.USUAL):
        name = replace(plain, message=message).name
        if name == scenario.name:
            break
        if name in measured:
            return name
    return ""


def _by_round(
    measurements: Iterable[Measurement], scenario: str, server: str
) -> dict[int, LoadResult]:
    return {
        m.round: m.result
        for m in measurements
        if m.scenario.name == scenario and m.server == server and m.result is not None
    }


def _ratio(pairs: Iterable[tuple[LoadResult | None, LoadResult | None]]) -> float | None:
    """CPU per message of the first in units of the second."""
    ratios = [a.cpu_us / b.cpu_us for a, b in pairs if a and b and b.cpu_us > 0]
    return median(ratios) if ratios else None


def _rate_ratio(pairs: Iterable[tuple[LoadResult | None, LoadResult | None]]) -> float | None:
    ratios = [a.rate / b.rate for a, b in pairs if a and b and b.rate > 0]
    return median(ratios) if ratios else None


def _median_or_none(values: Iterable[float | None]) -> float | None:
    listed = [value for value in values if value is not None]
    return median(listed) if listed else None


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return median(listed) if listed else 0.0


def _flaws(measurements: Iterable[Measurement]) -> list[str]:
    """What a reader must know before trusting the row."""
    flaws: list[str] = []
    for m in measurements:
        if m.result is None:
            flaws.append(f"round {m.round}: {m.error}")
            continue
        flaws += [f"round {m.round}: {flaw}" for flaw in m.result.flaws]
        if m.server != ECHO and m.result.generator_busy > _SATURATED:
            flaws.append(f"round {m.round}: generator saturated")
    return flaws


# ---- text ----------------------------------------------------------------------------------------

_HEAD: Final = (
    *("load", "server", "msgs/s", "lowest-highest", "CPU us", "xF", "xD", "xM"),
    *("p50 us", "p99 us", "delivered", "gen us", "gen", "others"),
)
_BESIDE_PLAINER: Final = (
    *("load", "beside", "server", "CPU / its CPU", "rate / its rate", "p99 us", "its p99 us"),
)
_BESIDE_SENDS: Final = ("load", "server", "rate / sends' rate", "CPU / a send's CPU")
_COMPARED: Final = (
    *("load", "peer", "our rate / its rate", "our CPU / its CPU", "our p99 us", "its p99 us"),
)


def as_text(report: Report) -> str:
    """The report for a terminal."""
    parts = [_heading(report), table(_HEAD, [_cells(row) for row in report.rows])]
    beside = [row for row in report.rows if row.rate_to_send is not None]
    if beside:
        cells = [
            (row.scenario, row.server, _times(row.rate_to_send), _times(row.cpu_to_send))
            for row in beside
        ]
        parts.append(table(_BESIDE_SENDS, cells))
    plainer = [_beside_cells(row) for row in report.rows if row.rate_beside is not None]
    if plainer:
        parts.append(table(_BESIDE_PLAINER, plainer))
    compared = [_compared_cells(row) for row in report.rows if row.our_rate is not None]
    if compared:
        parts.append(table(_COMPARED, compared))
    flaws = [f"{row.scenario}, {row.server}: {flaw}" for row in report.rows for flaw in row.flaws]
    if flaws:
        parts.append("Not to be taken at their word:\n" + "\n".join(flaws))
    return "\n\n".join(parts)


def _heading(report: Report) -> str:
    machine, limits = report.machine, report.limits
    disk = median(m.disk.fdatasync_per_second for m in report.measurements)
    settings = [
        f"{name}: " + " ".join(f"{key}={value}" for key, value in pairs.items())
        for name, pairs in report.settings.items()
    ]
    return (
        f"{machine.processor}, {machine.cores} cores, {machine.memory_gib} GiB, {machine.kernel}, "
        f"{machine.python}, {machine.file_system}, load {machine.load_average[0]:.2f}\n"
        + "\n".join(settings)
        + "\nF = CPU of the echo server under the same load (rows 'echo')\n"
        f"D = {disk:,.0f} single writes with fdatasync per second (median of the loads); "
        f"sequential {limits.sequential_mb_per_second or 0:,.0f} MB/s\n"
        f"M = {limits.memory_us or 0:.3f} us to copy a record and sum up its body"
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.scenario,
        row.server,
        f"{row.rate:,.0f}",
        f"{row.rate_lowest:,.0f}-{row.rate_highest:,.0f}",
        f"{row.cpu_us:.2f}",
        _times(None if row.server == ECHO else row.cpu_to_echo),
        _times(row.rate_to_disk),
        _times(row.cpu_to_memory),
        f"{row.p50_us:,.0f}",
        f"{row.p99_us:,.0f}",
        "" if row.delivered is None else f"{row.delivered:.1%}",
        f"{row.generator_cpu_us:.2f}",
        f"{row.generator_busy:.2f}",
        f"{row.others_busy:.2f}",
    )


def _beside_cells(row: Row) -> tuple[str, ...]:
    return (
        row.scenario,
        row.beside,
        row.server,
        _times(row.cpu_beside),
        _times(row.rate_beside),
        f"{row.p99_us:,.0f}",
        _whole(row.p99_beside_us),
    )


def _compared_cells(row: Row) -> tuple[str, ...]:
    return (
        row.scenario,
        row.server,
        _times(row.our_rate),
        _times(row.our_cpu),
        _whole(row.our_p99_us),
        f"{row.p99_us:,.0f}",
    )


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; the first two are text, the others numbers."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_json(report: Report, path: Path) -> None:
    """Keep everything that was measured, for later comparison; a line for each measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    members = []
    for name, value in msgspec.to_builtins(report).items():
        if isinstance(value, list):
            lines = ",\n".join(msgspec.json.encode(one).decode() for one in value)
            members.append(f'"{name}": [\n{lines}\n]')
        else:
            members.append(f'"{name}": {msgspec.json.encode(value).decode()}')
    path.write_text("{" + ",\n".join(members) + "}\n", encoding="utf-8")
