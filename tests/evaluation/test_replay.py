"""Replays and the cost model, against cases worked out by hand."""

import pytest
import torch

from hf_dspark.evaluation.confidence import survival, whole_block_rounds
from hf_dspark.evaluation.costs import Costs
from hf_dspark.evaluation.recorded import Turn, UnitRun
from hf_dspark.evaluation.replay import RecordedRound, ReplayedRound, replay
from hf_dspark.generation.profile import ThroughputProfile
from hf_dspark.generation.scheduling import ConfidenceSchedule, Schedule
from hf_dspark.generation.settings import DraftSettings


def recorded(accepted, confidences=(), block=5):
    """A round that verified the whole block and accepted so many."""
    return RecordedRound(accepted + 1, accepted, block, tuple(confidences))


def run(rows, schedule, drafts):
    return [
        (round_.drafts, round_.verified, round_.accepted, round_.committed)
        for round_ in replay(rows, schedule, drafts)
    ]


def fixed(drafts):
    return Schedule(DraftSettings(drafts, "fixed"))


def test_the_whole_block_replays_as_it_was():
    rounds = [recorded(0), recorded(5), recorded(2)]
    assert run([rounds], fixed(5), 5) == [(5, [5], [0], [1]), (5, [5], [5], [6]), (5, [5], [2], [3])]


def test_a_shorter_block_takes_more_rounds_for_a_run():
    # 4 accepted drafts and the target's own token are 5 tokens, the last of which no draft foresaw.
    assert run([[recorded(4)]], fixed(1), 5) == [*[(1, [1], [1], [2])] * 2, (1, [1], [0], [1])]
    assert run([[recorded(4)]], fixed(2), 5) == [(2, [2], [2], [3]), (2, [2], [1], [2])]
    # 2 accepted ones are 3 tokens; the second round stands before the rejected draft.
    assert run([[recorded(2)]], fixed(1), 5) == [(1, [1], [1], [2]), (1, [1], [0], [1])]


def test_a_run_goes_on_behind_a_block_that_was_right():
    # 5 right drafts, the target's own token, 2 right drafts, and a token that no draft foresaw: 9 tokens.
    rounds = [recorded(5), recorded(2)]
    assert run([rounds], fixed(3), 5) == [(3, [3], [3], [4])] * 2 + [(3, [3], [0], [1])]
    assert run([rounds], fixed(5), 5) == [(5, [5], [5], [6]), (5, [5], [2], [3])]


def test_threshold_cuts_and_starts_again_inside_the_run():
    schedule = ConfidenceSchedule(DraftSettings(5, "confidence", 0.5))
    rounds = [recorded(3, [0.9, 0.2, 0.8, 0.4, 0.9])]
    # One draft passes and is right; behind its bonus token stand the third draft (passes, right) and the rest.
    assert run([rounds], schedule, 5) == [(5, [1], [1], [2]), (5, [1], [1], [2])]


def test_rows_leave_when_they_are_done():
    rows = [[recorded(0), recorded(1)], [recorded(1)]]
    assert run(rows, fixed(3), 5) == [(3, [3, 3], [0, 1], [1, 2]), (3, [3], [1], [2])]


def test_paused_drafting_commits_one_token_a_round():
    assert run([[recorded(2)]], fixed(0), 5) == [(0, [0], [0], [1])] * 3


def test_last_round_cut_by_the_end_of_text():
    # Two of the drafts committed, the second the end: nothing of the target's own.
    rounds = [RecordedRound(2, 2, 5)]
    assert run([rounds], fixed(1), 5) == [(1, [1], [1], [2])]
    assert run([rounds], fixed(0), 5) == [(0, [0], [0], [1])] * 2


def test_last_rounds_have_room_for_fewer_drafts():
    # 8 tokens in all: behind the first 6 there is room for two, a draft and the target's own.
    rounds = [recorded(5), RecordedRound(1, 0, 1, room=2), RecordedRound(1, 0, 0, room=1)]
    assert run([rounds], fixed(5), 5) == [(5, [5], [5], [6]), (1, [1], [0], [1]), (0, [0], [0], [1])]
    # Under another schedule the same room is left at the same place.
    assert run([rounds], fixed(2), 5)[:2] == [(2, [2], [2], [3])] * 2
    assert run([rounds], fixed(2), 5)[2:] == [(1, [1], [0], [1]), (0, [0], [0], [1])]
    # Beside a row with room to spare a row drafts on, and verifies what it has room for.
    rows = [[RecordedRound(1, 0, 1, room=2), RecordedRound(1, 0, 0, room=1)], [recorded(1)]]
    assert run(rows, fixed(5), 5) == [(5, [1, 5], [0, 1], [1, 2]), (0, [0], [0], [1])]


PROFILE = ThroughputProfile({1: {1: 10.0, 2: 11.0, 3: 14.0, 4: 20.0}}, {1: {1: 1.0, 2: 2.0, 3: 4.0}})


def test_seconds_of_a_generation():
    costs = Costs(PROFILE, num_drafts=3)
    rounds = [ReplayedRound(3, [3], [1], [2]), ReplayedRound(1, [0], [0], [1]), ReplayedRound(0, [0], [0], [1])]
    # Draft 3 and check 4; draft 1 and check the anchor alone; a plain step.
    assert costs.seconds(rounds) == pytest.approx((4 + 20) + (1 + 10) + 10)


def test_levels_are_those_of_the_run():
    costs = Costs(PROFILE, num_drafts=3)
    rounds = [ReplayedRound(3, [3], [1], [2])] * 5
    level = costs.levelled(rounds, draft_seconds=10.0, other_seconds=150.0)
    assert level.seconds(rounds) == pytest.approx(160.0)
    # Half as dear to draft as in the profile, one and a half times as dear to check: at every length.
    assert level.parts(ReplayedRound(1, [1], [1], [2])) == pytest.approx((0.5, 16.5))
    assert level.as_dict(1)["steps"] == pytest.approx({"1": 15.0, "2": 16.5, "3": 21.0, "4": 30.0})


def test_whole_block_rounds_leave_out_what_was_cut():
    rounds = [
        recorded(1, [0.5] * 5),
        RecordedRound(2, 2, 5, (0.5,) * 5),  # ended in the accepted run
        RecordedRound(2, 1, 1, (0.5,) * 5),  # no room for more than one draft
        RecordedRound(2, 1, 3, (0.5,) * 3),  # nor for more than three
        RecordedRound(1, 0, 0),
    ]
    confidences, accepted = whole_block_rounds([UnitRun("a", [Turn([rounds], 8, 0.1)], 8, 1.0, 0.1, 1.0)], 5)
    assert confidences.shape == (1, 5)
    assert accepted.tolist() == [[True, False, False, False, False]]
    assert torch.allclose(survival(confidences, None), torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.03125]]))
