"""The page. `python app.py` runs it; `settings.py` tells what can be set."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafting
import gradio as gr
import views
from chat import Chat
from pair_choice import PairChoice, up_to
from pairs import Pair, Pairs
from race import Race
from settings import Settings
from simulator import Load, simulate
from theme import page_theme
from work import MESSAGE_CHARACTERS


QUESTIONS = (
    "A baker makes 24 rolls in the morning and twice as many in the afternoon. She sells 50. How many are left?",
    "Solve 3x + 7 = 22 step by step.",
    "Explain to a ten-year-old why the sky is blue.",
)
# A region that screen readers follow must stay in the page while its words change.
LIVE_REGION = "element.setAttribute('role', 'status'); element.setAttribute('aria-live', 'polite');"
# Handlers are for the page; a script is better served by the library.
QUIET = {"show_progress": "hidden", "api_visibility": "private"}


def build(settings: Settings, pairs: Pairs) -> gr.Blocks:
    """
    The page.

    Args:
        settings (`Settings`): The Space's settings.
        pairs (`Pairs`): The models.
    """
    chat, race = Chat(settings, pairs), Race(settings, pairs)
    with gr.Blocks(title=settings.title, analytics_enabled=False) as blocks:
        part = _layout(settings, pairs.own)
        _connect(part, chat, race, PairChoice(pairs))
        # Said once the page can take a message: what is pressed before that is lost.
        blocks.load(lambda: "Ready.", None, part["status"], queue=False, **QUIET)
        blocks.unload(chat.leave)
        blocks.unload(race.leave)
    return blocks.queue(max_size=settings.queue_size, default_concurrency_limit=settings.concurrency)


def _layout(settings: Settings, pair: Pair) -> dict[str, Any]:
    """Place every component; they are known by name from here on."""
    part: dict[str, Any] = {"messages": gr.State([]), "key": gr.State(None), "runs": gr.State([])}
    gr.HTML(views.heading(settings.title))
    part["pair_line"] = gr.HTML(views.pair_line(pair))
    part["status"] = gr.HTML("", elem_id="status", js_on_load=LIVE_REGION)
    with gr.Row(elem_id="main"):
        with gr.Column(scale=7, min_width=320), gr.Tabs():
            with gr.Tab("Chat", id="chat") as part["chat_tab"]:
                _chat_tab(part)
            with gr.Tab("Race", id="race") as part["race_tab"]:
                _race_tab(part)
            with gr.Tab("Under load", id="load") as part["load_tab"]:
                _load_tab(pair)
            with gr.Tab("Your drafter", id="pair") as part["pair_tab"]:
                _pair_tab(part, settings)
        with gr.Column(scale=4, min_width=300, elem_id="side") as part["side"]:
            _side(part, settings, pair)
    return part


def _chat_tab(part: dict[str, Any]) -> None:
    gr.HTML(views.legend())
    part["conversation"] = gr.HTML(
        views.conversation([]), elem_id="conversation", min_height=260, max_height=520, autoscroll=True
    )
    part["notice"] = gr.HTML("", elem_id="notice")
    part["box"] = gr.Textbox(
        label="Message",
        placeholder="Write a message",
        info="Enter sends, Shift and Enter begin a new line.",
        lines=1,
        max_lines=8,
        max_length=MESSAGE_CHARACTERS,
        elem_id="message",
    )
    with gr.Row(elem_classes="buttons"):
        part["send"] = gr.Button("Send", variant="primary", size="md", min_width=90, elem_id="send")
        part["stop_chat"] = gr.Button("Stop", size="md", min_width=90, elem_id="stop-chat")
        part["clear"] = gr.Button("Clear", size="md", min_width=90, elem_id="clear")
    with gr.Row(elem_classes="examples"):
        for question in QUESTIONS:
            gr.Button(question, size="sm", min_width=180).click(
                lambda question=question: question, None, part["box"], queue=False, api_visibility="private"
            )
    gr.HTML("<h2 class='small'>Replies so far</h2>")
    part["runs_table"] = gr.HTML(views.runs_table([]), elem_id="runs")


def _race_tab(part: dict[str, Any]) -> None:
    gr.HTML(
        "<p class='intro'>The same prompt, decoded twice by the same target, greedily. The two take turns on one "
        "processor, and each has a clock that runs in its own turns only.</p>"
    )
    part["prompt"] = gr.Textbox(
        label="Prompt", value=QUESTIONS[0], lines=1, max_lines=8, max_length=MESSAGE_CHARACTERS, elem_id="prompt"
    )
    with gr.Row(elem_classes="buttons"):
        part["start"] = gr.Button("Start the race", variant="primary", size="md", min_width=90, elem_id="start")
        part["stop_race"] = gr.Button("Stop", size="md", min_width=90, elem_id="stop-race")
    gr.HTML(views.legend())
    part["race"] = gr.HTML(views.race(None, None), elem_id="race")


def _load_tab(pair: Pair) -> None:
    gr.HTML(
        "<p class='intro'>A server decodes many requests in one batch. How many drafts of each should the target "
        "check? This simulates such a batch, and asks the throughput schedule of hf-dspark in every round.</p>"
    )
    with gr.Row(elem_id="simulator"):
        with gr.Column(scale=4, min_width=260):
            sliders = [
                gr.Slider(1, 64, value=16, step=1, label="Requests in the batch", elem_id="requests"),
                gr.Slider(1, 15, value=min(pair.num_drafts, 15), step=1, label="Drafts a request"),
                gr.Slider(
                    0.3,
                    0.95,
                    value=0.75,
                    step=0.05,
                    label="Acceptance",
                    info="How likely a draft is right, on average.",
                ),
                gr.Slider(
                    1, 512, value=64, step=1, label="Free tokens", info="A step computes as many in the time of one."
                ),
                gr.Slider(
                    0,
                    0.5,
                    value=0.1,
                    step=0.05,
                    label="Cost of drafting",
                    info="In steps of the target, for all requests.",
                ),
            ]
        with gr.Column(scale=6, min_width=300):
            shown = gr.HTML(_simulated(*(slider.value for slider in sliders)), elem_id="simulated")
    for slider in sliders:
        slider.change(_simulated, sliders, shown, queue=False, trigger_mode="always_last", **QUIET)


def _simulated(rows: int, drafts: int, acceptance: float, free_tokens: int, draft_cost: float) -> str:
    load = Load(
        rows=int(min(max(rows, 1), 64)),
        drafts=int(min(max(drafts, 1), 15)),
        acceptance=acceptance,
        free_tokens=max(int(free_tokens), 1),
        draft_cost=max(draft_cost, 0.0),
    )
    return views.simulation(load, simulate(load))


def _pair_tab(part: dict[str, Any], settings: Settings) -> None:
    limit = settings.download_limit_gb
    gr.HTML(
        "<p class='intro'>Any DSpark, DFlash or EAGLE-3 drafter that is public on the Hub, in the formats of "
        "hf-dspark, DeepSpec, speculators, SpecForge, SGLang or z-lab. Weights are read from safetensors files only, "
        f"code in a repository is never run, and each of the two may have {limit:g} GB at most.</p>"
        if limit
        else "<p class='intro'>This Space shows its own pair only. Duplicate it to try others.</p>"
    )
    part["drafter_id"] = gr.Textbox(
        label="Drafter", placeholder="user/drafter", max_length=200, interactive=bool(limit), elem_id="drafter-id"
    )
    part["target_id"] = gr.Textbox(
        label="Target",
        placeholder="user/target",
        info="Leave it empty if the drafter names its target.",
        max_length=200,
        interactive=bool(limit),
        elem_id="target-id",
    )
    with gr.Row(elem_classes="buttons"):
        part["load"] = gr.Button(
            "Load", variant="primary", size="md", min_width=90, interactive=bool(limit), elem_id="load"
        )
        part["reset"] = gr.Button("Back to this Space's pair", size="md", min_width=90, elem_id="reset")
    part["pair_notice"] = gr.HTML("", elem_id="pair-notice")


def _side(part: dict[str, Any], settings: Settings, pair: Pair) -> None:
    schedules = drafting.schedules(pair)
    longest = settings.max_new_tokens
    gr.HTML("<h2 class='small'>Drafting</h2>")
    part["schedule"] = gr.Radio(
        schedules, value=schedules[0][1], label="Schedule", info="Which drafts the target checks.", elem_id="schedule"
    )
    part["threshold"] = gr.Slider(
        0, 1, value=0.5, step=0.05, label="Least confidence", interactive=False, elem_id="threshold"
    )
    part["drafts"] = gr.Slider(
        value=pair.num_drafts, label="Drafts a round", elem_id="drafts", **up_to(pair.num_drafts)
    )
    part["temperature"] = gr.Slider(
        0, 1.5, value=0, step=0.1, label="Temperature", info="Chat only; 0 takes the likeliest token.", elem_id="temp"
    )
    part["length"] = gr.Slider(
        value=min(128, longest), label="Longest reply, in tokens", elem_id="length", **up_to(longest)
    )
    gr.HTML("<h2 class='small'>What came of it</h2>")
    part["measures"] = gr.HTML(views.measures(None, pair.num_drafts), elem_id="measures")


# ---------------------------------------------------------------------- events


def _connect(part: dict[str, Any], chat: Chat, race: Race, choice: PairChoice) -> None:
    def listen(trigger: Callable, handler: Callable, inputs: list[str], outputs: list[str], **options: Any) -> Any:
        components = [part[name] for name in inputs], [part[name] for name in outputs]
        return trigger(_by_component(handler, part), *components, **QUIET, **options)

    chosen = ["schedule", "threshold", "drafts"]
    writing = {"concurrency_id": "writing", "concurrency_limit": chat.settings.concurrency}
    talk = ["messages", "conversation", "notice", "status"]
    for trigger in (part["send"].click, part["box"].submit):
        taken = listen(trigger, chat.take, ["box", "messages"], ["box", *talk], queue=False)
        inputs = ["messages", "key", "runs", *chosen, "temperature", "length"]
        reply = listen(taken.then, chat.reply, inputs, ["box", *talk, "measures", "runs", "runs_table"], **writing)
        listen(reply.failure, chat.refused, ["messages"], ["box", *talk], queue=False)
    listen(part["stop_chat"].click, chat.stop, [], ["status"], queue=False)
    listen(part["clear"].click, chat.clear, [], talk, queue=False)

    for trigger in (part["start"].click, part["prompt"].submit):
        taken = listen(trigger, race.take, ["prompt"], ["race", "status"], queue=False)
        inputs = ["prompt", "key", *chosen, "length"]
        run = listen(taken.then, race.run, inputs, ["race", "measures", "status"], **writing)
        listen(run.failure, race.refused, [], ["race", "status"], queue=False)
    listen(part["stop_race"].click, race.stop, [], ["status"], queue=False)

    shown = ["pair_line", "schedule", "threshold", "drafts", "measures", "key", "pair_notice", "status"]
    listen(part["load"].click, choice.load, ["target_id", "drafter_id"], shown, concurrency_limit=1)
    listen(part["reset"].click, choice.reset, [], shown, queue=False)
    for name in ("chat_tab", "race_tab", "load_tab", "pair_tab"):
        uses_drafting = name in ("chat_tab", "race_tab")
        part[name].select(
            lambda visible=uses_drafting: gr.Column(visible=visible), None, part["side"], queue=False, **QUIET
        )
    part["schedule"].change(
        lambda schedule: gr.Slider(interactive=schedule == "confidence"),
        part["schedule"],
        part["threshold"],
        queue=False,
        **QUIET,
    )


def _by_component(handler: Callable, part: dict[str, Any]) -> Callable:
    """A handler that speaks of components by name, as gradio wants it."""

    def translated(values: dict[str, Any]) -> dict[Any, Any]:
        return {part[name]: value for name, value in values.items()}

    if inspect.isgeneratorfunction(handler):

        @functools.wraps(handler)
        def streaming(*args: Any) -> Any:
            for values in handler(*args):
                yield translated(values)

        return streaming

    @functools.wraps(handler)
    def answering(*args: Any) -> Any:
        return translated(handler(*args))

    return answering


def launch(blocks: gr.Blocks, **options) -> str:
    """Serve the page; returns its address."""
    style = Path(__file__).parent / "style.css"
    return blocks.launch(theme=page_theme(), css_paths=style, footer_links=["gradio"], ssr_mode=False, **options)[1]


def main() -> None:
    settings = Settings.from_environment()
    launch(build(settings, Pairs(settings)))


if __name__ == "__main__":
    main()
