"""
The decoding loop. A round, a file a stage: the drafter takes in new features (`features.py`) and proposes, the
schedule picks how much to verify (`scheduling.py`), the target checks it in one forward and the outcome is committed
(`verification.py`), and the caches forget the rest (`cache.py`).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from ..models.drafter import Drafter
from .cache import forget_rejected, prepare_for_rollback
from .features import concatenate_features, hidden_state_indices
from .scheduling import verification_length
from .settings import SETTING_NAMES, DraftSettings, refuse_unsupported, resolve_settings
from .statistics import Speculation, SpeculativeOutput
from .verification import Decision, DraftDraw, verify_greedy, verify_in_order


def speculative_decoding(
    drafter: Drafter,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | list[str] | None = None,
    **settings: Any,
) -> Callable:
    """
    A decoding loop for `generate(custom_generate=...)`, for those who don't want `generate` hooked.

    transformers hands a custom loop neither streamer nor tokenizer, so they are given here.

    Args:
        drafter ([`Drafter`]): The drafter.
        streamer (`BaseStreamer`, *optional*): Receives the tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed by `stop_strings`.
        stop_strings (`str` or `list[str]`, *optional*): Strings that end the generation.
        **settings: `num_assistant_tokens`, `assistant_confidence_threshold`, `verification_schedule`; the drafter's
            own by default.

    Returns:
        `Callable`: for `custom_generate`.

    Raises:
        TypeError: If `drafter` is no drafter.
        ValueError: If a setting can't be honoured.

    Example:

    ```python
    >>> from hf_dspark import AutoDrafter, speculative_decoding

    >>> drafter = AutoDrafter.from_pretrained("my-drafter")  # doctest: +SKIP
    >>> target.generate(**inputs, custom_generate=speculative_decoding(drafter))  # doctest: +SKIP
    ```
    """
    if not isinstance(drafter, Drafter):
        raise TypeError(f"`drafter` must be a drafter, not a {type(drafter).__name__}; load it with `AutoDrafter`.")
    unknown = set(settings) - set(SETTING_NAMES)
    if unknown:
        raise ValueError(f"Unknown settings {sorted(unknown)}; known are {', '.join(SETTING_NAMES)}.")
    criteria = [] if stop_strings is None else [_stop_string_criteria(stop_strings, tokenizer)]
    return functools.partial(
        decode,
        drafter=drafter,
        settings=resolve_settings(drafter, settings, None),
        streamer=streamer,
        extra_criteria=criteria,
    )


def generate_with_drafter(original: Callable, target: PreTrainedModel, **arguments: Any) -> Any:
    """What `target.generate(..., assistant_model=drafter)` does: `original` with our loop as `custom_generate`."""
    drafter = arguments.pop("assistant_model")
    streamer, tokenizer = arguments.pop("streamer", None), arguments.pop("tokenizer", None)
    for name in ("custom_generate", "assistant_tokenizer", "synced_gpus"):
        if arguments.pop(name, None):
            raise ValueError(f"Decoding with a drafter does not support `{name}`. Leave it out.")
    config = arguments.get("generation_config")
    call = {name: arguments.pop(name) for name in SETTING_NAMES if name in arguments}
    settings = resolve_settings(drafter, call, config)
    if _effective("token_healing", arguments, config, target):
        raise ValueError("Decoding with a drafter does not support `token_healing`. Leave it out.")
    stop_strings = _effective("stop_strings", arguments, config, target)
    criteria = []
    if stop_strings is not None:
        criteria.append(_stop_string_criteria(stop_strings, tokenizer))
        arguments["stop_strings"] = None
    drafter.attach(target)
    loop = functools.partial(decode, drafter=drafter, settings=settings, streamer=streamer, extra_criteria=criteria)
    return original(target, custom_generate=loop, **arguments)


def _effective(name: str, call: dict[str, Any], config: GenerationConfig | None, target: PreTrainedModel) -> Any:
    """A generation option as `generate` will see it: the call's, then the passed config's, then the target's."""
    for value in (call.get(name), getattr(config, name, None), getattr(target.generation_config, name, None)):
        if value is not None:
            return value
    return None


def _stop_string_criteria(
    stop_strings: str | list[str], tokenizer: PreTrainedTokenizerBase | None
) -> StopStringCriteria:
    if tokenizer is None:
        raise ValueError("`stop_strings` needs the tokenizer: pass `tokenizer=` beside it.")
    return StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)


def decode(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter,
    settings: DraftSettings,
    streamer: BaseStreamer | None = None,
    extra_criteria: list[Any] | tuple = (),
    **model_kwargs: Any,
) -> SpeculativeOutput | torch.Tensor:
    """The loop that transformers' `generate` calls in place of its own, with inputs prepared."""
    refuse_unsupported(target, input_ids, generation_config, model_kwargs)
    drafter.attach(target)
    criteria = StoppingCriteriaList([*stopping_criteria, *extra_criteria])
    run = _Run(target, drafter, settings, input_ids, logits_processor, criteria, generation_config, streamer)
    training = drafter.training
    drafter.eval()
    try:
        with torch.no_grad(), run.speculation.timed("total", target.device):
            run.prefill(model_kwargs)
            while not run.is_done:
                run.round()
    finally:
        drafter.train(training)
    if streamer is not None:
        streamer.end()
    return run.output()


class _Run:
    """State of one generation: the committed tokens, both caches, and what is counted and recorded."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        settings: DraftSettings,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self.target, self.drafter, self.settings = target, drafter, settings
        self.input_ids, self.processor, self.criteria, self.config = input_ids, logits_processor, criteria, config
        self.streamer = streamer
        self.layers = drafter.config.target_layer_ids
        self.draw = DraftDraw(logits_processor, config.do_sample)
        self.draft_cache = drafter.new_cache()
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.speculation = Speculation()
        self.keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.scores = () if self.keeps_scores else None
        self.logits = () if config.return_dict_in_generate and config.output_logits else None
        self.is_done = False

    # ------------------------------------------------------------------ stages

    def prefill(self, model_kwargs: dict[str, Any]) -> None:
        """The target's forward over the prompt; its token is the first anchor."""
        if self.streamer is not None:
            self.streamer.put(self.input_ids.cpu())
        self.model_kwargs = {**model_kwargs, "output_hidden_states": hidden_state_indices(self.layers)}
        inputs = self.target.prepare_inputs_for_generation(
            self.input_ids, is_first_iteration=True, **self.model_kwargs
        )
        outputs = self._forward(inputs)
        prepare_for_rollback(outputs.cache)
        features = concatenate_features(outputs.hidden_states, self.layers)
        mask = self.model_kwargs.get("attention_mask")
        prompt = self.input_ids
        if mask is not None and bool(mask.any()):
            # Padding is no context: the drafter counts positions from the first real token.
            real = mask[0].bool()
            features, prompt = features[:, real], prompt[:, real]
        self.commit(self._verify(outputs.logits[0, -1:].float(), self.input_ids, None, 0), outputs.logits[0, -1:])
        self._keep(outputs, 1)
        self.pending = (features, torch.cat([prompt[:, 1:], self.input_ids[:, -1:]], dim=1))

    def round(self) -> None:
        """Draft, schedule, verify, commit."""
        budget = self.config.max_length - self.input_ids.shape[1]
        proposal = self.propose(min(self.settings.num_drafts, budget - 1))
        num_verified = 0 if proposal is None else verification_length(self.settings, proposal)
        drafts = self.input_ids[:, :0] if proposal is None else proposal.tokens[:, :num_verified]
        candidates = torch.cat([self.input_ids, drafts.to(self.input_ids.device)], dim=1)
        outputs = self.check(candidates, num_verified)
        logits = outputs.logits[0, -num_verified - 1 :]
        probabilities = None if proposal is None else proposal.probabilities
        decisions = self._verify(logits.float(), candidates, probabilities, num_verified)
        num_proposed = 0 if proposal is None else proposal.tokens.shape[1]
        num_accepted, committed = self.commit(decisions, logits, num_proposed)
        forget_rejected(outputs.cache, num_verified, committed)
        self.speculation.record_round(num_proposed, num_verified, num_accepted, committed)
        self._keep(outputs, committed)
        features = concatenate_features(outputs.hidden_states, self.layers)[:, :committed]
        self.pending = (features, self.input_ids[:, -committed:])

    def propose(self, num_drafts: int) -> Any:
        """Lets the drafter take in what was committed since, and draft; `None` if there is room for no draft."""
        if num_drafts < 1:
            return None
        with self.speculation.timed("draft", self.drafter.device):
            device = self.drafter.device
            self.drafter.extend(self.draft_cache, *(part.to(device) for part in self.pending))
            self.draw.prefix = self.input_ids
            anchors = self.input_ids[:, -1].to(device)
            draw = self.draw if self.draw.is_needed else None
            return self.drafter.propose(self.draft_cache, anchors, num_drafts, draw)

    def check(self, candidates: torch.Tensor, num_verified: int) -> Any:
        """The target's forward over the anchor and the drafts to verify."""
        kwargs = dict(self.model_kwargs)
        if num_verified:
            kwargs = self.target._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=num_verified)
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = num_verified + 1
        inputs = self.target.prepare_inputs_for_generation(
            candidates, next_sequence_length=num_verified + 1, is_first_iteration=False, **kwargs
        )
        return self._forward(inputs)

    def commit(
        self, decisions: Iterator[Decision], logits: torch.Tensor, num_proposed: int | None = None
    ) -> tuple[int, int]:
        """
        Appends the decided tokens one by one, until a criterion stops: everyone who watches (processors, criteria,
        streamer, scores) sees what plain decoding would have shown, in that order. Returns how many of the appended
        tokens were drafts, and how many were appended in all.
        """
        # Only a streamer that wants to know of a round before its tokens gets them when the round is over.
        waits = num_proposed is not None and hasattr(self.streamer, "on_round")
        num_accepted, tokens = 0, []
        for k, decision in enumerate(decisions):
            if self.scores is not None:
                self.scores += (decision.scores,)
            if self.logits is not None:
                self.logits += (logits[k : k + 1].float(),)
            token = decision.token.to(self.input_ids.device).view(1)
            self.input_ids = torch.cat([self.input_ids, token[None]], dim=1)
            num_accepted += decision.is_draft
            tokens.append(token)
            self.is_done = bool(self.criteria(self.input_ids, self.scores))
            if self.streamer is not None and not waits:
                self.streamer.put(token.cpu())
            if self.is_done:
                break
        if waits:
            self.streamer.on_round(num_proposed, num_accepted)
            for token in tokens:
                self.streamer.put(token.cpu())
        self.speculation.generated_tokens += len(tokens)
        return num_accepted, len(tokens)

    # ------------------------------------------------------------------ helpers

    def _forward(self, inputs: dict[str, Any]) -> Any:
        self.speculation.target_forwards += 1
        with self.speculation.timed("target", self.target.device):
            return self.target(**inputs, return_dict=True)

    def _verify(
        self, logits: torch.Tensor, candidates: torch.Tensor, probabilities: torch.Tensor | None, num_drafts: int
    ) -> Iterator[Decision]:
        logits = logits.to(candidates.device)
        if not self.config.do_sample and not self.processor and not self.keeps_scores:
            return verify_greedy(logits, candidates[0, candidates.shape[1] - num_drafts :])
        q = None if probabilities is None else probabilities[0].to(logits.device)
        return verify_in_order(logits, candidates, num_drafts, self.processor, q, self.config.do_sample)

    def _keep(self, outputs: Any, num_committed: int) -> None:
        self.model_kwargs = self.target._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, num_new_tokens=num_committed
        )

    def output(self) -> SpeculativeOutput | torch.Tensor:
        """What `generate` returns."""
        if not self.config.return_dict_in_generate:
            return self.input_ids
        return SpeculativeOutput(
            sequences=self.input_ids,
            scores=self.scores,
            logits=self.logits,
            cache=self.model_kwargs.get("cache"),
            speculation=self.speculation,
        )
