"""The file through which `generate(custom_generate="user/drafter", trust_remote_code=True)` finds a drafter."""

import os
from pathlib import Path


TEMPLATE = '''"""Decodes with the drafter of this repository. Needs hf-dspark: pip install hf-dspark"""

import functools


# This file runs from a cache and is not told where it came from.
DRAFTER = {name!r}
REVISION = {revision!r}


@functools.cache
def load_drafter():
    from hf_dspark import AutoDrafter

    return AutoDrafter.from_pretrained(DRAFTER, revision=REVISION)


def generate(model, **arguments):
    return model.generate(**{{**arguments, "assistant_model": load_drafter().to(model.device)}})
'''


def write_custom_generate(folder: str | os.PathLike, name_or_path: str | None = None, revision: str = "main") -> Path:
    """
    Writes `custom_generate/generate.py` into a drafter's folder.

    Args:
        folder (`str` or `os.PathLike`): The drafter's folder.
        name_or_path (`str`, *optional*): Where the drafter will be loaded from: the Hub id that the folder is
            published as. The folder itself by default.
        revision (`str`, *optional*, defaults to `"main"`): Revision of the Hub repository.

    Returns:
        `pathlib.Path`: the file.

    Raises:
        FileNotFoundError: If the folder holds no drafter.

    Example:

    ```python
    >>> from hf_dspark.hub.custom_generate import write_custom_generate

    >>> write_custom_generate("my-drafter")  # doctest: +SKIP
    >>> target.generate(**inputs, custom_generate="my-drafter", trust_remote_code=True)  # doctest: +SKIP
    ```
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no drafter (no config.json). Save one there first.")
    file = folder / "custom_generate" / "generate.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(TEMPLATE.format(name=name_or_path or str(folder.resolve()), revision=revision), encoding="utf-8")
    (file.parent / "requirements.txt").write_text("hf-dspark\n", encoding="utf-8")
    return file
