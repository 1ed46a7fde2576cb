"""The panel: a pulse as some rows of a terminal, drawn by rich into a string. Data in, text out.

Never in the process that trains: rich has locks, and importing it takes a tenth of a second.
"""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.core.units import size_text
from penstock.observe import lines
from penstock.observe.pulse import Pulse

ROWS = 4
_LEAST_COLUMNS, _LEAST_LINES = 72, 16
_STALE_S = 5.0


def rows_for(columns: int, screen_lines: int) -> int:
    """Return how many rows the panel takes on a screen of this size."""
    return ROWS if columns >= _LEAST_COLUMNS and screen_lines >= _LEAST_LINES else 1


def render(pulse: Pulse, *, columns: int, rows: int, age_s: float = 0.0, colours: bool = True) -> list[str]:
    """Return `rows` lines (1 or `ROWS`), each at most `columns` - 1 wide, with the terminal's colours.

    Args:
        pulse: what is shown.
        columns: of the terminal.
        rows: see `rows_for`.
        age_s: how old the pulse is, in seconds; said when it is old.
        colours: whether to colour.
    """
    width = max(1, columns - 1)  # a line in the last column would wrap on some terminals
    parts: list[RenderableType] = [_one_row(pulse)] if rows == 1 else [_where(pulse), _flow(pulse), _stages(pulse)]
    if rows > 1:
        parts.append(_memory(pulse, age_s))
    drawn = []
    for part in parts:
        sheet = io.StringIO()
        console = Console(
            file=sheet,
            width=width,
            height=rows,
            force_terminal=True,
            color_system="standard" if colours else None,
            legacy_windows=False,
            highlight=False,
        )
        console.print(part, end="", no_wrap=True, overflow="ellipsis", crop=True)
        drawn.append(sheet.getvalue().partition("\n")[0])
    return drawn


def _one_row(pulse: Pulse) -> Text:
    return Text.assemble(("penstock ", "bold cyan"), ("│ ", "dim"), lines.progress(pulse))


def _where(pulse: Pulse) -> RenderableType:
    head = Text.assemble(("penstock ", "bold cyan"), ("│ ", "dim"))
    if pulse.world_size > 1:
        head.append(f"rank {pulse.rank} of {pulse.world_size} · ")
    if not pulse.loader:
        return head.append("no batch yet")
    head.append(pulse.loader, "bold").append(f" · {lines.place(pulse)} ")
    if not pulse.length:
        return head
    left = f" {lines.clock(pulse.eta_s)} left in the epoch" if pulse.eta_s is not None else ""
    row = Table.grid(expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=pulse.length, completed=pulse.batch, complete_style="cyan", finished_style="cyan")
    row.add_row(head, bar, Text(left))
    return row


def _flow(pulse: Pulse) -> Text:
    moment = pulse.moment
    stalled = "red" if pulse.stall_share > 0.2 else "yellow" if pulse.stall_share > 0.05 else "green"
    text = Text.assemble(
        "  ",
        (lines.rate(pulse.samples_per_s), "bold"),
        (f" · waited for data {pulse.stall_share:.1%}", stalled),
        f" · {moment.ready} ready",
    )
    if moment.workers:
        shown = min(moment.workers, 16)
        working = round(shown * moment.working / moment.workers)
        text.append(" · workers ").append("●" * working, "green").append("○" * (shown - working), "dim")
        text.append(f" {lines.worker_states(pulse)}")
    return text


def _stages(pulse: Pulse) -> Text:
    shares = lines.per_batch_ms(pulse)
    if not shares:
        words = f"no batch for {pulse.since_batch_s:.0f} s" if pulse.loader else ""
        return Text(f"  {words}", style="dim")
    text = Text("  ms per batch  ", style="dim")
    for number, (name, milliseconds) in enumerate(shares):
        text.append(f"{' · ' if number else ''}{name} ", "dim").append(f"{milliseconds:.1f}", "none")
    return text


def _memory(pulse: Pulse, age_s: float) -> Text:
    moment = pulse.moment
    parts = []
    if moment.host_nbytes is not None:
        processes = "1 process" if pulse.processes == 1 else f"{pulse.processes} processes"
        parts.append(f"host {size_text(moment.host_nbytes)} in {processes}")
    if moment.slots_nbytes:
        parts.append(f"slots {size_text(moment.slots_nbytes)}")
    if moment.device_nbytes is not None:
        reserved = moment.device_reserved_nbytes or 0
        parts.append(f"GPU {size_text(moment.device_nbytes)}, {size_text(reserved)} reserved")
    if moment.device_busy is not None:
        parts.append(f"GPU {moment.device_busy:.0%} busy")
    text = Text(f"  {' · '.join(parts)}", style="dim")
    if age_s > _STALE_S:
        text.append(f" · no news for {age_s:.0f} s", "yellow")
    return text
