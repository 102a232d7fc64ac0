"""The race's handlers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr
import views
from drafting import drafting
from pairs import Pair
from replies import Lane, encode, watch
from work import CROWDED, Work, explained


class Race(Work):
    """One prompt decoded twice, plain and with the drafter."""

    def take(self, text: str, request: gr.Request) -> dict[str, Any]:
        """Answer at once; the race waits in the queue."""
        if problem := self.begin(text, request.session_hash):
            return _failed(problem)
        return {"race": views.race(None, None, views.notice("Waiting for the model.")), "status": "Waiting."}

    def run(
        self,
        text: str,
        key: tuple[str, str] | None,
        schedule: str,
        threshold: float,
        drafts: int,
        max_new_tokens: int,
        request: gr.Request,
    ) -> Iterator[dict[str, Any]]:
        """Write one reply twice, by turns, always greedily, so that the two can be compared."""
        brake = self.claim(request)
        if brake is None:
            return
        try:
            pair = self.pairs.get(key)
            inputs, _ = encode(pair, [{"role": "user", "content": text}], self.settings.max_prompt_tokens)
            shared = {"do_sample": False, **self.length(max_new_tokens)}
            plain = Lane(pair, inputs, False, brake, **shared)
            drafted = Lane(pair, inputs, True, brake, **shared, **drafting(pair, schedule, threshold, drafts))
            for _ in watch([plain, drafted]):
                yield {
                    "race": views.race(plain, drafted),
                    "measures": views.measures(drafted.speculation, pair.num_drafts),
                    "status": "The race is on.",
                }
            verdict, kind = _verdict(plain, drafted, pair)
            yield {
                "race": views.race(plain, drafted, views.notice(verdict, kind)),
                "measures": views.measures(drafted.speculation, pair.num_drafts),
                "status": verdict,
            }
        except Exception as error:
            yield _failed(explained(error))
        finally:
            self.release(request)

    def refused(self, request: gr.Request) -> dict[str, Any]:
        """The queue did not take the race."""
        self.release(request)
        return _failed(CROWDED)


def _failed(problem: str) -> dict[str, Any]:
    return {"race": views.race(None, None, views.notice(problem, "error")), "status": problem}


def _verdict(plain: Lane, drafted: Lane, pair: Pair) -> tuple[str, str]:
    """What came of a race, and what kind of notice that is."""
    both = min(len(plain.ids), len(drafted.ids))
    same = next((k for k in range(both) if plain.ids[k] != drafted.ids[k]), both)
    shorter, longer = sorted((plain, drafted), key=lambda lane: len(lane.ids))
    # A text that ended of itself goes no further in the other lane either.
    if same < both or (len(longer.ids) > both and not shorter.ended):
        first = same + 1
        if pair.target.dtype.is_floating_point and pair.target.dtype.itemsize < 4:
            return f"The texts part at token {first}: {pair.place} rounds, so near-ties can change places.", "info"
        return f"The texts part at token {first}. In float32 that must not happen: please report it.", "error"
    if ended := plain.ended or drafted.ended:
        return f"{ended}. As far as both got ({both} tokens), the text is the same.", "info"
    saved = f"Same text, all {both} tokens, in {drafted.target_forwards} forwards of the target instead of {both}."
    ratio = drafted.tokens_per_second / plain.tokens_per_second
    words = f"{saved} Speed: {ratio:.2f} times plain decoding."
    if ratio < 1:
        words += (
            " Not faster on this machine, where a forward over several tokens costs much more than one over a single "
            "token. Fewer drafts a round may help."
        )
    return words, "good"
