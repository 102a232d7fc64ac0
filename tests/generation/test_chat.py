"""Going on from the cache of an earlier turn, and other things that a call may bring along."""

import copy

import pytest
import torch
from conftest import QueryLengths, make_target
from scripted import OracleDrafter
from torch import nn
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_dspark import DFlashDrafter, DSparkDrafter, Eagle3Drafter


FIRST_TURN, SECOND_TURN = [11, 7, 30, 2], [40, 41, 42]
BLOCK = {"mask_token_id": 1, "block_size": 5, "num_hidden_layers": 2}


@pytest.fixture(scope="module", params=["llama", "qwen3 sliding"])
def target(request):
    if request.param == "llama":
        return make_target("llama", 3)
    return make_target("qwen3", 3, use_sliding_window=True, sliding_window=6, max_window_layers=2)


def decode(target, ids: list[int], **kwargs):
    ids = torch.tensor([ids])
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    return target.generate(ids, return_dict_in_generate=True, **{**call, **kwargs})


def oracle_for(target, turns: list[list[int]]) -> OracleDrafter:
    """A drafter that is always right, and checks that its cache holds every position before the anchor."""
    return OracleDrafter.from_target(target, markov_rank=8, **BLOCK).tell(turns, 1.0)


def two_turns(target) -> tuple[list[int], list[int]]:
    """Plain decoding's text after the first turn and after the second."""
    first = decode(target, FIRST_TURN).sequences[0].tolist()
    return first, decode(target, first + SECOND_TURN).sequences[0].tolist()


@pytest.mark.parametrize("whose", ["returned", "passed"])
def test_next_turn_from_the_cache(target, whose):
    """The second turn computes its new tokens only, and the drafter still knows the first."""
    first, second = two_turns(target)
    drafter = oracle_for(target, [second, first])
    cache = DynamicCache(config=target.config)
    output = decode(target, FIRST_TURN, assistant_model=drafter, **({"cache": cache} if whose == "passed" else {}))
    cache = output.cache if whose == "returned" else cache
    assert output.sequences[0].tolist() == first
    with QueryLengths(target) as lengths:
        output = decode(target, first + SECOND_TURN, assistant_model=drafter, cache=cache)
    assert output.sequences[0].tolist() == second
    # The last token of the first turn was in no forward yet.
    assert lengths[0] == 1 + len(SECOND_TURN)
    assert output.speculation.mean_accepted_length > 5


def test_next_turn_from_a_plain_cache(target):
    """A cache from a call without the drafter: its features are computed once more."""
    first, second = two_turns(target)
    drafter = oracle_for(target, [second])
    cache = decode(target, FIRST_TURN).cache
    output = decode(target, first + SECOND_TURN, assistant_model=drafter, cache=cache)
    assert output.sequences[0].tolist() == second
    assert output.speculation.mean_accepted_length > 5


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_what_the_drafter_remembers_is_what_it_would_compute(target, kind):
    """The same drafts after a second turn, whether the first one's features were kept or computed anew."""
    torch.manual_seed(0)
    drafter = Eagle3Drafter.from_target(target) if kind == "eagle3" else DSparkDrafter.from_target(target, **BLOCK)
    output = decode(target, FIRST_TURN, assistant_model=drafter)
    text, copied = output.sequences[0].tolist() + SECOND_TURN, copy.deepcopy(output.cache)
    kept = decode(target, text, assistant_model=drafter, cache=output.cache)
    anew = decode(target, text, assistant_model=drafter, cache=copied)
    assert torch.equal(kept.sequences, anew.sequences)
    assert kept.speculation.accepted_lengths == anew.speculation.accepted_lengths
    for a, b in zip(kept.speculation.history, anew.speculation.history, strict=True):
        torch.testing.assert_close(a.confidences, b.confidences, rtol=1e-3, atol=1e-3)


def test_only_the_new_tokens(target):
    """With a mask over everything, `generate` takes the new tokens alone."""
    first, second = two_turns(target)
    drafter = DSparkDrafter.from_target(target, markov_rank=8, **BLOCK)
    cache = decode(target, FIRST_TURN).cache
    new = [first[-1], *SECOND_TURN]
    mask = torch.ones(1, len(first) + len(SECOND_TURN), dtype=torch.long)
    call = {"attention_mask": mask, "max_new_tokens": 12}
    plain = decode(target, new, cache=copy.deepcopy(cache), **call).sequences
    assert plain[0, len(new) :].tolist() == second[len(first) + len(SECOND_TURN) :]
    assert torch.equal(decode(target, new, cache=cache, assistant_model=drafter, **call).sequences, plain)


@pytest.mark.parametrize("fails", ["streamer", "criterion", "processor"])
@pytest.mark.parametrize("after", [2, 3, 5])
def test_a_cache_outlives_an_error(target, fails, after):
    """Whatever stops a call inside an accepted run, the caller's cache holds text that was shown, and goes on."""

    class StopError(Exception):
        pass

    class Failing(BaseStreamer, StoppingCriteria, LogitsProcessor):
        def __init__(self):
            self.shown = []

        def put(self, value):
            self.shown += value.flatten().tolist()
            self.count()

        def end(self):
            pass

        def __call__(self, input_ids, scores):
            self.shown = input_ids[0].tolist()
            self.count()
            return scores if fails == "processor" else torch.zeros(1, dtype=torch.bool)

        def count(self):
            if len(self.shown) >= len(FIRST_TURN) + after:
                raise StopError

    failing = Failing()
    watchers = {
        "streamer": {"streamer": failing},
        "criterion": {"stopping_criteria": StoppingCriteriaList([failing])},
        "processor": {"logits_processor": LogitsProcessorList([failing])},
    }
    first, _ = two_turns(target)
    drafter, cache = oracle_for(target, [first]), DynamicCache(config=target.config)
    with pytest.raises(StopError):
        decode(target, FIRST_TURN, assistant_model=drafter, cache=cache, **watchers[fails])
    assert failing.shown == first[: len(FIRST_TURN) + after]
    assert cache.get_seq_length() == len(failing.shown) - 1
    goes_on = failing.shown + SECOND_TURN
    assert torch.equal(decode(target, goes_on, cache=cache).sequences, decode(target, goes_on).sequences)


def test_a_cache_of_inference_mode_goes_on_outside(target):
    first, second = two_turns(target)
    drafter = oracle_for(target, [second, first])
    with torch.inference_mode():
        cache = decode(target, FIRST_TURN, assistant_model=drafter).cache
    output = decode(target, first + SECOND_TURN, assistant_model=drafter, cache=cache)
    assert output.sequences[0].tolist() == second


def test_another_drafter_goes_on(target):
    first, second = two_turns(target)
    cache = decode(target, FIRST_TURN, assistant_model=DFlashDrafter.from_target(target, **BLOCK)).cache
    output = decode(target, first + SECOND_TURN, assistant_model=oracle_for(target, [second]), cache=cache)
    assert output.sequences[0].tolist() == second
    assert output.speculation.mean_accepted_length > 5


# ---------------------------------------------------------------------- what a call may ask for or bring along


def test_hidden_states(target):
    drafter = oracle_for(target, [two_turns(target)[0]])
    plain = decode(target, FIRST_TURN, output_hidden_states=True)
    ours = decode(target, FIRST_TURN, output_hidden_states=True, assistant_model=drafter)
    assert len(ours.hidden_states) == len(plain.hidden_states) == 12
    for mine, theirs in zip(ours.hidden_states, plain.hidden_states):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Packed(nn.Module):
    """A linear layer as quantisers leave it: eight bits, scales, and no weight that could be read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight * self.scale)


def quantise(module: nn.Module, keep: tuple[str, ...] = ()) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and name not in keep:
            setattr(module, name, Packed(child))
        else:
            quantise(child, keep)


@pytest.mark.parametrize("keep", [("lm_head",), ()])
def test_quantised_target(keep):
    """Also a head that can only be called serves for drafting."""
    target = make_target("qwen3", 3)
    quantise(target, keep)
    for drafter in (Eagle3Drafter.from_target(target), DSparkDrafter.from_target(target, markov_rank=8, **BLOCK)):
        plain = decode(target, FIRST_TURN).sequences
        assert torch.equal(decode(target, FIRST_TURN, assistant_model=drafter).sequences, plain)
        rows, mask = torch.tensor([FIRST_TURN, [5, 6, 7, 8]]), torch.ones(2, 4, dtype=torch.long)
        call = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(target.generate(rows, assistant_model=drafter, **call), target.generate(rows, **call))


def test_quantised_head_with_reduced_vocabulary_is_refused():
    target = make_target("qwen3", 3)
    drafter = DSparkDrafter.from_target(target, draft_vocab_size=24, token_counts=torch.arange(64), **BLOCK)
    other = make_target("qwen3", 3)
    quantise(other)
    with pytest.raises(ValueError, match="LM head is quantised"):
        decode(other, FIRST_TURN, assistant_model=drafter)


# ---------------------------------------------------------------------- long contexts


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3", "sliding"])
def test_context_window(target, kind):
    """Whatever the drafter looks at, the output is the same; its cache holds no more than the window."""
    torch.manual_seed(0)
    if kind == "eagle3":
        drafter = Eagle3Drafter.from_target(target, num_drafts=4)
    else:
        drafter = (DFlashDrafter if kind == "dflash" else DSparkDrafter).from_target(target, **BLOCK)
    if kind == "sliding":
        drafter.config.text_config.layer_types = ["sliding_attention", "full_attention"]
        drafter.config.text_config.sliding_window = 5
    caches = []
    make = drafter.new_cache
    drafter.new_cache = lambda *args: caches.append(make(*args)) or caches[-1]
    prompt = [(7 * i) % 60 + 2 for i in range(50)]
    plain = decode(target, prompt, max_new_tokens=24).sequences
    short = decode(target, prompt, max_new_tokens=24, assistant_model=drafter, draft_context_window=8)
    wide = decode(target, prompt, max_new_tokens=24, assistant_model=drafter, draft_context_window=1000)
    free = decode(target, prompt, max_new_tokens=24, assistant_model=drafter)
    assert all(torch.equal(run.sequences, plain) for run in (short, wide, free))
    sizes = [max(layer.keys.shape[1] for layer in cache.layers) for cache in caches]
    assert sizes[0] <= 8 + drafter.num_drafts + 1
    assert sizes[2] >= 70
    # A window wider than the text changes nothing.
    for a, b in zip(wide.speculation.history, free.speculation.history, strict=True):
        torch.testing.assert_close(a.confidences, b.confidences)
    first = [run.speculation.history[0].confidences for run in (short, free)]
    assert not torch.allclose(*first)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_what_left_the_window_does_not_matter(kind):
    """Two contexts that agree on the last positions give the same drafts, round after round, whatever came before."""
    target = make_target("llama", 3)
    drafter = Eagle3Drafter.from_target(target) if kind == "eagle3" else DSparkDrafter.from_target(target, **BLOCK)
    torch.manual_seed(0)
    features = torch.randn(2, 40, drafter.fc.in_features)
    tokens = torch.randint(2, 64, (1, 40)).expand(2, -1)
    features[1, 20:] = features[0, 20:]
    cache = drafter.new_cache(context_window=6)
    start = 0
    for end in (23, 24, 27, 32, 33, 40):
        drafter.extend(cache, features[:, start:end], tokens[:, start:end])
        start = end
        proposal = drafter.propose(cache, tokens[:, end - 1])
        if end >= 26:
            assert torch.equal(proposal.tokens[0], proposal.tokens[1])
            torch.testing.assert_close(proposal.confidences[0], proposal.confidences[1])
    fresh = drafter.new_cache(context_window=6)
    drafter.extend(fresh, features, tokens)
    torch.testing.assert_close(drafter.propose(fresh, tokens[:, -1]).confidences, proposal.confidences)


def test_context_window_is_checked_and_kept(target, tmp_path):
    drafter = DSparkDrafter.from_target(target, **BLOCK)
    with pytest.raises(ValueError, match="`draft_context_window` must be at least 1, got 0"):
        decode(target, FIRST_TURN, assistant_model=drafter, draft_context_window=0)
    drafter.generation_config.draft_context_window = 32
    drafter.save_pretrained(tmp_path)
    assert DSparkDrafter.from_pretrained(tmp_path).generation_config.draft_context_window == 32
