"""
A visitor's target's chat template: a program by a stranger, so it runs in a process of its own, with bounds.

As a script, this file is that process: it reads requests from stdin, one a line, and answers on stdout.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any


SECONDS = 5  # of the processor, a message
MEMORY = 1 << 30  # bytes, transformers' own share included
CHARACTERS = 1_000_000  # of the text that comes out


class TemplateError(ValueError):
    """A template that can't be used, in words for the visitor."""


class ChatTemplate:
    """
    The process is started at first use, again after it had to be ended, and ends with this object.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Whose template.
        name (`str`): The target's name.
    """

    def __init__(self, tokenizer: Any, name: str):
        self._name = name
        self._request = {**tokenizer.special_tokens_map, "chat_template": tokenizer.get_chat_template()}
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def render(self, messages: list[dict[str, str]]) -> str:
        """
        Write a conversation as the target wants it.

        Raises:
            TemplateError: If the template fails, or takes too long or too much.
        """
        with self._lock:
            answer = self._ask(json.dumps({**self._request, "conversations": [messages]}, default=str))
        if "text" not in answer:
            raise TemplateError(f"The chat template of {self._name} can't be used: {answer['problem']}.")
        return answer["text"]

    def _ask(self, request: str) -> dict[str, str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each reserves memory, which is bounded
            )
        process, line = self._process, ""
        with contextlib.suppress(OSError):  # it has ended
            print(request, file=process.stdin, flush=True)
            line = process.stdout.readline()
        if line.endswith("\n"):
            return json.loads(line)
        self._process = None
        if process.wait() == -signal.SIGXCPU:
            return {"problem": f"it takes more than {SECONDS} seconds, the most that this page gives it"}
        return {"problem": "it breaks off"}


def main() -> None:
    import resource

    from transformers.utils.chat_template_utils import render_jinja_template

    with contextlib.suppress(ValueError):  # macOS takes none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _, highest = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin:
        # Counted from the start of the process.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + SECONDS, highest))
        try:
            text = render_jinja_template(**json.loads(line), add_generation_prompt=True)[0][0]
            answer = {"text": text} if len(text) <= CHARACTERS else {"problem": "it writes too much"}
        except MemoryError:
            answer = {"problem": "it takes too much memory"}
        except Exception as error:
            answer = {"problem": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
