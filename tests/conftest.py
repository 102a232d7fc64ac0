"""What tests share: tiny models whose greedy output is varied, a tiny tokenizer, and the real pair."""

import os


# Before anything imports huggingface_hub: tests take models from caches and folders only.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tempfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM


# Profiles of the machine that tests measure or make up are nobody else's, and no test finds a user's.
_PROFILES = tempfile.TemporaryDirectory()
os.environ["HF_DSPARK_PROFILES"] = _PROFILES.name

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
# Of the tiny models, which have no EOS.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Parallel workers must not fight for cores; one thread also makes sums come out in one order.
torch.set_num_threads(1)


def make_target(family: str = "llama", seed: int = 0, **overrides):
    """A random target of 4 layers, without EOS; each matrix is redrawn with std 0.3, so that its output is varied."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(SIZES | overrides))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def make_tokenizer():
    """A tokenizer of single bytes with a chat template: 256 bytes, then the special tokens, 261 in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|im_start|>", "<|reserved_0|>", "<repo_name>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class QueryLengths:
    """Notes how many tokens each forward of a target computes."""

    def __init__(self, target):
        self.target, self.seen = target, []

    def __enter__(self):
        note = lambda module, args, kwargs: self.seen.append(kwargs["input_ids"].shape[1])  # noqa: E731
        self.handle = self.target.register_forward_pre_hook(note, with_kwargs=True)
        return self.seen

    def __exit__(self, *exc):
        self.handle.remove()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recorded tensors and evaluation prompts, which a public clone does not have."""
    folder = Path(os.environ.get("HF_DSPARK_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (folder / "golden").is_dir():
        pytest.skip(f"no recorded tensors in {folder}; name their folder in HF_DSPARK_SHARED")
    return folder


@pytest.fixture(params=sorted(FAMILIES))
def tiny_target(request):
    """A tiny target of each supported family."""
    return make_target(request.param)


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory, tiny_tokenizer) -> tuple[Path, Path]:
    """Folders of a tiny chat model with its tokenizer, and of a fresh DSpark drafter for it."""
    from hf_dspark import DSparkDrafter

    root = tmp_path_factory.mktemp("tiny_pair")
    target = make_target(vocab_size=len(tiny_tokenizer), pad_token_id=tiny_tokenizer.pad_token_id)
    target.save_pretrained(root / "target")
    tiny_tokenizer.save_pretrained(root / "target")
    DSparkDrafter.from_target(target, tokenizer=tiny_tokenizer).save_pretrained(root / "drafter")
    return root / "target", root / "drafter"


@pytest.fixture
def tiny_embedded_pair(tiny_pair, monkeypatch) -> tuple[Path, Path]:
    """The tiny pair in place of the embedded one, in this process and those it starts."""
    target, drafter = tiny_pair
    monkeypatch.setenv("HF_DSPARK_EMBEDDED_TARGET", str(target))
    monkeypatch.setenv("HF_DSPARK_EMBEDDED_DRAFTER", str(drafter))
    return tiny_pair


@pytest.fixture(scope="session")
def real_target():
    """SmolLM2-135M-Instruct in float32, and its tokenizer; `make target` fetches it."""
    from hf_dspark.hub import load_embedded_target

    return load_embedded_target()
