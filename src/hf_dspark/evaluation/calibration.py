"""Whether confidences mean what they say, and the temperatures that make them do so."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.logging import tqdm

from ..generation.confidence import calibrated
from ..models.drafter import Drafter
from ..prompts import prompt_of


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..generation.statistics import Speculation


logger = logging.get_logger(__name__)

ECE_BINS = 15
# A temperature is fitted where at least so many rounds got to the position: 100 tell an acceptance rate to about 0.05,
# and with fewer the search follows chance.
FEWEST_ROUNDS = 100
# Temperatures that are tried at each position: 1/8 to 8, in equal factors, 1 among them.
GRID = tuple(2 ** (i / 16) for i in range(-48, 49))


def expected_calibration_error(
    predicted: torch.Tensor | Sequence[float], observed: torch.Tensor | Sequence[float], bins: int = ECE_BINS
) -> float:
    """
    How far predicted probabilities are from observed frequencies: their distance in each of `bins` equal bins of
    [0, 1], weighted by how many predictions fall into it.

    Args:
        predicted (`torch.Tensor` of shape `(n,)`): Predicted probabilities.
        observed (`torch.Tensor` of shape `(n,)`): What happened, 0 or 1.
        bins (`int`, *optional*, defaults to 15): Number of bins.

    Returns:
        `float`: between 0 and 1; `nan` without a prediction.

    Example:

    ```python
    >>> from hf_dspark.evaluation.calibration import expected_calibration_error

    >>> round(expected_calibration_error([0.75, 0.75, 0.75, 0.75], [1, 1, 0, 0]), 2)
    0.25
    ```
    """
    counts, predictions, outcomes = _bin_means(predicted, observed, bins)
    if not counts.sum():
        return float("nan")
    return float((counts * (predictions - outcomes).abs()).nansum() / counts.sum())


def roc_auc(scores: torch.Tensor | Sequence[float], labels: torch.Tensor | Sequence[float]) -> float:
    """
    Area under the ROC curve: how often a positive case has the higher score than a negative one, equal scores counting
    half.

    Args:
        scores (`torch.Tensor` of shape `(n,)`): Scores.
        labels (`torch.Tensor` of shape `(n,)`): 1 for positive cases, 0 for negative ones.

    Returns:
        `float`: 0.5 is chance; `nan` if all cases are of one kind.

    Example:

    ```python
    >>> from hf_dspark.evaluation.calibration import roc_auc

    >>> roc_auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
    0.75
    ```
    """
    scores, positive = _flat(scores), _flat(labels) > 0.5
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return float("nan")
    _, place, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    # Equal scores share the mean of their ranks.
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2
    return float((ranks[place][positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def fit_temperatures(
    confidences: torch.Tensor,
    accepted: torch.Tensor,
    held_out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[float]:
    """
    Sequential temperature scaling (DSpark paper): position by position, the temperature with which the predicted
    survival of the prefix is closest to what was observed, those before it fixed. The order of confidences within a
    position stays. A position that fewer than 100 rounds got to keeps 1.

    Args:
        confidences (`torch.FloatTensor` of shape `(rounds, drafts)`): As the drafter gave them, in rounds that
            verified the whole block: others were selected by the very confidence.
        accepted (`torch.Tensor` of shape `(rounds, drafts)`): Whether a draft and all before it were accepted.
        held_out (`tuple[torch.Tensor, torch.Tensor]`, *optional*): The same of other rounds. A temperature that does
            no better on them than 1 is not taken.

    Returns:
        `list[float]`: one a draft position.

    Example:

    ```python
    >>> import torch
    >>> from hf_dspark.evaluation.calibration import fit_temperatures

    >>> boasts = torch.full((100, 1), 0.9)
    >>> temperatures = fit_temperatures(boasts, torch.arange(100)[:, None] < 60)
    >>> round(float(torch.sigmoid(torch.logit(torch.tensor(0.9)) / temperatures[0])), 1)
    0.6
    ```
    """
    temperatures: list[float] = []
    for reached in rounds_reaching(accepted):
        fitted = 1.0
        if reached >= FEWEST_ROUNDS:
            errors = _errors(confidences, accepted, temperatures, GRID)
            # Of equally good ones, the one that changes least.
            fitted = GRID[min(range(len(GRID)), key=lambda i: (errors[i], abs(i - len(GRID) // 2)))]
        if held_out is not None and fitted != 1.0:
            with_it, without = _errors(*held_out, temperatures, (fitted, 1.0))
            fitted = fitted if with_it < without else 1.0
        temperatures.append(fitted)
    return temperatures


def rounds_reaching(accepted: torch.Tensor) -> list[int]:
    """Per draft position, the rounds `(rounds, drafts)` that accepted everything before it."""
    return [len(accepted), *accepted[:, :-1].sum(0).tolist()]


def _errors(
    confidences: torch.Tensor, accepted: torch.Tensor, before: Sequence[float], tried: Sequence[float]
) -> list[float]:
    """Calibration errors of the position behind those that have a temperature already, with each of `tried`."""
    k = len(before)
    logits = torch.logit(confidences[:, : k + 1].double())
    prefix = torch.sigmoid(logits[:, :k] / torch.tensor(before, dtype=torch.float64)).prod(1)
    return [expected_calibration_error(prefix * torch.sigmoid(logits[:, k] / t), accepted[:, k]) for t in tried]


@dataclass
class Calibration:
    """
    What a calibration found, measured on prompts that it was not fitted on; they only decided, for each position,
    between the fitted temperature and 1.

    Args:
        temperatures (`list[float]`): One a draft position.
        sampling_temperature (`float`): At which the rounds were decoded; 0 is greedy.
        fitted_rounds (`int`): Rounds that the temperatures were fitted on.
        confidences (`torch.FloatTensor` of shape `(rounds, drafts)`): The drafter's, of the held-out rounds.
        accepted (`torch.BoolTensor` of shape `(rounds, drafts)`): Whether a draft and all before it were accepted.
    """

    temperatures: list[float]
    sampling_temperature: float
    fitted_rounds: int
    confidences: torch.Tensor
    accepted: torch.Tensor

    @property
    def survival(self) -> dict[str, torch.Tensor]:
        """Predicted survival `(rounds, drafts)` before and after."""
        return {
            "before": self.confidences.cumprod(1),
            "after": calibrated(self.confidences, self.temperatures).cumprod(1),
        }

    def errors(self, when: str) -> list[float]:
        """Expected calibration error of each position, `"before"` or `"after"`."""
        return self._per_position(expected_calibration_error, when)

    def aucs(self, when: str) -> list[float]:
        """ROC-AUC of each position, `"before"` or `"after"`."""
        return self._per_position(roc_auc, when)

    def _per_position(self, measure: Any, when: str) -> list[float]:
        return [measure(*columns) for columns in zip(self.survival[when].T, self.accepted.T)]

    def plot(self) -> "Figure":
        """Reliability diagrams before and after (DSpark paper, figure 6)."""
        from .plots import reliability_diagram

        return reliability_diagram(self.survival, self.accepted)


def calibrate_confidence(
    target: PreTrainedModel,
    drafter: Drafter,
    dataset: Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    held_out: float = 0.25,
    progress: bool = True,
) -> Calibration:
    """
    Fits `confidence_temperatures` on real decoding rounds and stores them, with the sampling temperature of the fit,
    in `drafter.generation_config`, so that `save_pretrained` keeps them with the checkpoint.

    Acceptance differs between greedy decoding and sampling: calibrate with the temperature that will be used.
    Positions with too few rounds, and those where the fit does no better on the held-out prompts, keep temperature 1,
    with a warning.

    Args:
        target (`PreTrainedModel`): The target.
        drafter ([`Drafter`]): The drafter, with a confidence head or without.
        dataset (`Iterable[dict]`): Prompts: `prompt` (text, or messages), `messages` or `turns` (the user's messages,
            of which the first counts).
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        temperature (`float`, *optional*, defaults to 0.0): Sampling temperature; 0 is greedy.
        max_new_tokens (`int`, *optional*, defaults to 128): New tokens for each prompt.
        held_out (`float`, *optional*, defaults to 0.25): Share of the prompts, at least one, that is measured on.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

    Returns:
        [`Calibration`]: the temperatures, and errors before and after.

    Raises:
        ValueError: If an argument makes no sense, an example holds no prompt, there are fewer than two, or their
            answers are too short for a whole round.

    Example:

    ```python
    >>> from hf_dspark import calibrate_confidence

    >>> found = calibrate_confidence(target, drafter, dataset, tokenizer)  # doctest: +SKIP
    >>> found.errors("before"), found.errors("after")  # doctest: +SKIP
    >>> drafter.save_pretrained("my-drafter")  # doctest: +SKIP
    ```
    """
    prompts = list(dataset)
    if not 0 <= temperature < math.inf:
        raise ValueError(f"`temperature` must be at least 0 and finite, got {temperature}.")
    measured = min(max(1, round(held_out * len(prompts))), len(prompts) - 1)
    if len(prompts) < 2 or not 0 < held_out < 1:
        raise ValueError(
            f"Calibration fits on some prompts and measures on others: it needs at least two, got {len(prompts)}, and "
            f"`held_out` between 0 and 1, got {held_out}."
        )
    settings = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    settings |= {"temperature": temperature} if temperature > 0 else {}
    # Every k-th prompt is held out, so that both parts are alike where a file is sorted.
    held = {int((i + 0.5) * len(prompts) / measured) for i in range(measured)}
    parts: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {True: [], False: []}
    encoded = [encode_prompt(example, tokenizer) for example in prompts]
    for i, inputs in enumerate(tqdm(encoded, desc="Decoding", unit="prompt", disable=not progress)):
        output = target.generate(
            **inputs.to(target.device),
            assistant_model=drafter,
            verification_schedule="fixed",
            num_assistant_tokens=drafter.num_drafts,
            prompt_lookup_num_tokens=0,
            return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id,
            **settings,
        )
        parts[i in held].append(whole_rounds(output.speculation, drafter.num_drafts))
    (confidences, accepted), held_out_rounds = (tuple(map(torch.cat, zip(*parts[which]))) for which in (False, True))
    if not len(confidences) or not len(held_out_rounds[0]):
        raise ValueError(
            f"No answer was long enough for a round over the whole block of {drafter.num_drafts} drafts. Raise "
            "`max_new_tokens`, or add prompts."
        )
    temperatures = fit_temperatures(confidences, accepted, held_out_rounds)
    found = Calibration(temperatures, float(temperature), len(confidences), *held_out_rounds)
    if sum(found.errors("after")) > sum(found.errors("before")):
        # Each was better behind those before it; together they may still not be.
        found.temperatures = [1.0] * drafter.num_drafts
    _warn(found, rounds_reaching(accepted))
    drafter.generation_config.confidence_temperatures = found.temperatures
    drafter.generation_config.calibration_temperature = float(temperature)
    return found


def _warn(found: Calibration, reached: list[int]) -> None:
    """Says which positions keep temperature 1, and why."""
    few = {k: rounds for k, rounds in enumerate(reached, start=1) if rounds < FEWEST_ROUNDS}
    if few:
        logger.warning(
            f"Draft positions {_listed(few)} keep temperature 1: {_listed(few.values())} of the fitted rounds got to "
            f"them, and a fit needs {FEWEST_ROUNDS}. More prompts or longer answers give more rounds."
        )
    no_better = [k for k, t in enumerate(found.temperatures, start=1) if t == 1.0 and k not in few]
    if no_better:
        logger.warning(
            f"Draft positions {_listed(no_better)} keep temperature 1, which does as well as any fitted one on the "
            f"{len(found.accepted)} held-out rounds. If that surprises, calibrate on more prompts."
        )


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def encode_prompt(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any:
    """
    One prompt as a model's inputs, as a user's message where the tokenizer knows chats.

    Raises:
        ValueError: If the example holds no prompt.
    """
    content = prompt_of(example)
    if isinstance(content, str):
        if tokenizer.chat_template is None:
            return tokenizer(content, return_tensors="pt")
        content = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(content, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def whole_rounds(speculation: "Speculation", num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Confidences and accepted prefixes, each `(rounds, num_drafts)`, of the rounds that verified the whole block. A
    row's last round is left out: it may have ended before all of its drafts were decided.
    """
    confidences, accepted = [torch.empty(0, num_drafts)], [torch.empty(0, num_drafts, dtype=torch.bool)]
    last = {row: i for i, each in enumerate(speculation.history) for row in each.rows}
    for i, each in enumerate(speculation.history):
        for place, row in enumerate(each.rows):
            if each.verified[place] == num_drafts and i < last[row] and not each.is_copy:
                confidences.append(each.confidences[place : place + 1])
                accepted.append(torch.arange(num_drafts)[None] < each.accepted[place])
    return torch.cat(confidences), torch.cat(accepted)


def _flat(values: torch.Tensor | Sequence[float]) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64).flatten()


def _bin_means(
    predicted: torch.Tensor | Sequence[float], observed: torch.Tensor | Sequence[float], bins: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each bin the count, the mean prediction and the mean outcome (`nan` where there is none)."""
    predicted, observed = _flat(predicted), _flat(observed)
    if predicted.shape != observed.shape:
        raise ValueError(f"{len(predicted)} predictions can't be compared with {len(observed)} outcomes.")
    if len(predicted) and not (float(predicted.min()) >= 0 and float(predicted.max()) <= 1):
        raise ValueError("Predicted probabilities must lie between 0 and 1.")
    place = (predicted * bins).long().clamp_max(bins - 1)
    counts = torch.bincount(place, minlength=bins).double()
    predictions, outcomes = (
        torch.bincount(place, values, minlength=bins) / counts for values in (predicted, observed)
    )
    return counts, predictions, outcomes
