"""Adapters: what is trained, that they are saved, loaded, merged and switched, and what is refused by name."""

import json
import warnings

import pytest
import torch
from conftest import make_target
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig
from safetensors import safe_open
from training_runs import (
    KINDS,
    KillAt,
    KilledError,
    assert_equal_weights,
    make_data,
    make_drafter,
    make_trainer,
    weights,
)

from hf_dspark import AutoDrafter, DSparkDrafter


HEADS = {"confidence_head", "fc", "hidden_norm", "markov_head", "norm"}


@pytest.fixture
def saved(tmp_path):
    """A target, and the folder of a drafter of it."""

    def make(kind: str = "dspark", **overrides):
        target = make_target()
        folder = tmp_path / f"base-{kind}"
        make_drafter(kind, target, **overrides).save_pretrained(folder)
        return target, folder

    return make


def train(folder, base, target, rank: int = 2, config=None, **settings):
    drafter = AutoDrafter.from_pretrained(base)
    config = LoraConfig(r=rank) if config is None else config
    trainer = make_trainer(folder, drafter=drafter, target=target, peft_config=config, **settings)
    trainer.train()
    return trainer


def proposals(drafter, target) -> torch.Tensor:
    drafter.attach(target).eval()
    ids = torch.arange(5, 17)[None]
    states = target.model(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    cache = drafter.new_cache()
    scores = []

    def draw(logits, drafted):
        scores.append(logits)
        return logits.argmax(-1), logits

    with torch.no_grad():
        drafter.extend(cache, features[:, :-1], ids[:, 1:])
        drafter.propose(cache, ids[:, -1], draw=draw)
    return torch.stack(scores, dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_are_trained_and_saved(tmp_path, saved, kind):
    target, base = saved(kind)
    trainer = train(tmp_path / "run", base, target, rank=1)
    optimised = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    adapters = {name: p for name, p in trainer.drafter.named_parameters() if "lora_" in name}
    assert {id(p) for p in optimised} == {id(p) for p in adapters.values()}
    assert all(name.startswith("layers.") for name in adapters)
    before = AutoDrafter.from_pretrained(base).state_dict()
    after = trainer.drafter.state_dict()
    assert all(torch.equal(before[name], after[_wrapped(name, after)]) for name in before)
    trainer.save_model(str(tmp_path / "adapter"))
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == len(adapters)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()


def _wrapped(name: str, state: dict) -> str:
    module, leaf = name.rsplit(".", 1) if "." in name else ("", name)
    return name if name in state else f"{module}.base_layer.{leaf}"


def test_adapters_are_a_twentieth_of_a_drafter_of_usual_shape():
    """Rank 8 on every linear of the layers of the embedded drafter's shape."""
    from hf_dspark.training.adapters import add_adapters, trained_parameters

    target = make_target(hidden_size=144, intermediate_size=384, head_dim=36, vocab_size=512)
    drafter = DSparkDrafter.from_target(target, mask_token_id=1, num_hidden_layers=2, markov_rank=48)
    drafter.config.name_or_path = "somewhere"
    total = sum(p.numel() for p in drafter.parameters())
    add_adapters(drafter, LoraConfig(r=4), train_heads=False)
    heads, adapters = trained_parameters(drafter)
    assert heads == 0
    assert 0 < adapters <= 0.05 * total


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_folder_finds_its_base_and_drafts_as_trained(tmp_path, saved, kind):
    target, base = saved(kind)
    trainer = train(tmp_path / "run", base, target, train_heads=True)
    trainer.save_model(str(tmp_path / "adapter"))
    trained = proposals(trainer.drafter, target)
    plain = proposals(AutoDrafter.from_pretrained(base), target)
    assert not torch.allclose(trained, plain, atol=1e-3)
    loaded = AutoDrafter.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(proposals(loaded, target), trained)
    by_class = type(loaded).from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(proposals(by_class, target), trained)


@pytest.mark.parametrize("train_heads", [pytest.param(False, marks=pytest.mark.slow), True])
def test_merged_and_unmerged_propose_the_same(tmp_path, saved, train_heads):
    target, base = saved()
    trainer = train(tmp_path / "run", base, target, train_heads=train_heads)
    trainer.save_model(str(tmp_path / "adapter"))
    unmerged = proposals(trainer.drafter, target)
    loaded = AutoDrafter.from_pretrained(tmp_path / "adapter").merge_adapters()
    assert loaded.state_dict().keys() == AutoDrafter.from_pretrained(base).state_dict().keys()
    torch.testing.assert_close(proposals(loaded, target), unmerged)
    torch.testing.assert_close(proposals(trainer.model.merge_and_unload(), target), unmerged)
    # A merged drafter is one like any other.
    loaded.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(proposals(AutoDrafter.from_pretrained(tmp_path / "merged"), target), unmerged)
    loaded.export(tmp_path / "exported", format="hf-dspark")


def test_several_adapters_are_kept_and_switched_per_call(tmp_path, saved):
    target, base = saved()
    expected = {}
    for name, seed in (("code", 1), ("chat", 2)):
        trainer = train(tmp_path / name, base, target, data=make_data(seed=seed), train_heads=seed == 2)
        trainer.save_model(str(tmp_path / name / "adapter"))
        expected[name] = proposals(trainer.drafter, target)
    drafter = AutoDrafter.from_pretrained(base)
    expected["none"] = proposals(drafter, target)
    for name in ("code", "chat"):
        drafter.load_adapter(str(tmp_path / name / "adapter"), adapter_name=name)
    prompt = torch.tensor([[5, 6, 7]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    for name in ("chat", "code", "chat"):
        drafter.set_adapter(name)
        torch.testing.assert_close(proposals(drafter, target), expected[name])
        drafted = target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)
        assert torch.equal(drafted, plain)
    with pytest.raises(ValueError, match=r"no adapters \['math'\], only \['chat', 'code'\]"):
        drafter.set_adapter("math")
    drafter.disable_adapters()
    torch.testing.assert_close(proposals(drafter, target), expected["none"])
    # What is saved is the active adapter alone.
    drafter.enable_adapters()
    drafter.set_adapter("code")
    drafter.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(proposals(AutoDrafter.from_pretrained(tmp_path / "again"), target), expected["code"])


def test_generate_takes_a_peft_model(tmp_path, saved):
    target, base = saved()
    train(tmp_path / "run", base, target).save_model(str(tmp_path / "adapter"))
    wrapped = PeftModel.from_pretrained(AutoDrafter.from_pretrained(base), tmp_path / "adapter")
    prompt = torch.tensor([[5, 6, 7]])
    output = target.generate(
        prompt, assistant_model=wrapped, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, target.generate(prompt, max_new_tokens=12, do_sample=False))
    assert output.speculation.rounds > 0


def test_adapters_do_not_go_on_from_others(tmp_path, saved):
    target, base = saved()
    settings = {"save_strategy": "steps", "save_steps": 2}
    train(tmp_path, base, target, max_steps=2, **settings)

    def resume(drafter, config):
        trainer = make_trainer(tmp_path, drafter=drafter, target=target, peft_config=config, **settings)
        trainer.train(resume_from_checkpoint=True)

    for config, told in ((LoraConfig(r=4), "adapters r: 2 there, 4 now"), (None, "adapters r: 2 there, None now")):
        with pytest.raises(ValueError, match=rf"checkpoint-2 is of another run .*{told}"):
            resume(AutoDrafter.from_pretrained(base), config)
    # The base may lie elsewhere, but it must be the same one.
    moved = AutoDrafter.from_pretrained(base)
    moved.save_pretrained(tmp_path / "moved")
    resume(AutoDrafter.from_pretrained(tmp_path / "moved"), LoraConfig(r=2))
    with torch.no_grad():
        moved.fc.weight.mul_(2)
    moved.save_pretrained(tmp_path / "changed")
    with pytest.raises(ValueError, match="the weights of the drafter that the adapters sit on"):
        resume(AutoDrafter.from_pretrained(tmp_path / "changed"), LoraConfig(r=2))


@pytest.mark.slow
def test_a_killed_run_of_adapters_resumes_to_the_same_weights(tmp_path, saved):
    target, base = saved()
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "train_heads": True}
    whole = train(tmp_path / "whole", base, target, **settings)
    with pytest.raises(KilledError):
        train(tmp_path / "killed", base, target, callbacks=[KillAt(3)], **settings)
    drafter = AutoDrafter.from_pretrained(base)
    resumed = make_trainer(
        tmp_path / "killed", drafter=drafter, target=target, peft_config=LoraConfig(r=2), **settings
    )
    resumed.train(resume_from_checkpoint=True)
    assert_equal_weights(weights(resumed.drafter), weights(whole.drafter))
    # A checkpoint is an adapter that finds its base, and training can go on from it.
    folder = tmp_path / "whole" / "checkpoint-6"
    torch.testing.assert_close(
        proposals(AutoDrafter.from_pretrained(folder), target), proposals(whole.drafter, target)
    )
    more = PeftModel.from_pretrained(AutoDrafter.from_pretrained(base), folder, is_trainable=True)
    trainer = make_trainer(tmp_path / "more", drafter=more, target=target, max_steps=1)
    trainer.train()


@pytest.mark.slow
def test_other_adapters_than_lora(tmp_path, saved):
    target, base = saved()
    config = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    trainer = train(tmp_path / "run", base, target, config=config)
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = AutoDrafter.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(proposals(loaded, target), proposals(trainer.drafter, target))


# ---------------------------------------------------------------------- the record of their training


@pytest.fixture
def recorded(saved):
    """As `saved`, of a base drafter whose own training is recorded."""
    target, base = saved()
    drafter = AutoDrafter.from_pretrained(base)
    drafter.training_record, drafter.config.max_trained_length = {"updates": 9, "data": {"longest": 20}}, 20
    drafter.save_pretrained(base)
    return target, base


def test_the_record_goes_with_adapters_and_into_the_merged_drafter(tmp_path, recorded):
    target, base = recorded
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        trainer = train(tmp_path / "run", base, target, train_heads=True, save_strategy="steps", save_steps=2)
    for folder in ("run/checkpoint-2", "run/checkpoint-6"):
        record = json.loads((tmp_path / folder / "training_record.json").read_text())
        assert record["updates"] == int(folder.rpartition("-")[2])
        # Peft's card is a blank form with the folder of this machine in it.
        assert not (tmp_path / folder / "README.md").exists()
    trainer.save_model(str(tmp_path / "adapter"))
    record = json.loads((tmp_path / "adapter" / "training_record.json").read_text())
    assert (record["adapters"]["type"], record["adapters"]["base"], record["adapters"]["r"]) == ("LORA", base.name, 2)
    assert record["adapters"]["modules_to_save"] == trainer.drafter.peft_config["default"].modules_to_save
    assert record["earlier"] == [{"updates": 9, "data": {"longest": 20}}]
    assert record["data"]["longest"] == 23
    assert str(tmp_path) not in json.dumps(record)

    loaded = AutoDrafter.from_pretrained(tmp_path / "adapter")
    assert loaded.training_record == record
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "training_record.json").read_text()) == record
    loaded.merge_adapters().save_pretrained(tmp_path / "merged")
    merged = AutoDrafter.from_pretrained(tmp_path / "merged")
    assert merged.training_record == record
    assert merged.config.max_trained_length == 23
    assert trainer.model.merge_and_unload().training_record["adapters"] == record["adapters"]


def test_the_record_is_of_what_drafts_now(tmp_path, recorded):
    target, base = recorded
    for name, steps in (("code", 1), ("chat", 2)):
        train(tmp_path / name, base, target, max_steps=steps).save_model(str(tmp_path / name / "adapter"))
    (tmp_path / "chat" / "adapter" / "training_record.json").unlink()
    drafter = AutoDrafter.from_pretrained(base)
    drafter.load_adapter(tmp_path / "code" / "adapter", adapter_name="code")
    drafter.load_adapter(tmp_path / "chat" / "adapter", adapter_name="chat")
    assert drafter.training_record["updates"] == 1
    drafter.set_adapter("chat")
    # Nothing was recorded, so what they are is all that is told.
    assert drafter.training_record.keys() == {"record_version", "adapters", "earlier"}
    assert [earlier["updates"] for earlier in drafter.training_record["earlier"]] == [9]
    drafter.set_adapter(["chat", "code"])
    assert drafter.training_record["updates"] == 1
    history = drafter.training_record["earlier"]
    assert (history[0]["updates"], history[1]["adapters"]["base"], len(history)) == (9, base.name, 2)
    drafter.disable_adapters()
    assert drafter.training_record["updates"] == 9
    with pytest.raises(ValueError, match="disabled"):
        drafter.merge_adapters()
    assert drafter.training_record["updates"] == 9


def test_a_merged_drafter_is_no_base_before_it_is_saved(tmp_path, saved):
    target, base = saved()
    train(tmp_path / "run", base, target, max_steps=1).save_model(str(tmp_path / "adapter"))
    merged = AutoDrafter.from_pretrained(tmp_path / "adapter").merge_adapters()
    with pytest.raises(ValueError, match="this one is fresh"):
        make_trainer(tmp_path / "more", drafter=merged, target=target, peft_config=LoraConfig(r=2))


def test_parameters_are_counted_once(saved):
    from hf_dspark.models.adapters import merged_size
    from hf_dspark.training.adapters import add_adapters

    _, base = saved()
    drafter = AutoDrafter.from_pretrained(base)
    size = sum(p.numel() for p in drafter.parameters())
    assert merged_size(drafter) == size
    add_adapters(drafter, LoraConfig(r=2), train_heads=True)
    assert sum(p.numel() for p in drafter.parameters()) > size
    assert merged_size(drafter) == size


def test_a_trainer_of_adapters_writes_no_card(tmp_path, saved):
    target, base = saved()
    trainer = train(tmp_path / "run", base, target, max_steps=1)
    trainer.save_model()
    trainer.create_model_card()
    assert not (tmp_path / "run" / "README.md").exists()


# ---------------------------------------------------------------------- refusals


def test_adapters_without_effect_are_refused(tmp_path, saved):
    target, base = saved()
    config = LoraConfig(r=2, target_modules=["q_proj", "markov_w2"])
    with pytest.raises(ValueError, match=r"Adapters on markov_head.markov_w2 would have no effect.*modules_to_save"):
        train(tmp_path / "run", base, target, config=config)


@pytest.mark.parametrize("begin", ["pissa", "olora", "pissa_niter_4"])
def test_adapters_that_change_their_base_are_refused(tmp_path, saved, begin):
    """They would be loaded on other weights than those that they were trained on."""
    target, base = saved()
    config = LoraConfig(r=2, init_lora_weights=begin)
    with pytest.raises(ValueError, match=f"`init_lora_weights='{begin}'` changes the base"):
        train(tmp_path / "run", base, target, config=config)


def test_a_fresh_drafter_has_no_base_for_adapters(tmp_path):
    with pytest.raises(ValueError, match="belong to a drafter that is saved somewhere, and this one is fresh"):
        make_trainer(tmp_path, peft_config=LoraConfig(r=2))


def test_adapters_on_adapters_are_refused(tmp_path, saved):
    target, base = saved()
    trainer = train(tmp_path / "run", base, target)
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = AutoDrafter.from_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="has adapters on it already"):
        make_trainer(tmp_path / "more", drafter=loaded, target=target)
    with pytest.raises(ValueError, match="is wrapped in adapters already"):
        make_trainer(tmp_path / "more", drafter=trainer.model, target=target, peft_config=LoraConfig(r=2))
    with pytest.raises(ValueError, match=r"call `drafter\.merge_adapters"):
        loaded.export(tmp_path / "exported", format="deepspec")


def test_adapters_of_another_drafter_are_refused(tmp_path, saved):
    target, base = saved()
    train(tmp_path / "run", base, target).save_model(str(tmp_path / "adapter"))
    other = make_drafter("dspark", target, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"don't fit this drafter: .* Load the drafter that they were trained on"):
        other.load_adapter(str(tmp_path / "adapter"))


def test_a_drafter_has_no_prompt_to_tune(tmp_path, saved):
    target, base = saved()
    config = PrefixTuningConfig(num_virtual_tokens=2, num_layers=1, token_dim=32, num_attention_heads=2)
    with pytest.raises(ValueError, match="a drafter has no prompt"):
        train(tmp_path / "run", base, target, config=config)


def test_an_adapter_without_its_base_says_how_to_load_it(tmp_path, saved):
    target, base = saved()
    train(tmp_path / "run", base, target).save_model(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"does not name their base drafter.*load_adapter"):
        AutoDrafter.from_pretrained(tmp_path / "adapter")


def test_adapters_are_not_saved_beside_a_drafter(tmp_path, saved):
    target, base = saved()
    drafter = AutoDrafter.from_pretrained(base)
    make_trainer(tmp_path / "run", drafter=drafter, target=target, peft_config=LoraConfig(r=2))
    with pytest.raises(ValueError, match="Save them to another folder"):
        drafter.save_pretrained(base)
    assert not (base / "adapter_config.json").exists()
