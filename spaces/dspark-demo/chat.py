"""The chat's handlers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr
import views
from drafting import SCHEDULES, drafting, sampling
from replies import Lane, encode, watch
from views import Message
from work import CROWDED, Work, explained


RUNS_SHOWN = 6


class Chat(Work):
    """A conversation whose replies show where each token came from."""

    def take(self, text: str, messages: list[Message], request: gr.Request) -> dict[str, Any]:
        """Take a message in, at once; the reply waits in the queue."""
        if problem := self.begin(text, request.session_hash):
            return {"notice": views.notice(problem, "error"), "status": problem}
        messages = [*messages, Message("user", [(text, "plain")])]
        waiting = [*messages, Message("assistant", writing=True)]
        return {
            "box": "",
            "messages": messages,
            "conversation": views.conversation(waiting),
            "notice": "",
            "status": "Waiting for the model.",
        }

    def reply(
        self,
        messages: list[Message],
        key: tuple[str, str] | None,
        runs: list[dict[str, str]],
        schedule: str,
        threshold: float,
        drafts: int,
        temperature: float,
        max_new_tokens: int,
        request: gr.Request,
    ) -> Iterator[dict[str, Any]]:
        """Write the reply to the last message."""
        brake = self.claim(request)
        if brake is None:
            return
        try:
            pair = self.pairs.get(key)
            asked = [{"role": message.role, "content": message.text} for message in messages]
            inputs, left_out = encode(pair, asked, self.settings.max_prompt_tokens)
            arguments = drafting(pair, schedule, threshold, drafts)
            lane = Lane(pair, inputs, True, brake, **arguments, **sampling(temperature), **self.length(max_new_tokens))
            for _ in watch([lane]):
                growing = Message("assistant", list(lane.recorder.pieces), writing=True)
                yield {
                    "conversation": views.conversation([*messages, growing]),
                    "measures": views.measures(lane.speculation, pair.num_drafts),
                    "status": "The model is writing.",
                }
            if brake.is_unwanted:
                # A picture of the reply may have come in after the page was cleared.
                yield {"messages": [], "conversation": views.conversation([])}
                return
            messages = [*messages, Message("assistant", lane.recorder.pieces, _note(lane, left_out))]
            runs = [_run_row(lane, arguments, temperature), *runs][:RUNS_SHOWN]
            yield {
                "messages": messages,
                "conversation": views.conversation(messages),
                "measures": views.measures(lane.speculation, pair.num_drafts),
                "runs": runs,
                "runs_table": views.runs_table(runs),
                "status": f"{lane.ended or 'Finished'}. The model wrote: {lane.text}",
            }
        except Exception as error:
            yield _given_back(messages, explained(error))
        finally:
            self.release(request)

    def refused(self, messages: list[Message], request: gr.Request) -> dict[str, Any]:
        """The queue did not take the message: give it back."""
        self.release(request)
        return _given_back(messages, f"{CROWDED} Your message is in the box again.")

    def clear(self, request: gr.Request) -> dict[str, Any]:
        self.stop(request, unwanted=True)
        return {"messages": [], "conversation": views.conversation([]), "notice": "", "status": "New conversation."}


def _given_back(messages: list[Message], problem: str) -> dict[str, Any]:
    """The last message is in the box again, and out of the conversation."""
    return {
        "box": messages[-1].text if messages else "",
        "messages": messages[:-1],
        "conversation": views.conversation(messages[:-1]),
        "notice": views.notice(problem, "error"),
        "status": problem,
    }


def _note(lane: Lane, left_out: int) -> str:
    run = lane.speculation
    copied = f" and {run.copied_accepted} copied from the text" if run.copied_accepted else ""
    parts = [
        f"{lane.recorder.num_tokens} tokens in {lane.seconds:.1f} s, {lane.tokens_per_second:.1f} a second",
        f"{sum(run.accepted)} of them guessed{copied}, {run.target_forwards} forwards of the target",
    ]
    if left_out:
        parts.append(f"the first {left_out} messages were left out, the conversation is too long")
    return "; ".join(parts) + "." + (f" {lane.ended}." if lane.ended else "")


def _run_row(lane: Lane, arguments: dict[str, Any], temperature: float) -> dict[str, str]:
    run = lane.speculation
    threshold = arguments.get("assistant_confidence_threshold")
    return {
        "Schedule": SCHEDULES[arguments["verification_schedule"]],
        "Drafts": str(arguments["num_assistant_tokens"]),
        "Confidence": "–" if threshold is None else f"{threshold:.2f}",
        "Temperature": f"{temperature:g}",
        "Tokens": str(lane.recorder.num_tokens),
        "Tokens per forward": f"{run.tokens_per_forward:.2f}",
        "Accepted length": f"{run.mean_accepted_length:.2f}",
        "Checked a round": f"{run.mean_verified:.2f}" if run.rounds else "–",
        "Tokens a second": f"{lane.tokens_per_second:.1f}",
    }
