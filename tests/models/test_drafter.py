"""What every drafter promises: stateless decoding, saving without what is borrowed, and a target that fits."""

import json

import numpy as np
import pytest
import torch
from conftest import make_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_dspark import AutoDrafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter


VARIANTS = {
    "dspark": (DSparkDrafter, {"markov_rank": 6}),
    "dspark gated": (DSparkDrafter, {"markov_rank": 6, "markov_head_type": "gated"}),
    "dspark rnn, confidence alone": (
        DSparkDrafter,
        {"markov_rank": 6, "markov_head_type": "rnn", "confidence_head_with_markov": False},
    ),
    "dspark bare": (DSparkDrafter, {"markov_rank": 0, "enable_confidence_head": False}),
    "dflash": (DFlashDrafter, {}),
    "dflash masks only": (DFlashDrafter, {"sample_from_anchor": False}),
    "eagle3": (Eagle3Drafter, {"num_drafts": 4}),
}


def make(variant: str, target, reduced: bool = False, **overrides):
    cls, fields = VARIANTS[variant]
    fields = fields | overrides
    if cls is not Eagle3Drafter:
        fields = {"mask_token_id": 3, "block_size": 4, "num_hidden_layers": 2} | fields
    if reduced:
        fields |= {"draft_vocab_size": 24, "token_counts": torch.arange(64) * 5 % 64}
    torch.manual_seed(1)
    return cls.from_target(target, **fields)


@torch.no_grad()
def propose(drafter, length: int = 6, cache=None, **kwargs):
    """Confidences, tokens and distributions of one block behind fixed features."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, length, drafter.fc.in_features, generator=generator).to(drafter.dtype)
    tokens = torch.randint(0, 64, (1, length), generator=generator)
    cache = drafter.new_cache() if cache is None else cache
    drafter.extend(cache, features, tokens)
    scores = []

    def draw(slot_scores, drafted):
        scores.append(slot_scores)
        return slot_scores.argmax(-1), torch.softmax(slot_scores, -1)

    proposal = drafter.propose(cache, tokens[:, -1], draw=draw, **kwargs)
    return proposal, torch.stack(scores, dim=1), cache


def assert_same(ours, theirs):
    """The same numbers, up to how sums are rounded where weights lie elsewhere in memory."""
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture
def tiny_target(request):
    """A target of one family; the variants take turns."""
    turn = list(VARIANTS).index(request.getfixturevalue("variant")) if "variant" in request.fixturenames else 0
    return make_target(("llama", "qwen3")[turn % 2])


# ---------------------------------------------------------------------- saving and loading


@pytest.mark.parametrize("reduced", [False, True])
def test_round_trip(variant, reduced, tiny_target, tmp_path):
    drafter = make(variant, tiny_target, reduced).eval()
    drafter.generation_config.num_assistant_tokens = 2
    drafter.generation_config.verification_schedule = "confidence"
    drafter.generation_config.assistant_confidence_threshold = 0.35
    drafter.save_pretrained(tmp_path)
    _, scores, _ = propose(drafter)

    stored = load_file(tmp_path / "model.safetensors")
    assert not any("embed_tokens" in name or "lm_head" in name for name in stored)
    assert ("d2t" in stored, "t2d" in stored) == (reduced, reduced)
    for load in (type(drafter), AutoModel, AutoDrafter):
        again = load.from_pretrained(tmp_path).eval()
        assert type(again) is type(drafter)
        assert not again.is_attached
        assert again.config.to_diff_dict().keys() >= {"text_config", "target_layer_ids"}
        for name in ("target_layer_ids", "num_target_layers", "draft_vocab_size", "num_drafts", "target_hidden_size"):
            assert getattr(again.config, name) == getattr(drafter.config, name)
        assert again.generation_config.num_assistant_tokens == 2
        assert again.generation_config.verification_schedule == "confidence"
        assert again.generation_config.assistant_confidence_threshold == 0.35
        again.attach(tiny_target)
        _, scores_again, _ = propose(again)
        assert_same(scores_again, scores)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(drafter.config)


def test_config_json_says_everything(variant, tiny_target, tmp_path):
    """Defaults are written too: a later version with other defaults reads the same drafter."""
    drafter = make(variant, tiny_target)
    drafter.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    expected = {"target_layer_ids", "num_target_layers", "target_hidden_size", "own_embedding", "own_head"}
    expected |= {"text_config", "architectures"}
    if "eagle3" in variant:
        expected |= {"num_drafts", "step_loss_decay"}
    else:
        expected |= {"block_size", "sample_from_anchor", "mask_token_id"}
    if "dspark" in variant:
        expected |= {"markov_head_type", "markov_rank", "enable_confidence_head", "confidence_head_with_markov"}
    assert expected <= set(stored)
    assert {"rope_parameters", "head_dim", "num_key_value_heads"} <= set(stored["text_config"])


def test_settings_default_without_their_file(tiny_target, tmp_path):
    make("dspark", tiny_target).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    settings = AutoDrafter.from_pretrained(tmp_path).generation_config
    assert settings.num_assistant_tokens == 4
    assert settings.verification_schedule is None
    assert settings.assistant_confidence_threshold is None


def test_dtype_of_loading(tiny_target, tmp_path):
    make("dspark", tiny_target, reduced=True).save_pretrained(tmp_path)
    drafter = AutoDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    # The map of the vocabulary is not a number to round.
    assert (drafter.d2t.dtype, drafter.t2d.dtype) == (torch.long, torch.bool)


# ---------------------------------------------------------------------- decoding


@pytest.mark.parametrize("reduced", [False, True])
def test_stateless(variant, reduced, tiny_target):
    """Two sequences interleaved on one drafter, and a proposal repeated, give what each gives alone."""
    drafter = make(variant, tiny_target, reduced).eval()
    _, alone, _ = propose(drafter, 6)
    _, other, _ = propose(drafter, 9)
    first, second = drafter.new_cache(), drafter.new_cache()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(1, 9, drafter.fc.in_features, generator=generator)
        drafter.extend(second, features[:, :2], torch.randint(0, 64, (1, 2)))
    assert second.get_seq_length() == 2
    proposal, scores, _ = propose(drafter, 6, first)
    assert torch.equal(scores, alone)
    assert first.get_seq_length() == 6
    anchor = torch.tensor([5])
    one, two = drafter.propose(first, anchor), drafter.propose(first, anchor)
    assert torch.equal(one.tokens, two.tokens)
    assert first.get_seq_length() == 6
    assert second.get_seq_length() == 2
    _, scores, _ = propose(drafter, 9)
    assert torch.equal(scores, other)
    assert proposal.tokens.shape == (1, drafter.num_drafts)


@pytest.mark.parametrize("reduced", [False, True])
def test_context_in_pieces(variant, reduced, tiny_target):
    """Features taken in round by round give the same block as all at once."""
    drafter = make(variant, tiny_target, reduced).eval()
    features = torch.randn(1, 8, drafter.fc.in_features)
    tokens = torch.randint(0, 64, (1, 8))
    whole, pieces = drafter.new_cache(), drafter.new_cache()
    with torch.no_grad():
        drafter.extend(whole, features, tokens)
        for start, end in ((0, 5), (5, 6), (6, 8)):
            drafter.extend(pieces, features[:, start:end], tokens[:, start:end])
            drafter.propose(pieces, tokens[:, end - 1])
        draw = lambda scores, drafted: (scores.argmax(-1), torch.softmax(scores, -1))  # noqa: E731
        one, two = drafter.propose(whole, tokens[:, -1], draw=draw), drafter.propose(pieces, tokens[:, -1], draw=draw)
    assert torch.equal(one.tokens, two.tokens)
    torch.testing.assert_close(one.probabilities, two.probabilities, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reduced", [False, True])
def test_confidence_without_a_head_is_the_largest_probability(variant, reduced, tiny_target):
    drafter = make(variant, tiny_target, reduced).eval()
    proposal, scores, _ = propose(drafter)
    assert proposal.confidences.shape == proposal.tokens.shape
    assert bool(((proposal.confidences > 0) & (proposal.confidences < 1)).all())
    if getattr(drafter, "confidence_head", None) is None:
        torch.testing.assert_close(proposal.confidences, scores.softmax(-1).amax(-1))


@pytest.mark.parametrize("reduced", [False, True])
def test_rows_are_independent(variant, reduced, tiny_target):
    drafter = make(variant, tiny_target, reduced).eval()
    features, tokens = torch.randn(3, 7, drafter.fc.in_features), torch.randint(0, 64, (3, 7))
    with torch.no_grad():
        cache = drafter.new_cache()
        drafter.extend(cache, features, tokens)
        together = drafter.propose(cache, tokens[:, -1])
        for row in range(3):
            cache = drafter.new_cache()
            drafter.extend(cache, features[row : row + 1], tokens[row : row + 1])
            alone = drafter.propose(cache, tokens[row : row + 1, -1])
            assert torch.equal(alone.tokens[0], together.tokens[row])
            torch.testing.assert_close(alone.confidences[0], together.confidences[row])


@pytest.mark.parametrize("reduced", [False, True])
def test_fewer_drafts_are_a_prefix(variant, reduced, tiny_target):
    drafter = make(variant, tiny_target, reduced).eval()
    whole, scores, _ = propose(drafter)
    for count in range(1, drafter.num_drafts + 1):
        part, part_scores, _ = propose(drafter, num_drafts=count)
        assert torch.equal(part.tokens, whole.tokens[:, :count])
        assert_same(part_scores, scores[:, :count])
    if reduced:
        assert set(whole.tokens.flatten().tolist()) <= set(drafter.draft_ids.tolist())


def test_greedy_proposal_is_the_likeliest_tokens(variant, tiny_target):
    drafter = make(variant, tiny_target, reduced=True).eval()
    features, tokens = torch.randn(1, 6, drafter.fc.in_features), torch.randint(0, 64, (1, 6))
    cache, scores = drafter.new_cache(), []

    def draw(slot_scores, drafted):
        scores.append(slot_scores)
        return slot_scores.argmax(-1), None

    with torch.no_grad():
        drafter.extend(cache, features, tokens)
        plain, drawn = drafter.propose(cache, tokens[:, -1]), drafter.propose(cache, tokens[:, -1], draw=draw)
    assert plain.probabilities is drawn.probabilities is None
    assert torch.equal(plain.tokens, drawn.tokens)
    assert torch.equal(plain.tokens, torch.stack(scores, dim=1).argmax(-1))


def test_a_drafter_does_not_generate(tiny_target):
    with pytest.raises(TypeError, match="only drafts: it can't generate alone"):
        make("dspark", tiny_target).generate(torch.tensor([[1]]))


# ---------------------------------------------------------------------- the target


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 48}, "hidden size 32, this one has 48"),
        ({"vocab_size": 65}, "vocabulary size 64, this one has 65"),
        ({"num_hidden_layers": 5}, "number of layers 4, this one has 5"),
    ],
)
def test_a_target_that_does_not_fit(variant, overrides, message):
    drafter = make(variant, make_target("llama"))
    other = make_target("llama", **overrides)
    with pytest.raises(ValueError, match=f"don't belong together: the drafter expects a target with {message}"):
        drafter.attach(other)
    # Before any forward, also through `generate`.
    other.register_forward_pre_hook(lambda *args: pytest.fail("a forward was computed"))
    with pytest.raises(ValueError, match="don't belong together"):
        other.generate(torch.tensor([[5, 6]]), assistant_model=drafter, max_new_tokens=4)


def test_the_message_names_the_target_it_was_made_for(tmp_path):
    make_target("llama").save_pretrained(tmp_path)
    drafter = make("dspark", str(tmp_path))
    with pytest.raises(ValueError, match=f"the drafter \\(made for {tmp_path}\\) expects"):
        drafter.attach(make_target("llama", vocab_size=65))


def test_unattached_drafter_says_what_it_lacks(tiny_target, tmp_path):
    make("dspark", tiny_target).save_pretrained(tmp_path)
    drafter = AutoDrafter.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"borrows its token embedding.*`drafter.attach"):
        propose(drafter)


def test_no_backbone_of_this_family():
    from hf_dspark import DSparkConfig

    config = DSparkConfig(text_config={"model_type": "gpt2"}, target_layer_ids=[1], mask_token_id=0)
    with pytest.raises(ValueError, match="No drafter backbone for the family 'gpt2'; available: llama, qwen3"):
        DSparkDrafter(config)


def with_copies(variant, target, folder, head_change=0.0, embedding_change=0.0):
    """A saved drafter that carries copies of the target's embedding and head, changed or not."""
    make(variant, target).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach() + embedding_change
    weights["lm_head.weight"] = target.get_output_embeddings().weight.detach() + head_change
    save_file({k: v.contiguous().clone() for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"own_embedding": True, "own_head": True}
    (folder / "config.json").write_text(json.dumps(config))
    return AutoDrafter.from_pretrained(folder)


def test_equal_copies_are_dropped(variant, tiny_target, tmp_path):
    drafter = with_copies(variant, tiny_target, tmp_path / "a")
    assert "lm_head.weight" in drafter.state_dict()
    drafter.save_pretrained(tmp_path / "unattached")
    assert {"lm_head.weight", "embed_tokens.weight"} <= set(load_file(tmp_path / "unattached" / "model.safetensors"))
    drafter.attach(tiny_target)
    assert drafter.embed_tokens is drafter.lm_head is None
    assert (drafter.config.own_embedding, drafter.config.own_head) == (False, False)
    drafter.save_pretrained(tmp_path / "attached")
    stored = load_file(tmp_path / "attached" / "model.safetensors")
    assert not {"lm_head.weight", "embed_tokens.weight"} & set(stored)
    again = AutoDrafter.from_pretrained(tmp_path / "attached").attach(tiny_target)
    assert_same(propose(again)[1], propose(drafter)[1])


def test_equality_is_judged_in_the_targets_type(tiny_target, tmp_path):
    drafter = with_copies("dspark", tiny_target, tmp_path)
    drafter.attach(tiny_target.to(torch.bfloat16))
    assert drafter.lm_head is None


@pytest.mark.parametrize("part", ["head", "embedding"])
def test_different_copies_are_kept(variant, part, tiny_target, tmp_path):
    drafter = with_copies(variant, tiny_target, tmp_path / "a", **{f"{part}_change": 0.1})
    changed, equal = ("lm_head", "embed_tokens") if part == "head" else ("embed_tokens", "lm_head")
    before = getattr(drafter, changed).weight.clone()
    drafter.attach(tiny_target)
    assert getattr(drafter, equal) is None
    assert torch.equal(getattr(drafter, changed).weight, before)
    drafter.save_pretrained(tmp_path / "b")
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert torch.equal(stored[f"{changed}.weight"], before)
    assert f"{equal}.weight" not in stored
    again = AutoDrafter.from_pretrained(tmp_path / "b").attach(tiny_target)
    assert_same(propose(again)[1], propose(drafter)[1])


def test_attaching_leaves_no_trace_of_the_target(variant, tiny_target):
    drafter = make(variant, tiny_target)
    count = len(list(drafter.modules()))
    drafter.attach(tiny_target)
    drafter.to(torch.bfloat16)
    assert len(list(drafter.modules())) == count
    assert {p.dtype for p in tiny_target.parameters()} == {torch.float32}


# ---------------------------------------------------------------------- damaged folders


def test_folder_without_weights(tiny_target, tmp_path):
    make("dspark", tiny_target).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for load in (DSparkDrafter, AutoDrafter):
        with pytest.raises(OSError, match=r"no model.safetensors"):
            load.from_pretrained(tmp_path)


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.weight"), r"missing keys \['fc.weight'\]"),
        (lambda w: w.update({"tree_head.weight": torch.zeros(2)}), r"unknown keys \['tree_head.weight'\]"),
        (lambda w: w.update({"norm.weight": torch.zeros(5)}), r"misshapen norm.weight \(5,\)"),
    ],
)
def test_keys_that_do_not_fit(change, message, tiny_target, tmp_path):
    make("dspark", tiny_target).save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    for load in (DSparkDrafter, AutoDrafter, AutoModel):
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w["d2t"].fill_(60), "outside 0..63.*must hold offsets"),
        (lambda w: w["d2t"].sub_(100), "outside 0..63"),
        (lambda w: w["d2t"].copy_(-torch.arange(24)), "maps two draft tokens to one target token"),
        (lambda w: w["t2d"].logical_not_(), "`d2t` and `t2d` disagree"),
    ],
)
def test_damaged_vocabulary_map(change, message, tiny_target, tmp_path):
    make("dspark", tiny_target, reduced=True).save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(tmp_path)


def test_reduced_vocabulary_without_its_map(tiny_target, tmp_path):
    make("dspark", tiny_target, reduced=True).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda w: w.pop("d2t"))
    with pytest.raises(ValueError, match=r"missing keys \['d2t'\]"):
        AutoDrafter.from_pretrained(tmp_path)


def reconfigure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        config.pop(name) if value is None else config.update({name: value})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("missing", ["target_layer_ids", "mask_token_id"])
def test_conventions_are_never_guessed(missing, tiny_target, tmp_path):
    make("dspark", tiny_target).save_pretrained(tmp_path)
    reconfigure(tmp_path, **{missing: None})
    with pytest.raises(ValueError, match=f"config.json.*`{missing}` is missing"):
        AutoDrafter.from_pretrained(tmp_path)


def test_loaded_as_another_kind(tiny_target, tmp_path):
    make("dspark", tiny_target).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint of the type 'dspark', not 'eagle3'.*AutoDrafter"):
        Eagle3Drafter.from_pretrained(tmp_path)


def test_a_drafter_is_no_causal_language_model(variant, tiny_target, tmp_path):
    make(variant, tiny_target).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a drafter, which can't generate alone: it needs its target"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a drafter, which can't generate alone"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))


def test_a_language_model_is_no_drafter(tiny_target, tmp_path):
    tiny_target.save_pretrained(tmp_path)
    for load in (AutoDrafter, DSparkDrafter):
        with pytest.raises(ValueError, match="no drafter checkpoint that hf-dspark knows: model_type"):
            load.from_pretrained(tmp_path)


def test_auto_drafter_is_not_instantiated():
    with pytest.raises(TypeError, match=r"AutoDrafter.from_pretrained"):
        AutoDrafter()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("confidence_temperatures", list(np.ones(4, np.float32)), "`confidence_temperatures` .* is no such setting"),
        ("num_assistant_tokens", 99, "`num_assistant_tokens` 99 is no number of drafts from 1 to 4"),
        ("draft_context_window", 0, "`draft_context_window` 0 is no such setting"),
        ("temperature", 0.7, "can't be saved"),
    ],
)
def test_settings_that_could_not_be_loaded_are_not_saved(tiny_target, tmp_path, name, value, message):
    drafter = make("dspark", tiny_target)
    setattr(drafter.generation_config, name, value)
    with pytest.raises(ValueError, match=message):
        drafter.save_pretrained(tmp_path / "there")
    assert not (tmp_path / "there").exists()
