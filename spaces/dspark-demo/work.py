"""What chat and race share: one piece of work a visitor at a time, which can be stopped and is always tidied up."""

from __future__ import annotations

import logging
import threading
from typing import Any

import gradio as gr
from pairs import Pairs
from replies import Brake
from settings import Settings


CROWDED = "Too many people are waiting. Try again in a minute."
MESSAGE_CHARACTERS = 20_000  # a first bound, before anything is encoded

logger = logging.getLogger(__name__)


class Work:
    """
    Keeps the brake of what each visitor has queued or running. Handlers return values by the names of components.

    Args:
        settings (`Settings`): The Space's settings.
        pairs (`Pairs`): The models, which all visitors share.
    """

    def __init__(self, settings: Settings, pairs: Pairs):
        self.settings, self.pairs = settings, pairs
        self._brakes: dict[str, Brake] = {}
        self._lock = threading.Lock()

    def begin(self, text: str, visitor: str) -> str:
        """Register a visitor's new piece of work; else tell what is wrong with it."""
        if not text.strip():
            return "Write a message first."
        if len(text) > MESSAGE_CHARACTERS:
            return f"This message has {len(text):,} characters, and {MESSAGE_CHARACTERS:,} is the most. Shorten it."
        with self._lock:
            if visitor in self._brakes:
                return "The last one is not over yet. Wait for it, or stop it."
            self._brakes[visitor] = Brake(self.settings.time_limit)
            return ""

    def claim(self, request: gr.Request) -> Brake | None:
        """The brake of the visitor's new work; `None` if it was refused, is another handler's, or given up by now."""
        with self._lock:
            brake = self._brakes.get(request.session_hash)
            if brake is None or brake.is_claimed:
                return None
            if brake.is_unwanted:
                self.release(request)
                return None
            brake.is_claimed = True
            return brake

    def stop(self, request: gr.Request, unwanted: bool = False) -> dict[str, Any]:
        """Stop what the visitor has queued or running; `unwanted`: and show nothing more of it."""
        brake = self._brakes.get(request.session_hash)
        if brake:
            brake.stop(unwanted)
        return {"status": "Stopping." if brake else "Nothing is being written."}

    def leave(self, request: gr.Request) -> None:
        """The visitor closed the page."""
        brake = self._brakes.get(request.session_hash)
        self.stop(request, unwanted=True)
        if brake and not brake.is_claimed:
            self.release(request)

    def release(self, request: gr.Request) -> None:
        """The work is over, or never began."""
        self._brakes.pop(request.session_hash, None)

    def length(self, asked: int) -> dict[str, int]:
        """The length limit as an argument of `generate`, whatever a request made by hand asks for."""
        return {"max_new_tokens": max(1, min(int(asked), self.settings.max_new_tokens))}


def explained(error: Exception) -> str:
    """An error in words for the visitor; what they can't mend goes to the log in full."""
    if isinstance(error, ValueError):
        return str(error)
    logger.error("A reply failed.", exc_info=error)
    return f"Something went wrong ({type(error).__name__}). Try again, or start a new conversation."
