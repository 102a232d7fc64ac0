"""`hf-dspark regenerate`: the target writes what its drafter learns from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.text import Text
from typer import BadParameter, Option


if TYPE_CHECKING:
    from datasets import Dataset


def regenerate(
    output: Annotated[str, Option(help="Folder of the answers; a run that was interrupted goes on in it.")],
    prompts: Annotated[
        str | None,
        Option(help="What to answer: a file, folder or Hub id with `prompt`, `messages` or `turns` in each row."),
    ] = None,
    self_prompts: Annotated[int, Option(min=0, help="Prompts that the target writes itself, answered too.")] = 0,
    opener: Annotated[
        list[str] | None,
        Option(help="How a prompt of its own may begin; several can be given.", show_default="anything"),
    ] = None,
    target: Annotated[
        str | None,
        Option(
            help="The target: a folder or Hub id; with --endpoint the name that the server knows it by.",
            show_default="SmolLM2-135M-Instruct",
        ),
    ] = None,
    endpoint: Annotated[
        str | None, Option(help="An OpenAI-compatible server that runs it, such as http://localhost:8000/v1.")
    ] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="How long an answer may be, in tokens.")] = 1024,
    temperature: Annotated[
        float | None,
        Option(min=0.0, help="0 always takes the likeliest token.", show_default="the target's own settings"),
    ] = None,
    top_p: Annotated[float | None, Option(min=0.0, max=1.0, help="Sample from the likeliest tokens only.")] = None,
    top_k: Annotated[int | None, Option(min=1, help="Sample from so many tokens only.")] = None,
    enable_thinking: Annotated[
        bool | None,
        Option("--enable-thinking/--no-enable-thinking", help="Passed to the chat template.", show_default=False),
    ] = None,
    chat_template_kwargs: Annotated[
        str | None, Option(help="Further arguments of the chat template, as a JSON object.")
    ] = None,
    seed: Annotated[int, Option(help="Seed of the answers.")] = 0,
    batch_size: Annotated[int, Option(min=1, help="Prompts answered at once by a local target.")] = 32,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option(help="Number type of a local target's weights; auto takes the one they were saved in."),
    ] = "auto",
    concurrency: Annotated[int, Option(min=1, help="Requests that the endpoint gets at once.")] = 32,
    timeout: Annotated[float, Option(min=0.1, help="Seconds to wait for an answer of the endpoint.")] = 600.0,
    retries: Annotated[int, Option(min=0, help="Further attempts when the endpoint fails or is busy.")] = 5,
    extra_body: Annotated[
        str | None,
        Option(help='Further fields of each request, as JSON; with vLLM {"return_token_ids": true} for exact tokens.'),
    ] = None,
    split: Annotated[str, Option(help="Split of the prompts.")] = "train",
    name: Annotated[str | None, Option(help="Configuration of the prompts' dataset, if it has several.")] = None,
    limit: Annotated[int | None, Option(min=1, help="Take the first so many prompts only.")] = None,
    drop_unfinished: Annotated[
        bool, Option("--drop-unfinished", help="Leave out answers that were cut off at the length limit.")
    ] = False,
    push_to_hub: Annotated[
        str | None, Option(metavar="REPO", help="Upload the result to this dataset on the Hub, made private if new.")
    ] = None,
) -> None:
    """
    Let the target answer prompts, as training data for its drafter.

    A drafter learns best from what its target writes itself. OUTPUT gets the answers (train.jsonl) and the settings
    they were made with (regenerate.json). `hf-dspark show-data OUTPUT` shows what a drafter would learn from them.

    The same command after an interruption goes on where it stopped. An endpoint's API key is taken from the
    environment variable OPENAI_API_KEY.
    """
    from datasets import disable_progress_bars

    from ..training.regenerate import regenerate as answer

    disable_progress_bars()
    if endpoint and not target:
        raise BadParameter("name the model that the endpoint serves with --target.")
    kwargs = parse_json_object(chat_template_kwargs, "--chat-template-kwargs") if chat_template_kwargs else {}
    if enable_thinking is not None:
        kwargs["enable_thinking"] = enable_thinking
    rows = _prompts(prompts, split, name, limit)
    model: Any
    if endpoint:
        from ..training.endpoint import Endpoint

        extra = parse_json_object(extra_body, "--extra-body") if extra_body else {}
        model, tokenizer = (
            Endpoint(endpoint, target or "", None, concurrency, timeout, retries, extra_body=extra),
            None,
        )
    else:
        from .decoding import load_target

        model, tokenizer = load_target(target, dtype)
    answer(
        model,
        rows,
        output,
        tokenizer=tokenizer,
        self_prompts=self_prompts,
        openers=opener or ("",),
        chat_template_kwargs=kwargs,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        batch_size=batch_size,
        seed=seed,
        drop_unfinished=drop_unfinished,
    )
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(_summary(Path(output))))
    if push_to_hub:
        console.print(Text(f"Uploaded: {_upload(Path(output), push_to_hub)}"))


def parse_json_object(text: str, option: str) -> dict[str, Any]:
    """The JSON object that an option holds."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadParameter(f"{option} is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadParameter(f'{option} must be a JSON object, such as {{"enable_thinking": false}}.')
    return value


def _prompts(source: str | None, split: str, name: str | None, limit: int | None) -> Dataset | None:
    from ..training.sources import load_examples

    if source is None:
        return None
    rows = load_examples(source, split, name)
    return rows.select(range(min(limit, len(rows)))) if limit else rows


def _summary(output: Path) -> str:
    from ..training.regenerate import RECORD

    result = json.loads((output / RECORD).read_text(encoding="utf-8"))["result"]
    parts = [f"{result['answers']} answers in {output}"]
    if "answer_tokens" in result:
        parts.append(f"{result['answer_tokens']} tokens")
    parts += [f"{result['cut_off']} cut off at the length limit"] * bool(result["cut_off"])
    parts += [f"{result['refused']} prompts without an answer"] * bool(result["refused"])
    return ", ".join(parts) + "."


def _upload(output: Path, repo: str) -> str:
    from huggingface_hub import HfApi

    from ..training.regenerate import ANSWERS, RECORD

    api = HfApi()
    url = api.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
    api.upload_folder(repo_id=repo, repo_type="dataset", folder_path=output, allow_patterns=[ANSWERS, RECORD])
    return str(url)
