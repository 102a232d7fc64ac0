"""Fresh drafters: defaults scaled to the target, and weights that begin where the target ends."""

import itertools

import pytest
import torch
from conftest import make_target, make_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM, PhiConfig, PhiForCausalLM

from hf_dspark import DFlashDrafter, DSparkDrafter, Eagle3Drafter
from hf_dspark.models.fresh import draft_depth, feature_layers
from hf_dspark.models.vocabulary import draft_vocabulary


KINDS = {"dspark": DSparkDrafter, "dflash": DFlashDrafter, "eagle3": Eagle3Drafter}


def fresh(kind: str, target, **overrides):
    if kind != "eagle3":
        overrides.setdefault("mask_token_id", 3)
    return KINDS[kind].from_target(target, **overrides)


@pytest.mark.parametrize("layers", range(1, 90))
def test_feature_layers_are_spread_and_never_the_last(layers):
    ids = feature_layers(layers)
    assert ids == sorted(set(ids))
    assert 1 <= len(ids) <= 5
    assert ids[0] >= 0
    # A target of one layer has no layer but its last; its drafter needs other features.
    assert ids[-1] < max(layers - 1, 1)
    if layers >= 9:
        assert len(ids) == 5
        steps = [b - a for a, b in itertools.pairwise(ids)]
        assert max(steps) - min(steps) <= 1


def test_feature_layers_of_released_checkpoints():
    assert feature_layers(36) == [1, 9, 17, 25, 33]


def test_depth_is_the_papers_and_less_on_small_targets():
    assert draft_depth(36) == 5
    assert draft_depth(30) == 5
    assert draft_depth(12) == 2
    assert draft_depth(2) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_recorded(kind, tiny_target):
    drafter = fresh(kind, tiny_target)
    config = drafter.config.to_dict()
    assert config["model_type"] == kind
    assert config["target_layer_ids"] == feature_layers(4)
    assert (config["num_target_layers"], config["target_hidden_size"]) == (4, 32)
    assert config["text_config"]["model_type"] == tiny_target.config.model_type
    assert config["text_config"]["rope_parameters"] == tiny_target.config.rope_parameters
    assert config["text_config"]["tie_word_embeddings"] is False
    assert (config["own_embedding"], config["own_head"]) == (False, False)
    if kind == "eagle3":
        assert (config["num_drafts"], config["step_loss_decay"]) == (7, 0.8)
    else:
        assert (config["block_size"], config["sample_from_anchor"], config["mask_token_id"]) == (7, True, 3)
    if kind == "dspark":
        assert (config["markov_head_type"], config["markov_rank"]) == ("vanilla", 256)
        assert (config["enable_confidence_head"], config["confidence_head_with_markov"]) == (True, True)


@pytest.mark.parametrize("ids", [(None, None, None), (1, 2, 0), (5, [6, 7], None)])
def test_special_tokens_are_the_targets(ids):
    """A pipeline takes a drafter whose special tokens differ for one with another tokenizer."""
    bos, eos, pad = ids
    drafter = fresh("dspark", make_target("llama", bos_token_id=bos, eos_token_id=eos, pad_token_id=pad))
    text = drafter.config.get_text_config()
    assert (text.bos_token_id, text.eos_token_id, text.pad_token_id) == (bos, eos, pad)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_float32_and_its_own(kind):
    target = make_target("llama").to(torch.bfloat16)
    drafter = fresh(kind, target)
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    theirs = {id(p) for p in target.parameters()}
    assert not any(id(p) in theirs for p in drafter.parameters())
    names = set(drafter.state_dict())
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    assert drafter.is_attached


@pytest.mark.parametrize("kind", KINDS)
def test_target_by_folder(kind, tmp_path, tiny_target):
    tiny_target.save_pretrained(tmp_path)
    drafter = fresh(kind, str(tmp_path))
    assert drafter.config.target_name_or_path == str(tmp_path)
    assert fresh(kind, tmp_path).is_attached


# ---------------------------------------------------------------------- where the weights begin


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_begins_as_the_last_layers(kind, tiny_target):
    drafter = fresh(kind, tiny_target, num_hidden_layers=2)
    for ours, theirs in zip(drafter.layers, tiny_target.model.layers[-2:]):
        for name, parameter in theirs.named_parameters():
            assert torch.equal(ours.get_parameter(name), parameter), name
    assert torch.equal(drafter.norm.weight, tiny_target.model.norm.weight)
    features = torch.randn(1, 3, 32 * len(drafter.config.target_layer_ids))
    # `fc` passes on the deepest feature.
    assert torch.equal(drafter.fc(features), features[..., -32:])


def test_eagle3_begins_as_the_last_layer(tiny_target):
    drafter = fresh("eagle3", tiny_target)
    ours, theirs = drafter.layers[0], tiny_target.model.layers[-1]
    assert torch.equal(ours.mlp.gate_proj.weight, theirs.mlp.gate_proj.weight)
    # It reads embedding and feature side by side; the feature half is the target's.
    assert torch.equal(ours.self_attn.q_proj.weight[:, 32:], theirs.self_attn.q_proj.weight)
    assert not ours.self_attn.q_proj.weight[:, :32].any()


@pytest.mark.parametrize("kind", KINDS)
def test_begins_at_random_when_asked(kind, tiny_target):
    drafter = fresh(kind, tiny_target, init_from_target=False)
    assert not torch.equal(drafter.layers[0].mlp.gate_proj.weight, tiny_target.model.layers[-1].mlp.gate_proj.weight)
    assert drafter.fc.weight.count_nonzero() == drafter.fc.weight.numel()


def test_deepest_feature_wherever_it_stands(tiny_target):
    drafter = fresh("dspark", tiny_target, target_layer_ids=[2, 0, -1])
    features = torch.randn(1, 3, 96)
    assert torch.equal(drafter.fc(features), features[..., :32])


# ---------------------------------------------------------------------- mask token


def test_mask_token_behind_the_tokenizers_last():
    tokenizer = make_tokenizer()
    target = make_target("llama", vocab_size=len(tokenizer) + 3)
    assert DSparkDrafter.from_target(target, tokenizer=tokenizer).config.mask_token_id == len(tokenizer)


def test_mask_token_is_none_that_text_holds():
    """Ids may have a hole, so that how many there are says nothing."""

    class Holed:
        mask_token_id = None

        def __len__(self):
            return 63

        def get_vocab(self):
            return {f"t{i}": i for i in range(64) if i != 5}

    assert DSparkDrafter.from_target(make_target("llama"), tokenizer=Holed()).config.mask_token_id == 5


def test_mask_token_that_is_reserved():
    tokenizer = make_tokenizer()
    target = make_target("llama", vocab_size=len(tokenizer))
    expected = tokenizer.convert_tokens_to_ids("<|reserved_0|>")
    assert DFlashDrafter.from_target(target, tokenizer=tokenizer).config.mask_token_id == expected


def test_mask_token_of_the_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.mask_token = "<|pad|>"
    target = make_target("llama", vocab_size=len(tokenizer))
    assert DFlashDrafter.from_target(target, tokenizer=tokenizer).config.mask_token_id == tokenizer.mask_token_id


def test_mask_token_given_wins():
    tokenizer = make_tokenizer()
    target = make_target("llama", vocab_size=len(tokenizer))
    assert DFlashDrafter.from_target(target, tokenizer=tokenizer, mask_token_id=9).config.mask_token_id == 9


def test_no_mask_token():
    target = make_target("llama")
    with pytest.raises(ValueError, match=r"No `mask_token_id` given and no `tokenizer=` .*Pass `mask_token_id=`"):
        DSparkDrafter.from_target(target)

    class Bare:
        mask_token_id = None

        def __len__(self):
            return 64

        def get_vocab(self):
            return {f"t{i}": i for i in range(64)}

        def get_added_vocab(self):
            return {"<|im_start|>": 5}

    with pytest.raises(ValueError, match=r"no unused or reserved token. Pass `mask_token_id=`"):
        DSparkDrafter.from_target(target, tokenizer=Bare())


def test_eagle3_needs_no_mask_token():
    Eagle3Drafter.from_target(make_target("llama"))


# ---------------------------------------------------------------------- reduced vocabulary


def test_draft_vocabulary_keeps_the_most_frequent():
    d2t, t2d = draft_vocabulary(torch.tensor([5, 0, 9, 5, 1, 9]), 3)
    # 9, 9, and of the two fives the one with the smaller id.
    assert (d2t + torch.arange(3)).tolist() == [0, 2, 5]
    assert t2d.tolist() == [True, False, True, False, False, True]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_reduced_vocabulary(kind, tiny_target):
    counts = torch.arange(64) % 7
    drafter = fresh(kind, tiny_target, draft_vocab_size=20, token_counts=counts)
    kept = drafter.draft_ids
    assert len(kept) == 20
    assert counts[kept].min() >= counts[~drafter.t2d].max()
    # There and back, and nowhere for the others.
    assert torch.equal(drafter.to_target_ids(torch.arange(20)), kept)
    assert torch.equal(drafter.to_draft_ids(kept), torch.arange(20))
    assert (drafter.to_draft_ids((~drafter.t2d).nonzero()[:, 0]) == -1).all()
    # The head is the target's rows.
    hidden = torch.randn(3, 32)
    expected = (hidden @ tiny_target.lm_head.weight.T)[:, kept]
    torch.testing.assert_close(drafter.base_logits(hidden), expected)
    spread = drafter.spread(drafter.base_logits(hidden))
    assert spread.shape == (3, 64)
    torch.testing.assert_close(spread[:, kept], expected)
    assert spread[:, ~drafter.t2d].isneginf().all()
    if kind == "dspark":
        # Any token can precede a draft, only 20 can be one.
        assert drafter.markov_head.markov_w1.num_embeddings == 64
        assert drafter.markov_head.markov_w2.out_features == 20


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"draft_vocab_size": 20}, "needs both `draft_vocab_size=` and `token_counts=`"),
        ({"token_counts": torch.ones(64)}, "needs both `draft_vocab_size=` and `token_counts=`"),
        ({"draft_vocab_size": 20, "token_counts": torch.ones(63)}, r"`token_counts` has the shape \(63,\).*\(64,\)"),
        ({"draft_vocab_size": 20, "token_counts": torch.ones(64, 2)}, r"`token_counts` has the shape \(64, 2\)"),
        ({"draft_vocab_size": 20, "token_counts": torch.full((64,), float("nan"))}, "`token_counts` must be counts"),
        ({"draft_vocab_size": 8.0, "token_counts": torch.ones(64)}, "`draft_vocab_size` 8.0 must be"),
        ({"draft_vocab_size": 65, "token_counts": torch.ones(64)}, "`draft_vocab_size` 65 must be between 1 and 64"),
        ({"mask_token_id": 64}, "`mask_token_id` 64 is outside the vocabulary of 64"),
        ({"target_layer_ids": [1, 3]}, r"`target_layer_ids` \[3\] are outside -1..2.*its last one can't be used"),
        ({"target_layer_ids": []}, "no `target_layer_ids`"),
        ({"markov_head_type": "tree"}, "`markov_head_type` 'tree' is unknown; choose one of vanilla, gated, rnn"),
        ({"block_size": 1, "sample_from_anchor": False}, "proposes nothing"),
    ],
)
def test_bad_overrides(overrides, message):
    with pytest.raises(ValueError, match=message):
        fresh("dspark", make_target("llama"), **overrides)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("dspark", {"num_layers": 3, "blocksize": 3}, "knows no argument 'blocksize', 'num_layers', and DSparkConfig"),
        ("dspark", {"init_from_targets": False}, "knows no argument 'init_from_targets'"),
        ("dspark", {"dtype": torch.bfloat16}, "knows no argument 'dtype'"),
        (
            "eagle3",
            {"block_size": 3},
            "knows no argument 'block_size', and Eagle3Config has no such field.*num_drafts",
        ),
        ("dspark", {"init_from_target": "no"}, "`init_from_target` must be True or False, not 'no'"),
        ("dspark", {"draft_vocab_size": 2, "token_counts": {1: 5}}, "`token_counts` must be a tensor.*not a dict"),
    ],
)
def test_overrides_that_mean_nothing(kind, overrides, message):
    with pytest.raises(TypeError, match=message):
        fresh(kind, make_target("llama"), **overrides)


def test_a_target_whose_embedding_is_narrower_than_its_layers():
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 32, "vocab_size": 64}
    target = OPTForCausalLM(OPTConfig(word_embed_proj_dim=16, **sizes))
    with pytest.raises(ValueError, match="embeds tokens in a width of 16 and its layers have 32"):
        fresh("dspark", target)


@pytest.mark.parametrize("inner,width", [(None, 128), (80, 80)])
def test_layers_are_as_wide_as_those_of_a_target_with_other_names(inner, width):
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_inner": inner, "vocab_size": 64}
    drafter = fresh("dspark", GPT2LMHeadModel(GPT2Config(**sizes)))
    assert drafter.layers[0].mlp.up_proj.out_features == width


def test_a_biased_head_is_the_teachers_and_the_draft_heads_too():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    target = PhiForCausalLM(PhiConfig(vocab_size=64, **sizes)).eval()
    torch.nn.init.normal_(target.lm_head.bias)
    drafter = fresh("dspark", target, draft_vocab_size=20, token_counts=torch.arange(64))
    ids = torch.arange(6)[None]
    hidden = target.base_model(ids).last_hidden_state[0].detach()
    expected = target(ids).logits[0].detach()
    torch.testing.assert_close(drafter.teacher_logits(hidden), expected)
    torch.testing.assert_close(drafter.base_logits(hidden), expected[:, drafter.draft_ids])
    # Training adds the same bias that drafting does.
    torch.testing.assert_close(drafter.head_bias(), target.lm_head.bias.detach()[drafter.draft_ids])


def test_a_draft_head_made_in_inference_mode_can_be_trained_with():
    target = make_target("llama")
    counts = {"draft_vocab_size": 20, "token_counts": torch.arange(64)}
    with torch.inference_mode():
        drafter = fresh("dspark", target, **counts)
        drafter.attach(make_target("llama", 1))
    hidden = torch.randn(3, 32, requires_grad=True)
    drafter.base_logits(hidden).sum().backward()
    assert hidden.grad.any()


def test_eagle3_has_one_layer():
    with pytest.raises(ValueError, match="EAGLE-3 drafters have one layer, this config has 2"):
        fresh("eagle3", make_target("llama"), num_hidden_layers=2)


def test_a_drafter_is_no_target():
    drafter = fresh("dspark", make_target("llama"))
    with pytest.raises(TypeError, match="The target is itself a drafter"):
        fresh("dspark", drafter)
    with pytest.raises(TypeError, match="The target is itself a drafter"):
        fresh("dspark", make_target("llama")).attach(drafter)
