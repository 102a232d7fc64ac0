"""Target features kept on disk between epochs: worth it for small data on a slow target, and off by default."""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..files import write_whole
from ..models.fingerprint import weights_fingerprint
from .journal import digest


logger = logging.get_logger(__name__)

RECORD = "feature_store.json"
# A shard is written when it is so large, or when so much work would be lost with it.
SHARD_BYTES, SHARD_SECONDS = 256_000_000, 60.0
_OPEN_SHARDS = 256


@dataclass
class _Place:
    """Where an example's states lie in a shard: rows of `features` and of `last_hidden`."""

    shard: Path
    features: slice
    last_hidden: slice


class FeatureStore:
    """
    The frozen target's features and last hidden states of a fixed set of examples, in bfloat16 safetensors shards.

    Only what a loss reads is kept: features up to an example's last supervised token, and last hidden states beside
    its supervised ones, from which the target's distributions are computed again. A shard appears whole or not at
    all and holds its own index, so a run that was killed goes on with what is there. Examples are told by their
    tokens and supervision; the weights and layers of the target and the examples are written down, and a store of
    others is refused.

    Args:
        folder (`str` or `os.PathLike`): Where the shards lie.
        target (`PreTrainedModel`): The target.
        target_layer_ids (`Sequence[int]`): The feature layers.
        examples (`Iterable[Mapping]`): All that is trained or evaluated on: `input_ids` and `loss_mask`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): What made them; only to say why a store is of no use.

    Raises:
        ValueError: If the folder's store is of another target, other layers or other examples.
        OSError: If a shard is damaged.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        target: PreTrainedModel,
        target_layer_ids: Sequence[int],
        examples: Iterable[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.hidden_size = target.config.get_text_config().hidden_size
        self.num_layers = len(target_layer_ids)
        self._examples: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for example in examples:
            ids = torch.as_tensor(example["input_ids"], dtype=torch.int32)
            mask = torch.as_tensor(example["loss_mask"], dtype=torch.bool)
            self._examples[_key(ids, mask)] = ids, mask
        self._record = {
            "target": str(target.config.name_or_path or target.config.model_type),
            "weights": weights_fingerprint(target.base_model),
            "target_layer_ids": list(target_layer_ids),
            "tokenizer": None if tokenizer is None else digest([tokenizer.chat_template, len(tokenizer)]),
            "examples": len(self._examples),
            "data": digest(sorted(self._examples)),
        }
        self._refuse_stale()
        self._shard = lru_cache(_OPEN_SHARDS)(_open_shard)
        self._places: dict[str, _Place] = {}
        self.refresh()

    def _refuse_stale(self) -> None:
        path = self.folder / RECORD
        if not path.exists():
            return
        before, now = json.loads(path.read_text(encoding="utf-8")), self._record
        reasons = []
        if before["weights"] != now["weights"]:
            reasons.append(f"of another target ({before['target']}; its weights differ from this one's)")
        if before["target_layer_ids"] != now["target_layer_ids"]:
            reasons.append(f"of the target layers {before['target_layer_ids']}, not {now['target_layer_ids']}")
        if before["data"] != now["data"]:
            same = before["tokenizer"] == now["tokenizer"]
            why = "" if same else ", made with another tokenizer or chat template"
            reasons.append(f"of other data ({before['examples']} examples there, {now['examples']} now{why})")
        if reasons:
            raise ValueError(
                f"The feature store in {self.folder} is {' and '.join(reasons)}. Delete it, or name another folder."
            )

    def refresh(self) -> None:
        """Finds what all processes have written so far."""
        self._places = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            metadata, at, last_at = self._shard(path).metadata(), 0, 0
            for key, rows, last_rows in json.loads(metadata["index"]):
                self._places[key] = _Place(path, slice(at, at + rows), slice(last_at, last_at + last_rows))
                at, last_at = at + rows, last_at + last_rows
        self.is_full = self._places.keys() >= self._examples.keys()

    @property
    def missing(self) -> list[str]:
        """Keys of the examples that are not there yet, the longest first."""
        keys = (key for key in self._examples if key not in self._places)
        return sorted(keys, key=lambda key: (-len(self._examples[key][0]), key))

    def _size(self, keys: Iterable[str]) -> tuple[int, int]:
        """Bytes that these examples take, and their tokens."""
        size = tokens = 0
        for key in keys:
            mask = self._examples[key][1]
            rows, last_rows = _feature_rows(mask), int(_needed_last_hidden(mask).sum())
            size += 2 * self.hidden_size * (rows * self.num_layers + last_rows)
            tokens += len(mask)
        return size, tokens

    def check_disk(self) -> None:
        """
        Prints what is still to be written.

        Raises:
            OSError: If the disk has no room for it.
        """
        missing = self.missing
        if not missing:
            return
        size, tokens = self._size(missing)
        free = shutil.disk_usage(_existing(self.folder)).free
        sizes = f"{amount(size)} for {tokens} tokens ({size / tokens:.0f} bytes a token)"
        logger.warning("Feature store %s: %s to be written, %s free.", self.folder, sizes, amount(free))
        # The shards' headers come on top.
        if size * 1.01 > free:
            raise OSError(
                f"The feature store needs {sizes} and {self.folder} has {amount(free)} free. Train without "
                "`feature_store`, or choose another folder."
            )

    def prepare(self) -> None:
        """Makes the folder and clears what a killed run left half done; of several processes, one does this first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for partial in self.folder.glob("*.partial"):
            partial.unlink()
        if not (self.folder / RECORD).exists():
            write_whole(self.folder / RECORD, json.dumps(self._record, indent=1) + "\n")

    def fill(
        self,
        compute: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        batch_size: int,
        process_index: int = 0,
        num_processes: int = 1,
        progress: bool = True,
    ) -> None:
        """
        Computes and writes what is missing; of several processes, each its share.

        Args:
            compute (`Callable`): From right-padded `input_ids` and `attention_mask`, both `(batch, length)`, to
                features `(batch, length, layers * hidden_size)` and last hidden states `(batch, length, hidden_size)`.
            batch_size (`int`): Examples at once; they are of similar length.
            process_index, num_processes (`int`, *optional*): Which share.
            progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.
        """
        missing = self.missing
        batches = [missing[i : i + batch_size] for i in range(0, len(missing), batch_size)][
            process_index::num_processes
        ]
        held: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        size, since = 0, time.monotonic()
        for batch in tqdm(batches, desc="Storing features", unit="batch", disable=not progress):
            ids = [self._examples[key][0].long() for key in batch]
            pad = torch.nn.utils.rnn.pad_sequence
            attention_mask = pad([torch.ones_like(i) for i in ids], batch_first=True)
            states = compute(pad(ids, batch_first=True), attention_mask)
            for key, features, last_hidden in zip(batch, *states):
                mask = self._examples[key][1]
                features = features[: _feature_rows(mask)].to("cpu", torch.bfloat16, copy=True)
                needed = _needed_last_hidden(mask).nonzero().squeeze(-1).to(last_hidden.device)
                held.append((key, features, last_hidden[needed].to("cpu", torch.bfloat16)))
                size += 2 * (features.numel() + held[-1][2].numel())
            if size >= SHARD_BYTES or time.monotonic() - since >= SHARD_SECONDS:
                self._write(held)
                held, size, since = [], 0, time.monotonic()
        if held:
            self._write(held)
        self.refresh()

    def _write(self, held: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        tensors = {"features": torch.cat([f for _, f, _ in held]), "last_hidden": torch.cat([h for _, _, h in held])}
        index = json.dumps([[key, len(features), len(last)] for key, features, last in held])
        handle, partial = tempfile.mkstemp(dir=self.folder, suffix=".partial")
        os.close(handle)
        try:
            save_file(tensors, partial, metadata={"index": index})
            os.replace(partial, self.folder / f"{held[0][0]}.safetensors")
        except BaseException:
            os.unlink(partial)
            raise

    def bytes_on_disk(self) -> int:
        """What the shards take."""
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def load(
        self, sequences: Sequence[torch.Tensor], loss_masks: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        States of a batch, with zeros where nothing is needed.

        Args:
            sequences, loss_masks (`Sequence[torch.Tensor]`): Tokens and supervision of examples, without padding.

        Returns:
            Features `(batch, length, layers * hidden_size)` and last hidden states `(batch, length, hidden_size)`, in
            bfloat16, for the longest example's length.

        Raises:
            ValueError: If an example is none of the store's.
        """
        length, hidden = max(map(len, sequences)), self.hidden_size
        features = torch.zeros(len(sequences), length, self.num_layers * hidden, dtype=torch.bfloat16)
        last_hidden = torch.zeros(len(sequences), length, hidden, dtype=torch.bfloat16)
        for row, (ids, mask) in enumerate(zip(sequences, loss_masks)):
            place = self._places.get(_key(ids, mask))
            if place is None:
                raise ValueError(f"An example of a batch is not in the feature store in {self.folder}.")
            shard = self._shard(place.shard)
            stored = shard.get_slice("features")[place.features.start : place.features.stop]
            features[row, : len(stored)] = stored
            needed = _needed_last_hidden(mask).nonzero().squeeze(-1)
            last_hidden[row, needed] = shard.get_slice("last_hidden")[place.last_hidden.start : place.last_hidden.stop]
        return features, last_hidden


def amount(size: int) -> str:
    """A number of bytes for people."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:.1f} {name}"


def _key(input_ids: torch.Tensor, loss_mask: torch.Tensor) -> str:
    found = hashlib.sha256(input_ids.to("cpu", torch.int32).numpy().tobytes())
    found.update(loss_mask.to("cpu", torch.bool).numpy().tobytes())
    return found.hexdigest()[:32]


def _feature_rows(loss_mask: torch.Tensor) -> int:
    """Positions up to the last supervised one; what follows is context of no draft."""
    supervised = loss_mask.nonzero()
    return int(supervised[-1]) + 1 if len(supervised) else 0


def _needed_last_hidden(loss_mask: torch.Tensor) -> torch.Tensor:
    """Block losses read the state before a supervised token, EAGLE-3's the one behind it."""
    supervised = loss_mask.bool().cpu()
    needed = torch.zeros_like(supervised)
    needed[:-1] |= supervised[1:]
    needed[1:] |= supervised[:-1]
    return needed


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise OSError(f"{path} is damaged ({error}). Delete it: what was in it is computed again.") from error


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())
