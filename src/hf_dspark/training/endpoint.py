"""A target behind an OpenAI-compatible server, such as vLLM's or SGLang's."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import Any


RETRIED_STATUS = (408, 409, 425, 429)
_PROBLEMS_SHOWN = 300


class RefusedError(ValueError):
    """The server refuses this request and will refuse it again."""


@dataclass
class Endpoint:
    """
    A target that answers over HTTP; [`regenerate`] takes one in place of a model.

    Args:
        url (`str`): The server's base, such as `http://localhost:8000/v1`.
        model (`str`): The name under which it serves the target.
        api_key (`str`, *optional*): Sent as bearer token; the environment variable `OPENAI_API_KEY` if not given. A
            Hub token is never sent.
        concurrency (`int`, *optional*, defaults to 32): Requests at once; the server batches them.
        timeout (`float`, *optional*, defaults to 600.0): Seconds to wait for an answer.
        retries (`int`, *optional*, defaults to 5): Further attempts when the server fails, is busy, or sends nonsense.
        backoff (`float`, *optional*, defaults to 1.0): Seconds before the second attempt; doubled for each further.
        extra_body (`dict`, *optional*): Further fields of each request. With vLLM's `{"return_token_ids": True}` the
            exact tokens are kept beside the text.

    Example:

    ```python
    >>> from hf_dspark import Endpoint

    >>> target = Endpoint("http://localhost:8000/v1", model="Qwen/Qwen3-4B", concurrency=64)
    ```
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 32
    timeout: float = 600.0
    retries: int = 5
    backoff: float = 1.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from huggingface_hub import InferenceClient

        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"An endpoint's URL begins with http:// or https://, not {self.url!r}.")
        if self.concurrency < 1 or self.retries < 0:
            raise ValueError("`concurrency` must be at least 1 and `retries` at least 0.")
        # Without a key the client would send the user's Hub token to whoever listens there.
        key = self.api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._client = InferenceClient(base_url=self.url, api_key=key, timeout=self.timeout)

    def answer(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        settings: dict[str, Any],
        stop: Event,
    ) -> dict[str, Any]:
        """
        One answer.

        Args:
            messages (`list[dict]`): The prompt.
            tools (`list[dict]`, *optional*): JSON schemas of tools.
            settings (`dict`): `max_tokens`, `temperature`, `top_p`, `seed`, and `extra_body`.
            stop (`threading.Event`): Set when no answer is wanted any more; nothing is tried again then.

        Returns:
            `dict`: `completion` (one message), `finished`, and `prompt_ids` and `completion_ids` where the server
                tells them.

        Raises:
            RefusedError: If the server refuses the request.
            ConnectionError: If all attempts failed.
        """
        settings = settings | {"extra_body": {**settings.get("extra_body", {}), **self.extra_body}}
        problem = "no attempt"
        for attempt in range(self.retries + 1):
            if attempt and stop.wait(self.backoff * 2 ** (attempt - 1)):
                break
            answer, problem = self._attempt(messages, tools, settings)
            if answer is not None:
                return answer
        raise ConnectionError(
            f"{self.url} gave no usable answer in {self.retries + 1} attempts; the last problem: {problem}. Is the "
            f"server up, and does it serve {self.model}? Answers so far are kept: start the same command again."
        )

    def _attempt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, settings: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, str]:
        from huggingface_hub.errors import HfHubHTTPError, HTTPError, InferenceTimeoutError, OfflineModeIsEnabled

        try:
            return _read(self._client.chat_completion(messages, model=self.model, tools=tools, **settings)), ""
        except OfflineModeIsEnabled:
            raise ValueError(
                f"HF_HUB_OFFLINE=1 keeps huggingface_hub's client from {self.url} too. Set HF_HUB_OFFLINE=0 for this "
                "command."
            ) from None
        except InferenceTimeoutError:
            return None, f"no answer within {self.timeout:g} s"
        except HfHubHTTPError as error:
            status, text = error.response.status_code, _shown(error)
            if status < 500 and status not in RETRIED_STATUS:
                raise RefusedError(f"{self.url} answers {status}: {text}") from None
            return None, f"status {status}: {text}"
        except HTTPError as error:
            return None, f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return None, f"an answer that is no chat completion ({error})"


def _shown(error: Any) -> str:
    try:
        text = error.response.text or str(error)
    except Exception:  # a body that was not read
        text = str(error)
    return " ".join(text.split())[:_PROBLEMS_SHOWN]


def _read(output: Any) -> dict[str, Any]:
    choice = output.choices[0]
    message = choice.message
    content = message.get("content")
    completion = {"role": "assistant", "content": content or ""}
    # vLLM and SGLang call thinking that they took out of the content by either name.
    if thinking := message.get("reasoning_content") or message.get("reasoning"):
        completion["reasoning_content"] = thinking
    if calls := message.get("tool_calls"):
        completion["tool_calls"] = [_tool_call(call) for call in calls]
    if content is None and len(completion) == 2:
        raise ValueError("neither content nor tool calls")
    answer = {"completion": [completion], "finished": choice["finish_reason"] != "length"}
    if output.get("prompt_token_ids") and choice.get("token_ids"):
        answer |= {"prompt_ids": list(output["prompt_token_ids"]), "completion_ids": list(choice["token_ids"])}
    return answer


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """As chat templates take it: arguments as an object, which the protocol sends as a string."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return {"type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}}
