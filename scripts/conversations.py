"""Write conversations of very unequal lengths, made of the standard library: a function or a module is described, and
the answer is its source. FOLDER/chats.jsonl for Megatron's --sft, FOLDER/text.jsonl to train a tokenizer."""

import argparse
import ast
import json
import random
import sysconfig
from pathlib import Path

from megatron.seq1f1b.files.reading import read_text
from megatron.seq1f1b.files.writing import written_together

FUNCTIONS, MODULES = 600, 8


def chat(asked: str, answer: str) -> dict:
    roles = {"system": "You write Python.", "user": asked, "assistant": answer}
    return {"messages": [{"role": role, "content": content} for role, content in roles.items()]}


def main(folder: Path) -> None:
    functions, modules = [], []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = read_text(path)
        if len(text) > 8_000 and ast.get_docstring(tree := ast.parse(text)):
            modules.append(chat(f"Write the module {path.stem}.", text))
            for node in ast.walk(tree):
                source = ast.get_source_segment(text, node) if isinstance(node, ast.FunctionDef) else None
                if source and ast.get_docstring(node):
                    functions.append(chat(f"Write {node.name}: {ast.get_docstring(node)}", source))
    draw = random.Random(1)
    chats = draw.sample(functions, FUNCTIONS) + draw.sample(modules, MODULES)
    draw.shuffle(chats)
    with written_together(folder / "chats.jsonl", folder / "text.jsonl") as (of_chats, of_text):
        of_chats.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        texts = ({"text": chat["messages"][-1]["content"]} for chat in chats)
        of_text.write_text("".join(json.dumps(text) + "\n" for text in texts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    main(parser.parse_args().folder)
