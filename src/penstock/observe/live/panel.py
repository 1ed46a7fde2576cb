"""The live panel: a snapshot as rows of a terminal, drawn by rich into strings. Data in, text out.

Never imported by the process that trains: rich has locks, and importing it takes a tenth of a second.
"""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.core.units import size_text
from penstock.observe.live import live_text
from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.record.formatting import percent_text, rate_text

ROWS = 4
_LEAST_COLUMNS, _LEAST_LINES = 72, 16
_STALE_S = 5.0


def rows_for(columns: int, screen_lines: int) -> int:
    """Return how many rows the panel takes on a screen of this size."""
    return ROWS if columns >= _LEAST_COLUMNS and screen_lines >= _LEAST_LINES else 1


def render(
    snapshot: LiveSnapshot,
    *,
    columns: int,
    rows: int,
    age_s: float = 0.0,
    colours: bool = True,
) -> list[str]:
    """Return `rows` lines (1 or `ROWS`), each at most `columns` - 1 wide, with the terminal's colours.

    Args:
        snapshot: what to draw.
        columns: width of the terminal.
        rows: see `rows_for`.
        age_s: age of the snapshot in seconds; the panel shows it when it exceeds 5 s.
        colours: whether to use colours.
    """
    width = max(1, columns - 1)  # a line in the last column would wrap on some terminals
    parts: list[RenderableType] = [_single_row(snapshot)]
    if rows > 1:
        parts = [_position_row(snapshot), _rate_row(snapshot), _stage_row(snapshot)]
        parts.append(_memory_row(snapshot, age_s))
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


def _single_row(snapshot: LiveSnapshot) -> Text:
    return Text.assemble(("penstock ", "bold cyan"), ("│ ", "dim"), live_text.progress_line(snapshot, is_short=True))


def _position_row(snapshot: LiveSnapshot) -> RenderableType:
    head = Text.assemble(("penstock ", "bold cyan"), ("│ ", "dim"))
    if snapshot.world_size > 1:
        head.append(f"rank {snapshot.rank} of {snapshot.world_size} · ")
    if not snapshot.loader:
        return head.append("no batch yet")
    head.append(live_text.loader_text(snapshot), "bold").append(f" · {live_text.position_text(snapshot)} ")
    if not snapshot.length:
        return head
    left = f" {live_text.clock_text(snapshot.eta_s)} left in the epoch" if snapshot.eta_s is not None else ""
    row = Table.grid(expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=snapshot.length, completed=snapshot.batch, complete_style="cyan", finished_style="cyan")
    row.add_row(head, bar, Text(left))
    return row


def _rate_row(snapshot: LiveSnapshot) -> Text:
    now = snapshot.now
    stalled = "red" if snapshot.stall_fraction > 0.2 else "yellow" if snapshot.stall_fraction > 0.05 else "green"
    text = Text.assemble(
        "  ",
        (rate_text(snapshot.samples_per_s), "bold"),
        (f" · waited for data {percent_text(snapshot.stall_fraction)}", stalled),
        "" if snapshot.is_watched else f" · {now.ready} ready",
    )
    if now.workers:
        shown = min(now.workers, 16)
        working = round(shown * now.working / now.workers)
        text.append(" · workers ").append("●" * working, "green").append("○" * (shown - working), "dim")
        text.append(f" {live_text.worker_states_text(snapshot)}")
    return text


def _stage_row(snapshot: LiveSnapshot) -> Text:
    stages = live_text.stage_ms_per_batch(snapshot)
    if not stages:
        words = f"no batch for {snapshot.since_batch_s:.0f} s" if snapshot.loader else ""
        return Text(f"  {words}", style="dim")
    text = Text("  ms per batch  ", style="dim")
    for number, (name, milliseconds) in enumerate(stages):
        text.append(f"{' · ' if number else ''}{name} ", "dim").append(f"{milliseconds:.1f}", "none")
    if snapshot.copy_wait_s is not None:
        text.append(" · GPU waited for copies ", "dim").append(f"{snapshot.copy_wait_s * 1e3:.2f}", "none")
    return text


def _memory_row(snapshot: LiveSnapshot, age_s: float) -> Text:
    now = snapshot.now
    parts = []
    if now.host_nbytes is not None:
        processes = "1 process" if snapshot.processes == 1 else f"{snapshot.processes} processes"
        parts.append(f"host {size_text(now.host_nbytes)} in {processes}")
    if now.slots_nbytes:
        parts.append(f"slots {size_text(now.slots_nbytes)}")
    if now.device_nbytes is not None:
        reserved = now.device_reserved_nbytes or 0
        peak = "" if now.device_peak_nbytes is None else f", peak {size_text(now.device_peak_nbytes)}"
        parts.append(f"GPU {size_text(now.device_nbytes)}{peak}, {size_text(reserved)} reserved")
    if now.device_utilization is not None:
        parts.append(f"GPU {percent_text(now.device_utilization)} busy")
    text = Text(f"  {' · '.join(parts)}", style="dim")
    if age_s > _STALE_S:
        text.append(f" · no news for {age_s:.0f} s", "yellow")
    return text
