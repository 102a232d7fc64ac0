"""transformers' own DFlash loop (`speculation_type="dflash"`) takes our DFlash drafters where it can."""

import contextlib
import itertools

import pytest
import torch
from conftest import make_target
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    PrefixConstrainedLogitsProcessor,
    StaticCache,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

from hf_dspark import AutoDrafter, DFlashConfig, DFlashDrafter, DSparkDrafter, Eagle3Drafter


def make_drafter(target, **overrides) -> DFlashDrafter:
    """A drafter that begins as its target's last layers, so that some of its drafts are accepted."""
    fields = {"block_size": 5, "sample_from_anchor": False, "num_hidden_layers": 2, "target_layer_ids": [0, 1, 2]}
    torch.manual_seed(1)
    return DFlashDrafter.from_target(target, mask_token_id=63, **(fields | overrides)).eval()


@contextlib.contextmanager
def recorded_positions(target):
    """Where each of the target's forwards begins."""
    starts = []

    def record(module, args, kwargs):
        cache = kwargs["cache"]
        starts.append(0 if cache is None else cache.get_seq_length())

    handle = target.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield starts
    finally:
        handle.remove()


def run(target, ids, **kwargs) -> tuple[list[int], list[int]]:
    """The output, and the number of tokens that each round but the last committed."""
    with recorded_positions(target) as starts:
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, **kwargs
        )
    return output[0].tolist(), [after - before for before, after in itertools.pairwise(starts[1:])]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("window", [None, 6])
def test_their_loop_and_ours_do_the_same(family, window):
    target = make_target(family)
    drafter = make_drafter(target)
    if window:
        text = drafter.config.text_config
        text.layer_types, text.sliding_window = ["sliding_attention", "full_attention"], window
    lengths = []
    for seed in range(4):
        ids = torch.randint(63, (1, 12), generator=torch.Generator().manual_seed(seed))
        plain = run(target, ids)[0]
        ours = run(target, ids, assistant_model=drafter)
        theirs = run(target, ids, assistant_model=drafter, speculation_type="dflash")
        assert ours[0] == theirs[0] == plain
        # Both loops begin their last round at the same place.
        assert ours[1] == theirs[1]
        lengths += theirs[1]
    assert len(set(lengths)) > 1, lengths


def test_an_assistant_of_transformers_drafts_in_our_loop_as_in_theirs(tmp_path):
    """With a target that norms its embeddings, which drafts do without."""
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = MuseGlimmerConfig(text_config=text | {"sliding_window": 16}, vision_config=vision, image_token_id=62)
    target = MuseGlimmerForConditionalGeneration(config).eval()
    fields = {"target_layer_ids": [0, 1, 2], "block_size": 4, "mask_token_id": 63, "num_hidden_layers": 1}
    assistant = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**(text | fields | {"sliding_window": 6}))).eval()
    with torch.no_grad():
        for parameter in (*target.model.language_model.parameters(), *target.lm_head.parameters()):
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3)
        # As if trained: the assistant passes on the deepest feature and is close to the target's last layer.
        assistant.encoder.fc.weight.zero_()[:, 64:].fill_diagonal_(1.0)
        for name, parameter in assistant.layers[0].named_parameters():
            theirs = target.model.language_model.layers[3].state_dict().get(name)
            if theirs is not None and theirs.shape == parameter.shape:
                parameter.copy_(theirs)
    assistant.save_pretrained(tmp_path)
    drafter, lengths = AutoDrafter.from_pretrained(tmp_path), []
    assert drafter.config.source_format == "transformers"
    for seed in range(4):
        ids = torch.randint(60, (1, 12), generator=torch.Generator().manual_seed(seed))
        theirs = run(target, ids, assistant_model=assistant, speculation_type="dflash")
        assert run(target, ids, assistant_model=drafter) == theirs
        assert run(target, ids, assistant_model=drafter, speculation_type="dflash") == theirs
        assert run(target, ids)[0] == theirs[0]
        lengths += theirs[1]
    assert len(set(lengths)) > 1, lengths


@torch.no_grad()
def test_padding_is_no_context():
    target = make_target("qwen3")
    drafter = make_drafter(target)
    ids = torch.randint(63, (1, 9), generator=torch.Generator().manual_seed(5))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 9])
    settings = {"assistant_model": drafter, "speculation_type": "dflash", "max_new_tokens": 24, "do_sample": False}
    with recorded_positions(target) as with_padding:
        output = target.generate(padded, attention_mask=mask, **settings)
    with recorded_positions(target) as without:
        assert torch.equal(target.generate(ids, attention_mask=torch.ones_like(ids), **settings), output[:, 4:])
    assert [start - 4 for start in with_padding[1:]] == without[1:]


def test_the_passed_config_asks_for_it_too():
    target = make_target("qwen3")
    ids = torch.randint(63, (1, 9), generator=torch.Generator().manual_seed(5))
    config = GenerationConfig(
        speculation_type="dflash", max_new_tokens=8, do_sample=False, return_dict_in_generate=True
    )
    output = target.generate(ids, generation_config=config, assistant_model=make_drafter(target))
    # Our loop's output carries its statistics.
    assert not hasattr(output, "speculation")


def test_sampling_and_types_of_their_own():
    target = make_target("qwen3")
    drafter = make_drafter(target).to(torch.bfloat16).train()
    ids = torch.randint(63, (1, 9), generator=torch.Generator().manual_seed(5))
    settings = {"assistant_model": drafter, "speculation_type": "dflash", "max_new_tokens": 16}
    torch.manual_seed(0)
    assert target.generate(ids, do_sample=True, temperature=0.7, **settings).shape == (1, 25)
    assert drafter.training
    assert torch.equal(
        target.generate(ids, do_sample=False, **settings), target.generate(ids, do_sample=False, max_new_tokens=16)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda target: make_drafter(target, sample_from_anchor=True), r"every slot of a block proposes"),
        (lambda target: DSparkDrafter.from_target(target, mask_token_id=63), "this one is DSpark"),
        (lambda target: Eagle3Drafter.from_target(target), "this one is EAGLE-3"),
        (
            lambda target: make_drafter(target, draft_vocab_size=16, token_counts=torch.ones(64)),
            "this one has a draft vocabulary of 16",
        ),
    ],
)
def test_other_drafters_are_refused_by_name(make, message):
    target = make_target("qwen3")
    with recorded_positions(target) as starts, pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([[1, 2]]), assistant_model=make(target), speculation_type="dflash")
    assert starts == []


def test_an_own_head_is_refused_unless_it_is_the_targets():
    target = make_target("qwen3")
    text = make_drafter(target).config.text_config
    fields = {"target_layer_ids": [0, 1, 2], "mask_token_id": 63, "sample_from_anchor": False}
    drafter = DFlashDrafter(DFlashConfig(text_config=text, own_head=True, **fields))
    ask = {"assistant_model": drafter, "speculation_type": "dflash", "max_new_tokens": 4}
    with pytest.raises(ValueError, match="its own LM head"):
        target.generate(torch.tensor([[1, 2]]), **ask)
    drafter = DFlashDrafter(DFlashConfig(text_config=text, own_head=True, **fields))
    drafter.lm_head.weight.data.copy_(target.lm_head.weight)
    target.generate(torch.tensor([[1, 2]]), **(ask | {"assistant_model": drafter}))


def test_another_speculation_type_is_refused():
    target = make_target("qwen3")
    with pytest.raises(ValueError, match="speculation_type='medusa'"):
        target.generate(torch.tensor([[1, 2]]), assistant_model=make_drafter(target), speculation_type="medusa")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"num_assistant_tokens": 2}, "num_assistant_tokens"),
        ({"assistant_confidence_threshold": 0.5}, "assistant_confidence_threshold"),
        ({"verification_schedule": "confidence"}, "verification_schedule"),
        ({"confidence_temperatures": [1.0] * 4}, "confidence_temperatures"),
        ({"draft_context_window": 4}, "draft_context_window"),
        ({"cache_implementation": "static"}, "a static cache"),
        ({"cache_implementation": "quantized"}, "a quantized cache"),
        ({"output_hidden_states": True, "output_scores": True}, "output_hidden_states"),
        ({"output_attentions": True}, "output_attentions"),
        ({"num_beams": 2}, "num_beams > 1"),
        ({"use_cache": False}, "use_cache=False"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"assistant_early_exit": 2}, "assistant_early_exit"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
        ({"stop_strings": ["a"]}, "stop_strings"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)}, "watermarking_config"),
        ({"use_mtp": True}, "use_mtp"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size"),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(9.0)])}, "stopping_criteria"),
    ],
)
@pytest.mark.parametrize("passed", ["in the call", "in a config"])
def test_what_their_loop_can_not_honour_is_refused_by_name(option, message, passed):
    target = make_target("qwen3")
    ask = {"assistant_model": make_drafter(target), "speculation_type": "dflash", "return_dict_in_generate": True}
    if passed == "in a config" and "stopping_criteria" not in option:
        config = GenerationConfig(speculation_type="dflash")
        for name, value in option.items():
            setattr(config, name, value)
        option = {"generation_config": config}
    with recorded_positions(target) as starts, pytest.raises(ValueError, match=f"speculation_type.*{message}"):
        target.generate(torch.tensor([[1, 2]]), **ask, **option)
    assert starts == []


def test_prompt_lookup_of_the_targets_own_is_refused():
    """It would take the place of the drafter."""
    target = make_target("qwen3")
    target.generation_config.prompt_lookup_num_tokens = 3
    ask = {"assistant_model": make_drafter(target), "speculation_type": "dflash"}
    with pytest.raises(ValueError, match=r"speculation_type.*prompt_lookup_num_tokens"):
        target.generate(torch.tensor([[1, 2]]), **ask)


class Counting(LogitsProcessor):
    """Favours a token that depends on the number of calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls] += 9
        return scores


def used_cache(target):
    cache = DynamicCache(config=target.config)
    target(torch.tensor([[1]]), past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (lambda target: {"past_key_values": StaticCache(config=target.config, max_cache_len=32)}, "a static cache"),
        (lambda target: {"past_key_values": used_cache(target)}, "a cache that holds tokens already"),
        (lambda target: {"inputs_embeds": torch.zeros(1, 2, 32)}, "`inputs_embeds`"),
        (
            lambda target: {"logits_processor": LogitsProcessorList([Counting()])},
            "Counting; if it keeps nothing.*`row_wise = True`",
        ),
        (lambda target: {"custom_generate": lambda model, *args, **kwargs: None}, "`custom_generate`"),
        (lambda target: {"assistant_tokenizer": object()}, "`assistant_tokenizer`"),
    ],
)
def test_what_their_loop_would_decode_otherwise_is_refused(option, message):
    target = make_target("qwen3")
    ask = {"assistant_model": make_drafter(target), "speculation_type": "dflash"} | option(target)
    with recorded_positions(target) as starts, pytest.raises(ValueError, match=f"does not support {message}"):
        target.generate(torch.tensor([[1, 2]]), **ask)
    assert starts == []


def test_an_empty_cache_and_processors_without_memory_are_taken():
    target = make_target("qwen3")
    ids = torch.randint(63, (1, 9), generator=torch.Generator().manual_seed(5))
    processor = PrefixConstrainedLogitsProcessor(lambda row, prefix: range(10, 40), num_beams=1)
    processors = LogitsProcessorList([processor])
    cache = DynamicCache(config=target.config)
    ask = {"assistant_model": make_drafter(target), "speculation_type": "dflash", "guidance_scale": 1.0}
    drafted = run(target, ids, logits_processor=processors, past_key_values=cache, **ask)[0]
    assert drafted == run(target, ids, logits_processor=processors)[0]


def test_processors_are_honoured_in_their_loop():
    target = make_target("qwen3")
    ids = torch.randint(63, (1, 9), generator=torch.Generator().manual_seed(5))
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    drafted = run(target, ids, assistant_model=make_drafter(target), speculation_type="dflash", **settings)[0]
    assert drafted == run(target, ids, **settings)[0]
