"""Which chat templates can be masked, and whether they mark the same as their variants with `{% generation %}` blocks.

    python -m tests.bench.bench_masks FOLDER        # of *.jinja; TRL ships one: trl/chat_templates

Of each `<name>.jinja` it masks a conversation of one turn and one of two, by every choice of `data.train_on`; beside
it, if it is there, `<name>_training.jinja`. The tokenizer is a small one of bytes: what is compared is text.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from pipeline.data import Conversation
from pipeline.environments.assistant_masks import AssistantMasker, Choice, MaskError
from pipeline.environments.chat_tokenizer import ChatTokenizer
from tests.bench.tables import markdown
from tests.fakes.chat_models import make_chat_model

ONE = ({"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "It is 2."})
TALKS = {"one turn": Conversation(ONE), "two turns": Conversation((*ONE, *ONE))}
CHOICES: tuple[Choice, ...] = ("all", "last", "each")


def spans_of(template: Path, talk: Conversation, choice: Choice) -> list[str] | str:
    """What is trained, or why it cannot be masked."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_chat_model(Path(name), template.read_text())
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<|endoftext|>"}))
        try:
            rows = list(AssistantMasker(ChatTokenizer(folder), choice).rows(talk))
        except MaskError as error:
            return str(error)
        return [row.text[begin:end].rstrip() for row in rows for begin, end in row.spans]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    templates = sorted(parser.parse_args().folder.glob("*.jinja"))
    plain = [path for path in templates if not path.stem.endswith("_training")]
    if not plain:
        parser.error("there is no *.jinja in that folder")
    table, apart, refused = [], [], dict[str, str]()
    for name, talk in TALKS.items():
        for choice in CHOICES:
            counts: Counter[str] = Counter()
            for path in plain:
                mine = spans_of(path, talk, choice)
                counts["masked"] += isinstance(mine, list)
                if isinstance(mine, str):
                    refused.setdefault(path.stem, mine)
                marked = path.with_name(f"{path.stem}_training.jinja")
                theirs = spans_of(marked, talk, choice) if marked.exists() else "there is none"
                if isinstance(mine, list) and isinstance(theirs, list):
                    counts["compared"] += 1
                    counts["same"] += mine == theirs
                    apart += [(path.stem, mine[0], theirs[0])] if choice == "all" and mine != theirs else []
            table.append((name, choice, len(plain), counts["masked"], counts["compared"], counts["same"]))
    print(markdown(("conversation", "train_on", "templates", "masked", "with marks too", "same spans"), table))
    print("\nnot the same:")
    for stem, first, other in dict.fromkeys(apart):
        print(f"  {stem}: {first!r}, marked {other!r}")
    print("\nfirst refusals:")
    for stem, reason in refused.items():
        print(f"  {stem}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
