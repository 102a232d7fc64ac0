"""Calibration: the two measures, and temperatures that are found again."""

import pytest
import torch
from conftest import make_target, make_tokenizer

from hf_dspark import AutoDrafter, DFlashDrafter, DSparkDrafter, calibrate_confidence
from hf_dspark.evaluation.calibration import (
    GRID,
    expected_calibration_error,
    fit_temperatures,
    roc_auc,
    rounds_reaching,
    whole_rounds,
)
from hf_dspark.generation.confidence import calibrated
from hf_dspark.generation.statistics import Speculation


def test_calibration_error_by_hand():
    # One bin predicts 0.75 and sees 0.5; another predicts 0.1 and sees 0.
    assert expected_calibration_error([0.75] * 4, [1, 1, 0, 0]) == pytest.approx(0.25)
    assert expected_calibration_error([0.75] * 4 + [0.1] * 4, [1, 1, 0, 0] + [0] * 4) == pytest.approx(0.175)
    # Both ends of the interval have a bin.
    assert expected_calibration_error([0.0, 1.0], [0, 1]) == 0.0
    assert expected_calibration_error([0.0, 1.0], [1, 0]) == 1.0


def test_calibration_error_weighs_bins_by_count():
    predicted = torch.tensor([0.95] * 90 + [0.05] * 10)
    observed = torch.tensor([1.0] * 90 + [1.0] * 10)
    assert expected_calibration_error(predicted, observed) == pytest.approx(0.9 * 0.05 + 0.1 * 0.95)


def test_calibration_error_of_honest_predictions_is_small():
    generator = torch.Generator().manual_seed(0)
    predicted = torch.rand(20000, generator=generator)
    observed = (torch.rand(20000, generator=generator) < predicted).float()
    assert expected_calibration_error(predicted, observed) < 0.02
    assert expected_calibration_error(predicted.sqrt(), observed) > 0.1


def test_what_calibration_error_refuses():
    assert expected_calibration_error([], []) != expected_calibration_error([], [])  # nan
    with pytest.raises(ValueError, match="3 predictions can't be compared with 2 outcomes"):
        expected_calibration_error([0.1, 0.2, 0.3], [0, 1])
    with pytest.raises(ValueError, match="between 0 and 1"):
        expected_calibration_error([1.2], [1])


def test_auc_is_the_share_of_pairs_in_order():
    assert roc_auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert roc_auc([1, 2, 3, 4], [0, 0, 1, 1]) == 1.0
    assert roc_auc([4, 3, 2, 1], [0, 0, 1, 1]) == 0.0
    assert roc_auc([0.5] * 6, [0, 1, 0, 1, 1, 0]) == 0.5  # ties count half
    assert roc_auc([0.5, 0.9], [1, 1]) != roc_auc([0.5, 0.9], [1, 1])  # nan


def test_auc_against_all_pairs():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 12, (60,), generator=generator)
    labels = torch.randint(0, 2, (60,), generator=generator)
    pairs = scores[labels == 1][:, None] - scores[labels == 0][None]
    assert roc_auc(scores, labels) == pytest.approx(float(((pairs > 0) + 0.5 * (pairs == 0)).mean()))


# ---------------------------------------------------------------------- temperatures


def synthetic(temperatures, rounds, seed):
    """Rounds in which the honest confidence of a draft is the reported one at a known temperature."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(rounds, len(temperatures), generator=generator) + 1.5
    honest = torch.sigmoid(logits)
    accepted = (torch.rand(honest.shape, generator=generator) < honest).long().cumprod(1).bool()
    # What is reported has to be divided by the temperature to become honest.
    return torch.sigmoid(logits * torch.tensor(temperatures)), accepted


def test_known_temperatures_are_found():
    known = [2.0, 0.6, 1.0, 1.5]
    confidences, accepted = synthetic(known, 20000, 0)
    found = fit_temperatures(confidences, accepted)
    assert found == pytest.approx(known, rel=0.2)
    # On other rounds of the same kind, predictions are honest now.
    confidences, accepted = synthetic(known, 20000, 1)
    before, after = confidences.cumprod(1), calibrated(confidences, found).cumprod(1)
    errors = [[expected_calibration_error(s[:, k], accepted[:, k]) for k in range(4)] for s in (before, after)]
    assert max(errors[1]) < 0.02 < max(errors[0])
    # The first position's order is what it was.
    assert roc_auc(before[:, 0], accepted[:, 0]) == pytest.approx(roc_auc(after[:, 0], accepted[:, 0]), abs=1e-3)


def test_honest_confidences_are_left_alone():
    confidences = torch.full((100, 2), 0.5)
    accepted = torch.arange(100)[:, None].expand(-1, 2) % torch.tensor([2, 4]) == 0
    # Nothing changes a confidence of one half: of equal temperatures the neutral one is taken.
    assert fit_temperatures(confidences, accepted) == [1.0, 1.0]
    assert 1.0 in GRID


def test_positions_with_few_rounds_are_left_alone():
    confidences, accepted = synthetic([2.0, 2.0, 2.0], 400, 0)
    accepted[:, 1] &= torch.arange(400) < 150  # so that position 3 is hardly ever got to
    accepted[:, 2] &= accepted[:, 1]
    reached = rounds_reaching(accepted)
    assert reached[:2] == [400, int(accepted[:, 0].sum())] and 0 < reached[2] < 100 < reached[1]
    first, second, third = fit_temperatures(confidences, accepted)
    assert first > 1 < second
    assert third == 1.0
    assert fit_temperatures(confidences[:99], accepted[:99]) == [1.0, 1.0, 1.0]


def test_a_fit_that_fails_on_other_rounds_is_not_taken():
    confidences, accepted = synthetic([3.0, 1.0], 2000, 0)
    assert fit_temperatures(confidences, accepted)[0] > 2
    honest = synthetic([1.0, 1.0], 2000, 1)
    assert fit_temperatures(confidences, accepted, honest)[0] == 1.0
    assert fit_temperatures(confidences, accepted, synthetic([3.0, 1.0], 2000, 2))[0] > 2


def test_only_whole_rounds_count():
    speculation = Speculation([[], []])
    confidences = torch.tensor([[0.9, 0.8], [0.7, 0.6]])
    speculation.record_round([0, 1], 2, [2, 1], [2, 1], [1, 1], [2, 2], confidences)
    speculation.record_round([0, 1], 2, [2, 2], [2, 2], [0, 2], [1, 3], confidences / 2)
    speculation.record_round([1], 2, [2], [2], [2], [3], confidences[1:] / 4)
    found, accepted = whole_rounds(speculation, 2)
    # Row 0's second and row 1's third round are their last; row 1's first verified only one draft.
    assert torch.equal(found, torch.tensor([[0.9, 0.8], [0.35, 0.3]]))
    assert accepted.tolist() == [[True, False], [True, True]]
    nothing, _ = whole_rounds(Speculation([[]]), 2)
    assert nothing.shape == (0, 2)


@pytest.fixture(scope="module")
def chat_pair():
    tokenizer = make_tokenizer()
    target = make_target("llama", 3, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    return target, DSparkDrafter.from_target(target, tokenizer=tokenizer, num_hidden_layers=1, block_size=3), tokenizer


DATA = [
    {"turns": ["one", "two"]},
    {"prompt": "three"},
    {"messages": [{"role": "user", "content": "four"}, {"role": "assistant", "content": "five"}]},
    {"prompt": [{"role": "user", "content": "six"}]},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_calibration_of_a_tiny_pair(temperature, chat_pair, tmp_path):
    """An untrained drafter claims one half and is hardly ever right; afterwards it says so."""
    target, drafter, tokenizer = chat_pair
    torch.manual_seed(0)
    found = calibrate_confidence(target, drafter, DATA, tokenizer, temperature, max_new_tokens=40, progress=False)
    assert found.fitted_rounds > 60 and len(found.accepted) > 20
    settings = drafter.generation_config
    assert settings.confidence_temperatures == found.temperatures
    assert settings.calibration_temperature == temperature
    assert sum(found.errors("after")) <= sum(found.errors("before"))
    # They travel with the checkpoint, and decoding uses them.
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path).generation_config
    assert again.confidence_temperatures == found.temperatures
    assert again.calibration_temperature == temperature
    found.plot().savefig(tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").stat().st_size > 10_000


def test_too_few_rounds_are_said_and_change_nothing(chat_pair, caplog):
    target, drafter, tokenizer = chat_pair
    with caplog.at_level("WARNING"):
        found = calibrate_confidence(target, drafter, DATA, tokenizer, max_new_tokens=12, progress=False)
    assert found.temperatures == drafter.generation_config.confidence_temperatures == [1.0] * drafter.num_drafts
    assert found.errors("after") == pytest.approx(found.errors("before"))
    (warning,) = [record.getMessage() for record in caplog.records if "keep temperature 1" in record.getMessage()]
    assert f"Draft positions 1, 2, 3 keep temperature 1: {found.fitted_rounds}, " in warning
    assert "a fit needs 100. More prompts or longer answers give more rounds." in warning


def test_calibration_without_a_confidence_head(chat_pair):
    target, _, tokenizer = chat_pair
    drafter = DFlashDrafter.from_target(target, tokenizer=tokenizer, num_hidden_layers=1, block_size=3)
    found = calibrate_confidence(target, drafter, DATA, tokenizer, max_new_tokens=40, progress=False)
    assert len(found.temperatures) == drafter.num_drafts
    assert bool(((found.confidences > 0) & (found.confidences < 1)).all())


def test_what_calibration_refuses(chat_pair):
    target, drafter, tokenizer = chat_pair
    with pytest.raises(ValueError, match="at least two, got 1"):
        calibrate_confidence(target, drafter, DATA[:1], tokenizer, progress=False)
    with pytest.raises(ValueError, match="Expected `prompt`, `messages` or `turns`, got the columns text"):
        calibrate_confidence(target, drafter, [{"text": "x"}] * 2, tokenizer, progress=False)
    with pytest.raises(ValueError, match="No answer was long enough"):
        calibrate_confidence(target, drafter, DATA, tokenizer, max_new_tokens=2, progress=False)
