"""Where a row repeats itself, what followed is copied in place of a draft: what, how much, and what is counted."""

import pytest
import torch
from conftest import QueryLengths, make_target
from scripted import OracleDrafter
from transformers import GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from hf_dspark import DSparkDrafter, ThroughputProfile, speculative_decoding
from hf_dspark.evaluation.calibration import whole_rounds
from hf_dspark.generation.lookup import HOPE, Lookup
from hf_dspark.generation.sequences import Sequences
from hf_dspark.generation.settings import DraftSettings
from hf_dspark.generation.statistics import count_rounds, row_record
from hf_dspark.generation.throughput import Plan, ThroughputSchedule


BLOCK = {"mask_token_id": 1, "block_size": 5, "num_hidden_layers": 1}


def lookup_of(prompts: list[list[int]], new: list[list[int]]) -> Lookup:
    """A lookup in rows that have written `new` behind their prompts."""
    config = GenerationConfig(max_length=100)
    config._pad_token_tensor = torch.tensor(0)
    rows = Sequences(torch.tensor(prompts), StoppingCriteriaList([MaxLengthCriteria(100)]), config)
    lookup = Lookup(rows)
    rows.tokens = [list(tokens) for tokens in new]
    return lookup


def looping(target):
    """Makes a target write the same three tokens over and over, whatever it is asked."""
    with torch.no_grad():
        for parameter in target.model.layers.parameters():
            parameter.zero_()
        target.model.embed_tokens.weight.copy_(torch.eye(64)[:, :32])
        target.lm_head.weight.zero_()
        for token, following in ((7, 8), (8, 9), (9, 7)):
            target.lm_head.weight[following, token] = 5.0
    return target


# ---------------------------------------------------------------------- what is found


def test_what_followed_the_last_time():
    lookup = lookup_of([[1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8]], [[1, 2, 3]])
    tokens = lookup.sequences.tokens[0]
    (start,) = lookup.find().values()
    assert lookup.copy(0, start, 4) == [6, 7, 8, 1]
    tokens += [4, 5]
    (start,) = lookup.find().values()
    assert lookup.copy(0, start, 3) == [1, 2, 3]
    tokens += [9]
    assert lookup.find() == {}


def test_what_runs_into_the_end_repeats():
    lookup = lookup_of([[1, 2, 3, 4]], [[5, 6, 5, 6, 5]])
    (start,) = lookup.find().values()
    assert lookup.copy(0, start, 5) == [6, 5, 6, 5, 6]


@pytest.mark.parametrize(("prompt", "new"), [([1], [1]), ([1, 1], [1]), ([5, 1, 2], [3]), ([1, 2, 3], [4, 1, 2])])
def test_short_and_new_texts_have_nothing_to_copy(prompt, new):
    assert lookup_of([prompt], [new]).find() == {}


def test_places_are_those_of_live_rows():
    lookup = lookup_of([[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 9]], [[5], [5, 6, 7], [1, 2, 3]])
    assert sorted(lookup.find()) == [1, 2]
    lookup.sequences.drop_row(0)
    found = lookup.find()
    assert {lookup.sequences.live[place]: lookup.copy(place, start, 1) for place, start in found.items()} == {
        1: [8],
        2: [9],
    }


def test_acceptance_is_learnt_and_fades():
    lookup = lookup_of([[1]], [[2]])
    assert lookup.acceptance == HOPE
    for _ in range(20):
        lookup.observe([5], [0])
    low = lookup.acceptance
    assert low < 0.4
    lookup.observe([5, 5], [5, 5])
    assert lookup.acceptance > low
    for _ in range(400):
        lookup.observe([], [])
    assert lookup.acceptance == pytest.approx(HOPE, abs=0.01)


# ---------------------------------------------------------------------- in `generate`


@pytest.fixture
def target():
    return make_target()


@pytest.fixture
def drafter(target):
    torch.manual_seed(0)
    return DSparkDrafter.from_target(target, markov_rank=8, **BLOCK)


def decode(target, ids, **kwargs):
    ids = torch.tensor(ids)
    call = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0, **kwargs}
    return target.generate(ids, attention_mask=torch.ones_like(ids), **call)


def test_a_loop_is_copied_whole(target, drafter):
    target, ids = looping(target), [[5, 7, 8, 9, 7, 8]]
    plain = decode(target, ids)
    with QueryLengths(target) as lengths:
        ours = decode(target, ids, assistant_model=drafter, prompt_lookup_num_tokens=6)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    run = ours.speculation
    # One token from the prefill, three rounds of six copies and one token more, and one round with room for two.
    assert run.accepted_lengths == [[7, 7, 7, 2]]
    assert lengths == [6, 7, 7, 7, 2]
    assert (run.copied, run.copied_accepted) == (19, 19)
    # The drafter had nothing to do, and its own counters say so.
    assert run.proposed == [] and run.mean_accepted_length == 23 / 4
    assert "19 tokens copied, 19 accepted" in repr(run)


def test_the_checkpoint_can_say_so_and_the_call_goes_before_it(target, drafter):
    target, ids = looping(target), [[5, 7, 8, 9, 7, 8]]
    assert decode(target, ids, assistant_model=drafter).speculation.copied == 0
    drafter.generation_config.prompt_lookup_num_tokens = 4
    assert decode(target, ids, assistant_model=drafter).speculation.history[0].proposed == 4
    config = GenerationConfig(prompt_lookup_num_tokens=2)
    passed = decode(target, ids, assistant_model=drafter, generation_config=config).speculation
    assert passed.history[0].proposed == 2
    assert decode(target, ids, assistant_model=drafter, prompt_lookup_num_tokens=0).speculation.copied == 0


def test_saved_with_the_drafter(target, drafter, tmp_path):
    drafter.generation_config.prompt_lookup_num_tokens = 4
    drafter.save_pretrained(tmp_path)
    assert DSparkDrafter.from_pretrained(tmp_path).generation_config.prompt_lookup_num_tokens == 4


@pytest.mark.parametrize("own", [None, 4])
def test_one_of_the_targets_own_is_refused(target, drafter, own):
    """`generate` would look there before it looked at the drafter; the call's own goes before both."""
    target.generation_config.prompt_lookup_num_tokens = 3
    drafter.generation_config.prompt_lookup_num_tokens = own
    refused = pytest.raises(ValueError, match="`prompt_lookup_num_tokens` of the target's own `generation_config`")
    with refused:
        decode(target, [[1, 2]], assistant_model=drafter)
    for given in (0, 5):
        decode(target, [[1, 2]], assistant_model=drafter, prompt_lookup_num_tokens=given)


def test_beside_a_custom_loop_it_is_refused(target, drafter):
    loop = speculative_decoding(drafter, prompt_lookup_num_tokens=2)
    assert decode(looping(target), [[5, 7, 8, 9, 7, 8]], custom_generate=loop).speculation.copied > 0
    with pytest.raises(ValueError, match="Give `prompt_lookup_num_tokens` to `speculative_decoding` itself"):
        decode(target, [[1, 2]], custom_generate=loop, prompt_lookup_num_tokens=5)


@pytest.mark.parametrize("in_config", [False, True])
def test_many_samples_of_a_prompt(target, drafter, in_config):
    options = {"prompt_lookup_num_tokens": 3, "num_return_sequences": 3, "do_sample": True}
    options |= {"max_new_tokens": 12, "pad_token_id": 0, "return_dict_in_generate": True}
    if in_config:
        options = {"generation_config": GenerationConfig(**options)}
    ids = torch.tensor([[5, 7, 8, 9, 7, 8]])
    mask = torch.ones_like(ids)
    output = looping(target).generate(ids, attention_mask=mask, assistant_model=drafter, **options)
    assert output.sequences.shape[0] == 3
    assert output.speculation.copied > 0


def test_no_more_is_copied_than_there_is_room_for(target, drafter):
    target, ids = looping(target), [[5, 7, 8, 9, 7, 8], [5, 7, 8, 9, 7, 8]]
    plain = decode(target, ids)
    ours = decode(target, ids, assistant_model=drafter, prompt_lookup_num_tokens=10**9)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert [(r.proposed, r.verified) for r in ours.speculation.history] == [(22, [22, 22])]


def test_rows_that_copy_beside_rows_that_draft(target):
    """The drafter's cache holds every position before the anchor (the oracle checks it), also behind copies."""
    ids = [[3, 4, 5, 3, 4, 5], [9, 8, 7, 6, 5, 4]]
    plain = decode(target, ids)
    oracle = OracleDrafter.from_target(target, markov_rank=8, **BLOCK)
    oracle.tell(plain.sequences.tolist(), 0.7)
    ours = decode(target, ids, assistant_model=oracle, prompt_lookup_num_tokens=3)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    run = ours.speculation
    assert sum(len(r.rows) for r in run.history) == run.rounds
    assert [sum(row) for row in run.accepted_lengths] == [23, 23]


def test_calibration_looks_at_drafts_alone(target, drafter):
    target, ids = looping(target), [[5, 7, 8, 9, 7, 8]]
    run = decode(target, ids, assistant_model=drafter, prompt_lookup_num_tokens=drafter.num_drafts).speculation
    assert run.copied > 0
    assert len(whole_rounds(run, drafter.num_drafts)[0]) == 0


def test_a_log_tells_copies_from_drafts(target, drafter):
    target, ids = looping(target), [[5, 7, 8, 1, 4, 2]]
    run = decode(target, ids, assistant_model=drafter, prompt_lookup_num_tokens=3).speculation
    again = count_rounds([row_record(run, 0)["rounds"]])
    assert run.copied > 0 and sum(run.proposed) > 0
    for name in ("copied", "copied_accepted", "proposed", "verified", "accepted", "accepted_lengths"):
        assert getattr(again, name) == getattr(run, name)


# ---------------------------------------------------------------------- with costs


def schedule_of(step_seconds, num_copied=8):
    return ThroughputSchedule(DraftSettings(4, "throughput", num_copied=num_copied), step_seconds)


def test_the_throughput_schedule_copies_what_pays():
    flat = ThroughputProfile({1: {1: 1.0, 16: 1.0}}, {1: {1: 0.1}})
    steep = ThroughputProfile({1: {1: 1.0, 16: 16.0}}, {1: {1: 0.1}})
    between = ThroughputProfile({1: {1: 1.0, 16: 7.0}}, {1: {1: 0.1}})
    assert schedule_of(flat).num_copied(1, 1, 0.5) == 8
    assert schedule_of(steep).num_copied(1, 1, 0.99) == 0
    # A token more costs 0.4 of a plain step, so it must be accepted with 0.4 at least: 0.8 ** 4 is the last.
    assert schedule_of(between).num_copied(1, 1, 0.8) == 4
    assert schedule_of(between, num_copied=2).num_copied(1, 1, 0.8) == 2


def test_where_drafts_do_better_nothing_is_copied():
    schedule = schedule_of(ThroughputProfile({1: {1: 1.0, 16: 1.0}}, {1: {1: 0.1}}))
    assert schedule.num_copied(1, 1, 0.2) == 8
    schedule.plan = Plan(4, rate=3.5)
    assert schedule.num_copied(1, 1, 0.2) == 0
    assert schedule.num_copied(1, 1, 0.9) == 8


def test_fewer_are_copied_under_load():
    rows = {1: {1: 1.0, 9: 1.8}, 8: {8: 1.2, 72: 9.2}}
    schedule = schedule_of(ThroughputProfile(rows, {1: {1: 0.1}, 8: {1: 0.1}}))
    assert schedule.num_copied(8, 8, 0.8) < schedule.num_copied(1, 1, 0.8)
