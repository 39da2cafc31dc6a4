"""What several pages are made of: tables, confirmations, facts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlencode

from nicegui import ui
from nicegui.events import KeyEventArguments, ValueChangeEventArguments

from halfmq.client.errors import UnreadableBodyError
from halfmq.client.message import ReceivedMessage

from .session import reported

PAGE_ROWS: Final = 25

Row = dict[str, Any]
T = TypeVar("T")

_OPENING_CELL: Final = """
<q-td :props="props"><q-btn flat dense no-caps no-wrap align="left" :label="String(props.value)" {}
  @click.stop.prevent="() => $parent.$emit('open', props.row)" /></q-td>
"""
"""A button as the first cell, which the keyboard reaches; with `_LINK` it is a link."""

_LINK: Final = ":href=\"'?open=' + encodeURIComponent(props.value)\""


class SearchTable(Generic[T]):
    """A table whose rows stay here: the browser has one page of them, sorted and searched."""

    def __init__(
        self,
        columns: Mapping[str, Callable[[T], object]],
        *,
        empty: str,
        on_open: Callable[[T], Any] | None = None,
        search: str | None = None,
        also: Callable[[T], object] = lambda _one: "",
    ) -> None:
        """Show an empty table.

        Args:
            columns: Title of each column, and what it shows of an item.
            empty: What is said if there are no items.
            on_open: Called with an item whose row is clicked, or whose first cell is ``open`` in
                the page's address.
            search: The text that is searched first, from the page's address, which follows it and
                the order of the rows; None for a list in a dialogue.
            also: What is searched too, and not shown.
        """
        self._cells = {**{f"c{n}": cell for n, cell in enumerate(columns.values())}, "also": also}
        self._items: Sequence[T] = ()
        self._rows: list[Row] = []
        self._found = 0  # rows with what is searched
        self._empty, self._is_linked = empty, search is not None
        self._titles = dict(zip(self._cells, columns, strict=False))
        with ui.row().classes("items-center w-full"):
            self.search = ui.input("Search", value=search or "", on_change=self._searched).props(
                "clearable outlined dense debounce=200 aria-label=Search"
            )
            self._count = ui.label().props("aria-live=polite")
        ui.keyboard(on_key=self._key, ignore=["input", "textarea", "select"])
        self._table = (
            ui.table(
                columns=[
                    {"name": name, "label": title, "field": name, "align": "left", "sortable": True}
                    for name, title in self._titles.items()
                ],
                rows=[],
                row_key="key",
                pagination={
                    "rowsPerPage": PAGE_ROWS,
                    "rowsNumber": 0,
                    "page": 1,
                    **(self._linked_order() if self._is_linked else {}),
                },
                on_pagination_change=self._paged,
            )
            .classes("w-full")
            .props("flat bordered dense wrap-cells=false")
        )
        self._table.on("request", lambda event: self._ordered(event.args["pagination"]))
        self._on_open, self._to_open = on_open, None
        if on_open is not None:
            self._to_open = self._is_linked and ui.context.client.request.query_params.get("open")
            self._table.classes("cursor-pointer")
            self._table.on("rowClick", lambda event: on_open(self._items[event.args[1]["key"]]))
            self._table.on("open", lambda event: on_open(self._items[event.args["key"]]))
            cell = _OPENING_CELL.format(_LINK if self._is_linked else "")
            self._table.add_slot("body-cell-c0", cell)

    def fill(self, items: Sequence[T]) -> None:
        """Replace the items."""
        self._items = items
        self._rows = [
            {"key": number, **{name: cell(one) for name, cell in self._cells.items()}}
            for number, one in enumerate(items)
        ]
        self._show(dict(self._table.pagination))
        named = [row["key"] for row in self._rows if row["c0"] == self._to_open]
        if named and self._on_open is not None:
            self._to_open = None
            ui.timer(0, partial(self._on_open, items[named[0]]), once=True)

    def _key(self, event: KeyEventArguments) -> None:
        if event.action.keydown and event.key == "/":
            self.search.run_method("focus")

    def _linked_order(self) -> dict[str, Any]:
        """Return the order that the page's address names: a title, after ``-`` if descending."""
        order = ui.context.client.request.query_params.get("sort", "")
        is_descending = order.startswith("-")
        names = {title: name for name, title in self._titles.items()}
        by = names.get(order.removeprefix("-"))
        return {} if by is None else {"sortBy": by, "descending": is_descending}

    def _searched(self) -> None:
        self._ordered({**self._table.pagination, "page": 1})

    def _ordered(self, pagination: dict[str, Any]) -> None:
        self._show(pagination)
        if self._is_linked:
            query = {"q": self.search.value or ""}
            if by := pagination.get("sortBy"):
                query["sort"] = "-" * bool(pagination["descending"]) + self._titles[by]
            ui.navigate.history.replace(f"?{urlencode(query)}")

    def _paged(self, event: ValueChangeEventArguments[dict[str, Any]]) -> None:
        """A browser tells the page of its first view late: it does not know the rows yet."""
        if event.value.get("rowsNumber") != self._found:
            self._show({**event.value})

    def _show(self, pagination: dict[str, Any]) -> None:
        wanted = (self.search.value or "").casefold()
        rows = [
            row
            for row in self._rows
            if not wanted or any(wanted in str(row[name]).casefold() for name in self._cells)
        ]
        by = pagination.get("sortBy")
        if by:
            rows.sort(key=lambda row: _sort_key(row[by]), reverse=bool(pagination["descending"]))
        size = pagination["rowsPerPage"] or len(rows)
        first = (pagination["page"] - 1) * size
        pagination["rowsNumber"] = self._found = len(rows)
        self._table.rows = rows[first : first + size]
        self._table.pagination = pagination
        searched = f" with “{self.search.value}”" if wanted else ""
        self._count.text = f"{len(rows)}{searched}" if rows else f"{self._empty}{searched}"


def _sort_key(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, str(value)


def body_of(message: ReceivedMessage, length: int) -> str:
    """Return the beginning of a body, as it is stored if it cannot be decompressed."""
    try:
        body = message.body
    except UnreadableBodyError:
        body = message.record.body
    return body[:length].decode(errors="replace")


def facts(pairs: Mapping[str, object]) -> None:
    """Show names and values."""
    with ui.grid(columns="max-content 1fr").classes("gap-x-6 gap-y-1"):
        for name, value in pairs.items():
            ui.label(name).classes("text-grey-8")
            ui.label(str(value)).classes("break-all")


def confirm(
    title: str,
    word: str,
    action: Callable[[str], Awaitable[str]],
    *,
    with_reason: bool = False,
) -> None:
    """Ask for a word, and with ``with_reason`` for a reason; then act, and show what was done."""

    async def act() -> None:
        dialog.close()
        done = await reported(action)(reason.value if reason is not None else "")
        if done is not None:
            ui.notify(done, type="positive")

    with ui.dialog(value=True) as dialog, ui.card().classes("min-w-80"):
        ui.label(title).classes("text-lg")
        reason = ui.input("Reason, for the broker's log").classes("w-full") if with_reason else None
        typed = ui.input(f"Type “{word}” to confirm").classes("w-full").props("autofocus")
        with ui.row().classes("justify-end w-full"):
            ui.button("Cancel", on_click=dialog.close).props("flat")
            button = ui.button("Confirm", on_click=act)
        button.bind_enabled_from(typed, "value", backward=lambda text: text == word)
