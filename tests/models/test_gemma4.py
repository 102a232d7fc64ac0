"""Drafters of Gemma 4 targets: fresh ones for every kind of target, what their configs keep, scales and caps."""

import json

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
)
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedForCausalLM

from hf_dspark import AutoDrafter, DFlashDrafter, DraftConfig, DraftTrainer, DSparkConfig, DSparkDrafter, Eagle3Drafter


KINDS = {"dspark": DSparkDrafter, "dflash": DFlashDrafter, "eagle3": Eagle3Drafter}
CAP = 5.0
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": CAP,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64}
SHARING = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
IMAGE, VIDEO, AUDIO, BEGIN, END = 60, 59, 58, 61, 62
MULTIMODAL = {
    "audio_config": None,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "boi_token_id": BEGIN,
    "eoi_token_id": END,
}
VISION = {"patch_size": 2, "pooling_kernel_size": 2}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}
PATCHES = {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16}
TARGETS = {
    "text": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**TEXT, **PER_LAYER)),
    "values": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**(TEXT | {"attention_k_eq_v": False}), **PER_LAYER)),
    "sharing": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**(TEXT | PER_LAYER | SHARING))),
    "experts": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**TEXT, **PER_LAYER, **EXPERTS)),
    "unified": lambda: Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**TEXT)),
    "multimodal": lambda: Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=TEXT | PER_LAYER, vision_config=VISION | TOWER, **MULTIMODAL)
    ),
    "unified multimodal": lambda: Gemma4UnifiedForConditionalGeneration(
        Gemma4UnifiedConfig(text_config=TEXT, vision_config=VISION | PATCHES, **MULTIMODAL)
    ),
}


def make_target(name: str = "text"):
    """A random target with varied output: large matrices, and norms that let the layers outweigh the embeddings."""
    torch.manual_seed(0)
    target = TARGETS[name]().eval()
    with torch.no_grad():
        for key, parameter in target.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            elif "post_" in key:
                parameter.fill_(3.0)
        for layer in target.get_decoder().layers:
            layer.layer_scalar.uniform_(0.8, 1.2)
    return target


def make_drafter(kind: str, target, **overrides):
    torch.manual_seed(7)
    fields = {} if kind == "eagle3" else {"mask_token_id": 4, "num_hidden_layers": 2, "block_size": 4}
    fields |= {"markov_rank": 8} if kind == "dspark" else {"num_drafts": 4} if kind == "eagle3" else {}
    return KINDS[kind].from_target(target, **(fields | overrides))


def generate(target, ids, **kwargs):
    return target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, **kwargs)


def prompt(seed: int = 5) -> torch.Tensor:
    return torch.randint(5, 57, (1, 14), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TARGETS)
def test_lossless(name, kind):
    target = make_target(name)
    drafter = make_drafter(kind, target)
    plain, ours = generate(target, prompt()), generate(target, prompt(), assistant_model=drafter)
    assert torch.equal(plain, ours)
    assert len(set(plain[0, 14:].tolist())) > 3


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
@pytest.mark.parametrize(
    ("name", "patches"), [("multimodal", (16, 12)), ("unified multimodal", (4, 48))], ids=["tower", "patches"]
)
def test_images_in_the_prompt(name, patches, kind):
    target = make_target(name)
    drafter = make_drafter(kind, target)
    ids = prompt()
    ids[0, 3:9] = torch.tensor([BEGIN, *[IMAGE] * 4, END])
    side = int(patches[0] ** 0.5)
    positions = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), dim=-1)
    image = {
        "pixel_values": torch.rand(1, *patches, generator=torch.Generator().manual_seed(1)),
        "image_position_ids": positions.view(1, -1, 2),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }
    plain, ours = generate(target, ids, **image), generate(target, ids, assistant_model=drafter, **image)
    assert torch.equal(plain, ours)
    other = image | {"pixel_values": 1 - image["pixel_values"]}
    assert not torch.equal(plain, generate(target, ids, **other)), "the image makes no difference"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["text", "values", "unified multimodal"])
def test_saved_and_loaded(name, kind, tmp_path):
    target = make_target(name)
    drafter = make_drafter(kind, target).eval()
    drafter.save_pretrained(tmp_path)
    # Everything that changes a number stands in the file, in words that don't depend on transformers' own defaults.
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert (text["model_type"], text["head_dim"]) == ("gemma4_text", 16)
    assert text["num_key_value_heads"] == (2 if name == "values" else 1)
    assert text["attention_k_eq_v"] is (name != "values")
    assert (text["per_layer_config"], text["final_logit_softcapping"]) == ({}, CAP)
    assert set(text["layer_types"]) == {"full_attention"}
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
    assert text["rope_parameters"] == {"full_attention": rope}
    again = AutoDrafter.from_pretrained(tmp_path).attach(target).eval()
    ours, theirs = drafter.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(drafter.rotary_emb.inv_freq, again.rotary_emb.inv_freq)
    features = torch.randn(1, 9, drafter.fc.in_features)
    proposals = []
    for each in (drafter, again):
        cache = each.new_cache()
        with torch.no_grad():
            each.extend(cache, features, prompt()[:, :9])
            proposals.append(each.propose(cache, torch.tensor([8]), draw=lambda s, _: (s.argmax(-1), s)))
    assert torch.equal(proposals[0].tokens, proposals[1].tokens)
    torch.testing.assert_close(proposals[0].probabilities, proposals[1].probabilities, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["text", "unified multimodal"])
@pytest.mark.parametrize("kind", KINDS)
def test_trains(kind, name, tmp_path):
    target = make_target(name)
    drafter = make_drafter(kind, target)
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    rows = [{"input_ids": prompt(seed)[0].tolist(), "loss_mask": [0] * 4 + [1] * 10} for seed in range(4)]
    args = DraftConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        num_anchors=4,
        learning_rate=5e-3,
        warmup_steps=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = DraftTrainer(model=drafter, target_model=target, args=args, train_dataset=Dataset.from_list(rows))
    assert trainer.train().training_loss > 0
    moved = {key for key, value in drafter.state_dict().items() if not torch.equal(value, before[key])}
    # EAGLE-3 begins as a layer that doesn't read the embedding.
    resting = {"layers.0.input_layernorm.weight"} if kind == "eagle3" else set()
    assert {key for key, _ in drafter.named_parameters()} - resting == moved
    # The layers' scale is no parameter, in the target neither.
    assert "layers.0.layer_scalar" in before.keys() - moved
    plain = generate(target, prompt())
    assert torch.equal(plain, generate(target, prompt(), assistant_model=drafter))


def test_begins_as_the_last_layers_of_its_kind():
    target = make_target()
    drafter = make_drafter("dspark", target)
    for ours, index in zip(drafter.layers, (2, 5)):
        theirs = target.model.layers[index].state_dict()
        assert theirs.keys() == ours.state_dict().keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.state_dict().items())
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_embedding_is_scaled_as_the_targets(dtype, tmp_path):
    target = make_target().to(dtype)
    borrowing = make_drafter("dspark", target).to(dtype)
    config = DSparkConfig(**(borrowing.config.to_dict() | {"own_embedding": True}))
    owning = DSparkDrafter(config).to(dtype)
    owning.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    ids = prompt()
    assert torch.equal(owning.embed(ids), target.get_input_embeddings()(ids))
    assert torch.equal(borrowing.embed(ids), target.get_input_embeddings()(ids))
    # Equal to the target's, it is dropped, and nothing changes.
    assert owning.attach(target).embed_tokens is None
    assert torch.equal(owning.embed(ids), borrowing.embed(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_are_capped_as_the_targets(dtype):
    target = make_target().to(dtype)
    drafter = make_drafter("dspark", target).to(dtype)
    hidden = target.model(prompt()).last_hidden_state[0]
    expected, rounding = target(prompt()).logits[0], 1e-5 if dtype == torch.float32 else 0.05
    assert CAP * 0.8 < expected.abs().max() <= CAP
    assert torch.equal(drafter.teacher_logits(hidden), expected)
    torch.testing.assert_close(drafter.base_logits(hidden), expected.float(), atol=rounding, rtol=0)
    assert drafter.base_logits(100 * hidden).abs().max() <= CAP


@torch.no_grad()
def test_the_serial_head_is_not_capped():
    target = make_target()
    drafter = make_drafter("dspark", target)
    drafter.markov_head.markov_w1.weight.fill_(1.0)
    drafter.markov_head.markov_w2.weight.fill_(10.0)
    cache, scores = drafter.new_cache(), []
    drafter.extend(cache, torch.randn(1, 5, drafter.fc.in_features), prompt()[:, :5])

    def draw(slot_scores, drafted):
        scores.append(slot_scores)
        return slot_scores.argmax(-1), None

    drafter.propose(cache, torch.tensor([8]), draw=draw)
    assert torch.stack(scores).min() >= 80 - CAP


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "Layer 0 .*'full_attention'.*'sliding_attention'"),
        ({"hidden_size_per_layer_input": 8}, "and hidden_size_per_layer_input"),
        ({"num_kv_shared_layers": 1}, "and num_kv_shared_layers"),
    ],
)
def test_layers_that_no_draft_has(change, message):
    config = make_drafter("dspark", make_target()).config.to_dict()
    config["text_config"] = config["text_config"] | change
    with pytest.raises(ValueError, match=message):
        DSparkDrafter(DSparkConfig(**config))


def deepspec_checkpoint(folder, **changes):
    """A checkpoint as that project writes it: the target's config with a drafter's fields, and all weights."""
    target = make_target()
    drafter = make_drafter("dflash", target, own_embedding=True, own_head=True, init_from_target=False)
    drafter.save_pretrained(folder)
    rope = {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"}}
    config = TEXT | PER_LAYER
    config |= {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "target_text_model_type": "gemma4_text",
        "num_hidden_layers": 2,
        "num_target_layers": 6,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": rope | {"rope_theta": None, "rope_type": "default"},
        "target_layer_ids": drafter.config.target_layer_ids,
        "block_size": 4,
        "mask_token_id": 4,
        "markov_rank": 0,
        "enable_confidence_head": False,
    }
    config = {key: value for key, value in (config | changes).items() if value != "left out"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_deepspec_checkpoint(tmp_path):
    drafter = AutoDrafter.from_pretrained(deepspec_checkpoint(tmp_path))
    assert type(drafter) is DFlashDrafter
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, stored[key]) for key, tensor in drafter.state_dict().items())
    text = drafter.config.text_config
    assert (text.head_dim, text.num_key_value_heads, text.final_logit_softcapping) == (16, 1, CAP)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_head_dim": "left out"}, r"config.json.*`global_head_dim` is missing"),
        ({"global_head_dim": 8}, r"misshapen.*self_attn.q_proj.weight"),
        ({"rope_parameters": "left out"}, r"config.json.*`rope_parameters` is missing"),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            r"config.json.*`full_attention` is missing",
        ),
        ({"attention_k_eq_v": False}, r"missing keys.*self_attn.v_proj.weight"),
    ],
)
def test_damaged_deepspec_checkpoints(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(deepspec_checkpoint(tmp_path, **changes))
