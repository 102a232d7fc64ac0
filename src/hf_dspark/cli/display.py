"""How accepted drafts are shown: marked text, and two columns of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.table import Table
from rich.text import Text


if TYPE_CHECKING:
    from ..generation.statistics import Speculation
    from ..generation.streaming import Origin
    from .decoding import Decoded


def schedule_text(stats: Speculation) -> str:
    """Which schedule ran, and how much it drafted."""
    why = " (this machine was profiled)" if stats.schedule == "throughput" else ""
    drafts = f"{stats.most_drafts} draft{'' if stats.most_drafts == 1 else 's'} a round"
    if stats.schedule == "throughput" and stats.rounds:
        drafts = f"up to {drafts}, {stats.mean_drafts:.1f} on average"
    copies = ", copies where the text repeats itself" if stats.copied else ""
    return f"{stats.schedule}{why}, {drafts}{copies}"


class MarkedText:
    """
    Where accepted drafts begin and end in a growing text.

    Args:
        brackets (`bool`):
            Whether runs of accepted tokens are put between `‹` and `›`, for output without colour.
    """

    STYLE = "bold green"

    def __init__(self, brackets: bool):
        self._brackets = brackets
        self._inside = False

    def push(self, text: str, accepted: bool) -> list[tuple[str, str]]:
        """Return the pieces to print for one piece of text, as `(text, style)` pairs."""
        pieces = self._turn(accepted)
        pieces.append((text, self.STYLE if accepted else ""))
        return pieces

    def close(self) -> list[tuple[str, str]]:
        """Return what ends a run that is still open."""
        return self._turn(False)

    def _turn(self, accepted: bool) -> list[tuple[str, str]]:
        if not self._brackets or accepted == self._inside:
            return []
        self._inside = accepted
        return [("‹" if accepted else "›", "dim")]


class SideBySide:
    """
    Two growing texts in two columns, for a live display.

    Args:
        brackets (`bool`):
            Whether accepted drafts stand between signs, for output without colour.
    """

    ACCEPTED = MarkedText.STYLE

    def __init__(self, brackets: bool):
        self._plain, self._drafted = Text(), Text()
        self._marked = MarkedText(brackets)
        self._notes = ["", ""]

    def show_plain(self, text: str, origin: Origin) -> None:
        self._plain.append(text)

    def show_drafted(self, text: str, origin: Origin) -> None:
        for piece, style in self._marked.push(text, origin == "accepted"):
            self._drafted.append(piece, style)

    def note(self, plain: Decoded, drafted: Decoded | None = None) -> None:
        """Write the counts under the columns that are finished."""
        self._notes[0] = f"{len(plain.ids)} tokens, {plain.target_forwards} target forwards"
        if drafted:
            for piece, style in self._marked.close():
                self._drafted.append(piece, style)
            self._notes[1] = f"{len(drafted.ids)} tokens, {drafted.target_forwards} target forwards"

    def __rich__(self) -> Table:
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        left = Panel(self._plain, title="plain", subtitle=self._notes[0], border_style="dim")
        right = Panel(self._drafted, title="with the drafter", subtitle=self._notes[1], border_style="dim")
        grid.add_row(left, right)
        return grid
