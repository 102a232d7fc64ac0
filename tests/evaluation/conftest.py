"""What tests of evaluations share: a pair whose drafter is right now and then, tasks, and a run that is over soon."""

import json

import pytest
import torch
from conftest import make_target

from hf_dspark import DSparkDrafter
from hf_dspark.evaluation import benchmark
from hf_dspark.evaluation.benchmark import EvaluationConfig, evaluate_drafter


@pytest.fixture(scope="package")
def pair(tiny_tokenizer):
    """A target that is nearly a bigram model, and a drafter that knows it: some drafts are right, some are not."""
    target = make_target(vocab_size=len(tiny_tokenizer), pad_token_id=tiny_tokenizer.pad_token_id)
    target.config.name_or_path = "tiny-target"
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight *= 0.012
            layer.mlp.down_proj.weight *= 0.012
    drafter = DSparkDrafter.from_target(target, tokenizer=tiny_tokenizer, block_size=4, markov_rank=40).eval()
    with torch.no_grad():
        # The serial head alone decides: it knows what the target says to the last token by itself.
        logits = target(torch.arange(len(tiny_tokenizer))[:, None]).logits[:, 0]
        left, scales, right = torch.linalg.svd(logits, full_matrices=False)
        drafter.norm.weight.zero_()
        head = drafter.markov_head
        head.markov_w1.weight.copy_(left[:, :40] * scales[:40])
        head.markov_w2.weight.copy_(right[:40].T)
    return target, drafter


@pytest.fixture(scope="package")
def tasks(tmp_path_factory):
    """Two tasks of three prompts; those of `chat` have a second turn."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, more in (("maths", []), ("chat", ["And then?"])):
        lines = [{"id": i, "turns": [f"What is {i} + {i}?", *more]} for i in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="package")
def evaluate_tiny(pair, tasks, tiny_tokenizer):
    """
    Evaluates the pair; keywords are fields of the config, or arguments of `evaluate_drafter`. Without a cost model
    there are no plots.
    """

    def run(folder, **settings):
        defaults = {"schedules": ["fixed", "fixed:2", "confidence:0.5"], "max_new_tokens": 12, "cost_model": False}
        names = EvaluationConfig.__dataclass_fields__
        config = EvaluationConfig(**(defaults | {key: settings.pop(key) for key in list(settings) if key in names}))
        target, drafter = pair
        settings = {"tasks": [tasks], "tokenizer": tiny_tokenizer, "drafter": drafter} | settings
        with pytest.MonkeyPatch.context() as patch:
            if not config.cost_model:
                patch.setattr(benchmark, "write_plots", lambda *_: {})  # they take longer than the run
            return evaluate_drafter(target, output_dir=folder, config=config, **settings)

    return run


@pytest.fixture(scope="package")
def finished(evaluate_tiny, tmp_path_factory):
    """Folder and results of a run with all that there is."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "PROFILE_SECONDS", 0)
        return folder, evaluate_tiny(folder, cost_model=True, baselines=["prompt_lookup"])
