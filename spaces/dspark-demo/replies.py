"""Replies as they are written: one lane for the chat, two for the race."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from pairs import Pair
from transformers import StoppingCriteria

from hf_dspark.generation.statistics import Speculation, count_rounds
from hf_dspark.generation.streaming import DraftStreamer, Origin


# Seconds between two pictures of a growing reply. A longer text than so many tokens gets fewer of them, down to one in
# `SLOWEST_FRAME`: a browser that draws nothing else leaves its visitor no time to press Stop.
FRAME, LONG_TEXT, SLOWEST_FRAME = 0.15, 500, 1.0


class PromptError(ValueError):
    """A message that can't be answered, in words for its writer."""


class Brake(StoppingCriteria):
    """
    Ends a reply at the next token: when its reader stops it, or when its time is over.

    Args:
        time_limit (`float`): Seconds a reply may take, from `start` on.
    """

    def __init__(self, time_limit: float):
        self._time_limit = time_limit
        self._stopped = threading.Event()
        self._deadline = float("inf")
        self.is_claimed = False  # by the handler that writes the reply
        self.is_unwanted = False  # nobody wants to see what has been written

    def start(self) -> None:
        self._deadline = time.monotonic() + self._time_limit

    def stop(self, unwanted: bool = False) -> None:
        self.is_unwanted |= unwanted
        self._stopped.set()

    @property
    def reason(self) -> str:
        """Why the reply has to end here; empty while it may go on."""
        if self._stopped.is_set():
            return "Stopped"
        return "Cut off at the time limit" if time.monotonic() > self._deadline else ""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return torch.full((input_ids.shape[0],), bool(self.reason), device=input_ids.device)


class Turns:
    """
    Lets lanes share one processor fairly: only one runs at a time, always the one that has used the least of it so
    far, and the clock of each runs in its own turns only. So neither slows the other's measured time down.

    Args:
        lanes (`int`): How many there are.
    """

    def __init__(self, lanes: int):
        self.seconds = [0.0] * lanes
        self._waiting = set(range(lanes))
        self._running: int | None = None
        self._changed = threading.Condition()
        self._since = 0.0

    def take(self, lane: int) -> None:
        """Wait for the first turn, or end a turn and wait for the next."""
        with self._changed:
            if self._running == lane:
                self._stop_clock(lane)
            self._waiting.add(lane)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._running is None and self._next() == lane)
            self._waiting.discard(lane)
            self._running, self._since = lane, time.perf_counter()

    def leave(self, lane: int) -> None:
        """End the last turn."""
        with self._changed:
            if self._running == lane:
                self._stop_clock(lane)
            self._waiting.discard(lane)
            self._changed.notify_all()

    def _stop_clock(self, lane: int) -> None:
        self.seconds[lane] += time.perf_counter() - self._since
        self._running = None

    def _next(self) -> int:
        return min(self._waiting, key=lambda lane: (self.seconds[lane], lane))


class Recorder(DraftStreamer):
    """Keeps what a reply has so far: its text in pieces with their origins, its tokens, and its finished rounds."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, self._note)
        self.pieces: list[tuple[str, Origin]] = []
        self.num_tokens = 0
        self.rounds: list[list[int]] = []  # drafted, verified, accepted and committed tokens of each; a copy or not

    def on_round(self, num_drafted: int, num_verified: int, num_accepted: int, is_copy: bool = False) -> None:
        super().on_round(num_drafted, num_verified, num_accepted, is_copy)
        self.rounds.append([num_drafted, num_verified, num_accepted, 0, is_copy])

    def put(self, value: torch.Tensor) -> None:
        if not self._in_prompt:
            self.num_tokens += value.numel()
            if self.rounds:
                self.rounds[-1][3] += value.numel()
        super().put(value)

    def _note(self, text: str, origin: Origin) -> None:
        self.pieces.append((text, origin))


class Lane:
    """
    One reply being written in a thread of its own.

    Args:
        pair (`Pair`): Who writes it.
        inputs (`dict`): The encoded prompt.
        drafted (`bool`): With the drafter, or plain.
        brake (`Brake`): What can end it early.
        **settings: Arguments of `generate`.
    """

    def __init__(self, pair: Pair, inputs: dict[str, torch.Tensor], drafted: bool, brake: Brake, **settings: Any):
        self.recorder = Recorder(pair.tokenizer)
        self.drafted = drafted
        self.brake = brake
        self.seconds = 0.0
        self.done = False
        self.ended = ""  # why it ended, if not of itself
        self.error: Exception | None = None
        self.ids: list[int] = []
        self._speculation: Speculation | None = None
        self._target = pair.target
        self._arguments = {
            **inputs,
            **settings,
            "streamer": self.recorder,
            "pad_token_id": pair.tokenizer.pad_token_id,
        }
        if drafted:
            self._arguments["assistant_model"] = pair.drafter

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.recorder.pieces)

    @property
    def target_forwards(self) -> int:
        """Forwards of the target so far, the prefill included."""
        return self.speculation.target_forwards if self.drafted else self.recorder.num_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.recorder.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def speculation(self) -> Speculation:
        """The statistics of the run; while it goes on, those of the rounds so far."""
        return self._speculation or count(self.recorder)

    def run(self, turns: Turns, number: int) -> None:
        """Write the reply, giving the processor up after each token if somebody else's turn has come."""
        turn = _EndOfTurn(turns, number)
        try:
            turns.take(number)
            output = self._target.generate(
                **self._arguments, stopping_criteria=[self.brake, turn], return_dict_in_generate=True
            )
            self.ended = self.brake.reason
            prompt_length = self._arguments["input_ids"].shape[1]
            self.ids = output.sequences[0, prompt_length:].tolist()
            self._speculation = getattr(output, "speculation", None)
        except Exception as error:  # shown to whoever waits for the reply
            self.error = error
        finally:
            turns.leave(number)
            self.seconds = turns.seconds[number]
            self.done = True


class _EndOfTurn(StoppingCriteria):
    """Stops nothing: criteria are what both decoding loops call at every token."""

    def __init__(self, turns: Turns, lane: int):
        self._turns, self._lane = turns, lane

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self._turns.take(self._lane)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def watch(lanes: list[Lane]) -> Iterator[None]:
    """
    Start the lanes and come back a few times a second, less often as the text grows, until all are done, once more at
    the end. Whoever leaves the loop early ends them.
    """
    turns = Turns(len(lanes))
    for lane in lanes:
        lane.brake.start()
    threads = [threading.Thread(target=lane.run, args=(turns, i), daemon=True) for i, lane in enumerate(lanes)]
    for thread in threads:
        thread.start()
    try:
        while not all(lane.done for lane in lanes):
            time.sleep(_frame(sum(lane.recorder.num_tokens for lane in lanes)))
            for number, lane in enumerate(lanes):
                lane.seconds = turns.seconds[number]
            yield
    finally:
        for lane in lanes:
            lane.brake.stop()
        for thread in threads:
            thread.join()
    for lane in lanes:
        if lane.error is not None:
            raise lane.error


def _frame(num_tokens: int) -> float:
    return min(FRAME * max(1.0, num_tokens / LONG_TEXT), SLOWEST_FRAME)


def encode(pair: Pair, messages: list[dict[str, str]], limit: int) -> tuple[dict[str, torch.Tensor], int]:
    """
    Turn a conversation into the target's inputs.

    Args:
        pair (`Pair`): Whose tokenizer.
        messages (`list[dict]`): The turns, oldest first; the last is to be answered.
        limit (`int`): Most tokens; the oldest turns are left out to keep it.

    Returns:
        The inputs, and how many messages were left out.

    Raises:
        PromptError: If the last message alone is empty or too long.
    """
    if not messages[-1]["content"].strip():
        raise PromptError("Write a message first.")
    for start in range(0, len(messages), 2):
        inputs = _tokenize(pair, messages[start:])
        if inputs["input_ids"].shape[1] <= limit:
            return {name: tensor.to(pair.target.device) for name, tensor in inputs.items()}, start
    raise PromptError(
        f"This message has {inputs['input_ids'].shape[1]:,} tokens, and {limit:,} is the most that this page takes. "
        "Shorten it."
    )


def _tokenize(pair: Pair, messages: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    if pair.tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in messages)
        encoded = pair.tokenizer(text, return_tensors="pt")
    elif pair.chat_template is not None:
        encoded = pair.tokenizer(pair.chat_template.render(messages), add_special_tokens=False, return_tensors="pt")
    else:
        encoded = pair.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def count(recorder: Recorder) -> Speculation:
    """The statistics of the rounds so far."""
    counted = count_rounds([list(recorder.rounds)])
    counted.generated_tokens, counted.target_forwards = recorder.num_tokens, 1 + len(recorder.rounds)
    return counted
