"""
Prompts of one domain: functions of a Python code base, each with the request to explain it. A drafter can be adapted
to the answers (docs/adapt.md); functions of other files are held out to measure it on.

    python examples/write_code_prompts.py --output prompts                      # Python's own library
    python examples/write_code_prompts.py --source ~/my-project --output prompts

`prompts/train.jsonl` is for `hf-dspark regenerate --prompts`, `prompts/tasks/explain.jsonl` for `hf-dspark evaluate
--tasks`. Docstrings are left out, so that they don't give the answer away.
"""

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path


REQUEST = "Explain what this Python function does."
LINES = range(5, 21)
CHARACTERS = 800
PASSED_OVER = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "pydoc_data"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    library = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--source", type=Path, default=library, help="folder of .py files (default: Python's library)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the prompts")
    parser.add_argument("--prompts", type=int, default=900, help="to train on, at most (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=60, help="to measure on, at most (default: %(default)s)")
    parser.add_argument("--per-file", type=int, default=4, help="functions of a file, at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def functions(file: Path) -> Iterator[str]:
    """The source of a file's functions of medium length, without decorators and docstrings."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        if ast.get_docstring(node) is not None:
            del node.body[0]
        if not node.body:
            continue
        node.decorator_list = []
        code = ast.unparse(node)
        if code.count("\n") + 1 in LINES and len(code) < CHARACTERS:
            yield code


def main() -> None:
    args = parse_arguments()
    source = args.source.expanduser()
    files = [file for file in sorted(source.rglob("*.py")) if not PASSED_OVER & set(file.relative_to(source).parts)]
    if not files:
        raise SystemExit(f"{source} holds no .py file.")
    chance, seen = random.Random(args.seed), set()
    chance.shuffle(files)
    train, held_out = [], []
    for number, file in enumerate(files):
        found = [code for code in dict.fromkeys(functions(file)) if code not in seen]
        seen.update(found)
        chance.shuffle(found)
        # Whole files are held out: functions of one file resemble each other.
        kept = held_out if number % 8 == 0 else train
        kept += [f"{REQUEST}\n```python\n{code}\n```" for code in found[: args.per_file]]
    for prompts in (train, held_out):
        chance.shuffle(prompts)
    (args.output / "tasks").mkdir(parents=True, exist_ok=True)
    for name, prompts in (("train", train[: args.prompts]), ("tasks/explain", held_out[: args.held_out])):
        text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (args.output / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{args.output / name}.jsonl: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
