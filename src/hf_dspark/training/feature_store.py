"""Target features kept on disk between epochs: worth it for small data on a slow target, and off by default."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils import logging


logger = logging.get_logger(__name__)


class FeatureStore:
    """
    Features and last hidden states of whole examples, in bfloat16, one safetensors file each. The first epoch fills
    it while training; an interrupted run goes on with what is there.

    Args:
        folder (`str` or `os.PathLike`): Where the files lie. One folder can serve several targets and layer choices.
        target (`PreTrainedModel`): The target; its identity is part of every file's name.
        target_layer_ids (`Sequence[int]`): The feature layers.
    """

    def __init__(self, folder: str | os.PathLike, target: PreTrainedModel, target_layer_ids: Sequence[int]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        # Some weights of every layer tell a fine-tuned target from its base, which a name may not.
        identity = hashlib.sha256(repr(list(target_layer_ids)).encode())
        for parameter in target.base_model.parameters():
            sample = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)]
            identity.update(sample.float().cpu().numpy().tobytes())
        self._identity = identity.digest()
        self._bytes_per_token = 2 * (len(target_layer_ids) + 1) * target.config.get_text_config().hidden_size

    def check_disk(self, sequences: Iterable[Sequence[int]]) -> None:
        """
        Prints what the features of those sequences will take that are not there yet.

        Raises:
            OSError: If the disk has no room for them.
        """
        lengths = {self._file(torch.as_tensor(ids)): len(ids) for ids in sequences}
        num_tokens = sum(length for file, length in lengths.items() if not file.exists())
        size, free = num_tokens * self._bytes_per_token, shutil.disk_usage(self.folder).free
        logger.warning(
            "Feature store %s: %.1f GB to come for %d tokens, %.1f GB free.",
            self.folder,
            size / 1e9,
            num_tokens,
            free / 1e9,
        )
        if size > free:
            raise OSError(
                f"The feature store needs {size / 1e9:.1f} GB more for {num_tokens} tokens and {self.folder} has "
                f"{free / 1e9:.1f} GB free. Train without `feature_store`, or choose another folder."
            )

    def _file(self, input_ids: torch.Tensor) -> Path:
        key = hashlib.sha256(self._identity + input_ids.to(torch.int64).cpu().numpy().tobytes()).hexdigest()
        return self.folder / f"{key[:40]}.safetensors"

    def load(self, sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """
        Features `(batch, length, layers * hidden_size)` and last hidden states `(batch, length, hidden_size)` of
        unpadded sequences, padded on the right; `None` unless all are there.
        """
        files = [self._file(ids) for ids in sequences]
        if not all(file.exists() for file in files):
            return None
        parts = [load_file(file) for file in files]
        pad = torch.nn.utils.rnn.pad_sequence
        return tuple(pad([p[name] for p in parts], batch_first=True) for name in ("features", "last_hidden"))

    def save(self, sequences: list[torch.Tensor], features: torch.Tensor, last_hidden: torch.Tensor) -> None:
        """Stores what a forward over the right-padded sequences gave. A file appears whole or not at all."""
        for ids, row, last in zip(sequences, features, last_hidden):
            file = self._file(ids)
            if file.exists():
                continue
            tensors = {"features": row[: len(ids)], "last_hidden": last[: len(ids)]}
            tensors = {name: t.to("cpu", torch.bfloat16).contiguous() for name, t in tensors.items()}
            handle, partial = tempfile.mkstemp(dir=self.folder, suffix=".partial")
            os.close(handle)
            try:
                save_file(tensors, partial)
                os.replace(partial, file)
            except BaseException:
                os.unlink(partial)
                raise
