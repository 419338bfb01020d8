"""Recipes of tinker-cookbook, unmodified and offline, against `launchers/serve.py` on this machine.

    TINKER_COOKBOOK=cb/bin/python python -m tests.integration.tinker_recipes                       # all of them
    TINKER_COOKBOOK=cb/bin/python python -m tests.integration.tinker_recipes --only sl_loop rl_loop
    python -m tests.integration.tinker_recipes --page docs/tinker.md       # write the table from the results so far

Owns the list of recipes with their options here, and the directory that they run in: a tiny model, its tokenizer and
data lie there under their names on the hub, so that no recipe needs a network. `TINKER_COOKBOOK` names the Python of an
environment with the cookbook (`tests.integration.test_tinker_cookbook` has the commands that make it). Results are
added to one file, so that recipes can be run in several calls.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from pipeline.tinker.gateway_settings import Address, address_file
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for

MODEL = "Qwen/Qwen3.5-9B"
"""The model that a recipe has written into its code; here it is the name of a directory with a tiny one."""
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
LENGTH = 8192
START_SECONDS, RECIPE_SECONDS = 300, 900
RESULTS = Path("recipes.jsonl")
BEGIN, END = "<!-- recipes -->", "<!-- end of recipes -->"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Recipe:
    """A recipe of the cookbook, and how it is run here.

    Attributes:
        module: below `tinker_cookbook.recipes`.
        given: options beside the model's name, its rank and the folder of its log.
        data: the data set of the hub that local rows replace; empty: it makes its own.
        shows: the metric of which the table has the first and the last value.
        rank: whether it has an option for the adapter's rank.
        question: what it reads, if it trains nothing: its answer is a JSON object of probabilities.
        refusal: words of the server's refusal; empty: it runs to its end.
    """

    module: str
    given: Mapping[str, object] = field(default_factory=dict)
    data: str = ""
    shows: str = ""
    rank: bool = True
    refusal: str = ""
    question: str = ""


_APART = "optim/kl_sample_train_v1"
"""The mean difference of the sampler's log-probabilities and the trainer's, which recipes of RL report (nats)."""
_SIZES = {"batch_size", "group_size", "groups_per_batch", "max_steps", "max_tokens", "max_length"}
_SIZES |= {"eval_every", "save_every", "num_train_datapoints", "num_test_datapoints", "train_group_size"}
_SIZES |= {"deepmath_groups_per_batch", "tulu3_groups_per_batch", "topk"}
_SIZES |= {"task.num_pages_min", "task.num_pages_max", "task.page_chars"}
_UNSAVED: Mapping[str, object] = {"eval_every": 0, "save_every": 0}
_TWO: Mapping[str, object] = {"max_steps": 2, **_UNSAVED}
_GAME: Mapping[str, object] = {"batch_size": 2, "group_size": 2, "max_tokens": 8, **_TWO}
_PAGES: Mapping[str, object] = {"task.num_pages_min": 2, "task.num_pages_max": 2, "task.page_chars": 500}
_SMALL: Mapping[str, object] = {"max_steps": 2, "group_size": 4, "batch_size": 2}
_SFT: Mapping[str, object] = {"batch_size": 4, "max_steps": 6, "max_length": 512}
_ARITHMETIC: Mapping[str, object] = {"group_size": 8, "groups_per_batch": 8, "max_steps": 4, **_UNSAVED}
_REWARD, _NLL = "env/all/reward/total", "train_mean_nll"
_REFUSAL = "take loss_fn=importance_sampling"
RECIPES: Mapping[str, Recipe] = {
    "sl_loop": Recipe("sl_loop", _SFT, "no_robots", _NLL),
    "rl_loop": Recipe("rl_loop", {**_SMALL, "max_tokens": 16, "loss_fn": "gspo"}, "gsm8k", "reward/total"),
    "rl_loop, its own loss": Recipe("rl_loop", {**_SMALL, "max_tokens": 16}, "gsm8k", refusal=_REFUSAL),
    "sl_basic": Recipe("sl_basic", {"max_steps": 2, "eval_every": 0}, "no_robots", _NLL),
    "rl_basic": Recipe("rl_basic", {**_TWO, "max_tokens": 16, "max_steps": 1}, "gsm8k", _REWARD),
    "chat_sl": Recipe("chat_sl.train", _SFT, "no_robots", _NLL),
    "prompt_distillation": Recipe(
        "prompt_distillation.train",
        {"file_path": "distillation.jsonl", **_SFT},
        "as `create_data` writes it, whose model's name is in its code",
        _NLL,
    ),
    "preference, shorter": Recipe(
        "preference.shorter.train", {**_SMALL, "max_tokens": 16, "eval_every": 0}, "", _REWARD, rank=False
    ),
    "preference, DPO": Recipe("preference.dpo.train", {**_SFT, "max_steps": 3}, "hh-rlhf", "dpo_loss", rank=False),
    "on-policy distillation": Recipe(
        "distillation.on_policy_distillation",
        {"teacher_model": MODEL, "groups_per_batch": 2, "group_size": 2, "max_tokens": 16, **_TWO},
        "DeepMath-103K",
        "teacher_kl",
    ),
    "on-policy distillation, two teachers": Recipe(
        "distillation.on_policy_multi_teacher",
        {"deepmath_teacher_model": MODEL, "tulu3_teacher_model": MODEL}
        | {"deepmath_groups_per_batch": 2, "tulu3_groups_per_batch": 2, "group_size": 2, "max_tokens": 16, **_TWO},
        "DeepMath-103K, tulu-3-sft-mixture",
        "teacher_kl",
    ),
    "sdft": Recipe(
        "sdft.train",
        {"groups_per_batch": 2, "max_tokens": 16, "topk": 4, **_TWO},
        "SciKnowEval",
        "sdft/mean_teacher_entropy",
    ),
    "rubric": Recipe(
        "rubric.train",
        {"loss_fn": "importance_sampling", "grader_llm_name": MODEL, "train_jsonl_path": "rubric.jsonl"}
        | {"test_jsonl_path": "rubric.jsonl", "train_group_size": 2, "groups_per_batch": 2, "max_tokens": 16, **_TWO},
        "in the form of `generate_data`",
        _REWARD,
    ),
    "decisions (demo)": Recipe("decisions.demo", rank=False, question="How do I pick a learning rate?"),
    "math_rl, arithmetic": Recipe("math_rl.train", {"loss_fn": "importance_sampling", **_ARITHMETIC}, "", _REWARD),
    "math_rl, asynchronous": Recipe(
        "math_rl.train", {"loss_fn": "cispo", "max_steps_off_policy": 1, **_ARITHMETIC}, "", _REWARD
    ),
    "math_rl, its own loss": Recipe("math_rl.train", _ARITHMETIC, refusal=_REFUSAL),
    "guess_number": Recipe("multiplayer_rl.guess_number.train", _GAME, "", _REWARD, rank=False),
    "twenty_questions": Recipe("multiplayer_rl.twenty_questions.train", _GAME, "", _REWARD, rank=False),
    "text_arena": Recipe(
        "multiplayer_rl.text_arena.train",
        {"batch_size": 4, "num_train_datapoints": 16, "num_test_datapoints": 4, "max_tokens": 16, **_TWO},
        "",
        _REWARD,
        rank=False,
    ),
    "tool use (rl_numerics_check)": Recipe(
        "rl_numerics_check.train",
        {"group_size": 2, "groups_per_batch": 2, "max_tokens": 16, **_PAGES, **_TWO},
        "wikitext-103",
        _REWARD,
    ),
}


def write_room(room: Path) -> None:
    """The directory that recipes run in: model, tokenizer and data lie under their names on the hub."""
    write_model(room / MODEL)
    turns = [{"role": "user", "content": "Say a word."}, {"role": "assistant", "content": "Word."}]
    talk, grade = {"prompt": "p", "messages": turns}, {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}
    for split in ("train", "test"):
        _rows(room / "HuggingFaceH4" / "no_robots" / f"{split}.jsonl", talk, 256)
        _rows(room / "zwhe99" / "DeepMath-103K" / f"{split}.jsonl", grade)
        pair = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello.", "rejected": "\n\nHuman: Hi\n\nAssistant: Go."}
        _rows(room / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", pair)
    for name, config, row in (
        ("openai/gsm8k", "main", grade),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", {"text": " After the war many stayed until later ."}),
    ):
        _rows(room / name / "train.jsonl", row, 512)
        splits = "".join(f"  - split: {split}\n    path: train.jsonl\n" for split in ("train", "test"))
        head = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{splits}---\n"
        (room / name / "README.md").write_text(head)
    _rows(room / "distillation.jsonl", {"messages": turns})
    _rows(room / "allenai" / "tulu-3-sft-mixture" / "train.jsonl", {"messages": turns})
    choices = {"label": ["A", "B"], "text": ["hot", "cold"]}
    exam = {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-4-choices", "choices": choices}
    exam |= {"question": "How is ice?", "answerKey": "B"}
    _rows(room / "hicai-zju" / "SciKnowEval" / "test.jsonl", exam)
    rubric = {"rubric_str": "Does it say a word?", "extraction_regex": "<score>(.*?)</score>"}
    rubric |= {"grader_output_format_instruction": "Write <score>1</score> or <score>0</score>."}
    _rows(room / "rubric.jsonl", {"convo": turns[:1], "rubric_items": [rubric]})


def _rows(file: Path, row: Mapping[str, Any], count: int = 64) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{json.dumps(row)}\n" * count)


def write_model(folder: Path) -> None:
    """A tiny Qwen3 whose tokens are bytes and the marks of its chat template."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKS[2], pad_token=MARKS[0])
    whole.save_pretrained(folder)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    ids = {"eos_token_id": whole.eos_token_id, "pad_token_id": whole.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(whole), max_position_embeddings=LENGTH, tie_word_embeddings=False, **shape, **ids
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


@contextmanager
def serving(room: Path) -> Iterator[dict[str, str]]:
    """Run `launchers/serve.py` with the room's model; yields the variables of a client's environment."""
    options = {
        "experiment": "tinker",
        "cluster": "local",
        "output": room / "runs",
        "model.path": room / MODEL,
        "model.max_length": LENGTH,
        "serve.base_name": MODEL,
        "serve.sampling": "true",
        "serve.port": 0,
    }
    command = [
        sys.executable,
        str(ROOT / "launchers" / "serve.py"),
        *(f"{key}={value}" for key, value in options.items()),
    ]
    with (room / "serve.log").open("wb") as log:
        served = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    root = room / "runs" / "tinker" / "api"

    def listens() -> bool:
        assert served.poll() is None, (room / "serve.log").read_text()[-3000:]
        return address_file(root).exists()

    try:
        wait_for("the server", listens, START_SECONDS)
        address = shared_files.read_document(address_file(root), Address)
        assert address is not None
        yield {"TINKER_BASE_URL": address.url, "TINKER_API_KEY": (root / "key").read_text()}
    finally:
        os.killpg(served.pid, signal.SIGINT)
        try:
            served.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(served.pid, signal.SIGKILL)


def command_of(recipe: Recipe, python: str, log: Path) -> list[str]:
    """The recipe's command, as it is typed in the room."""
    given: dict[str, object] = {"model_name": MODEL}
    given |= {} if recipe.question else {"log_path": log}
    given |= {"lora_rank": 8} if recipe.rank else {}
    options = [f"{key}={value}" for key, value in {**given, **recipe.given}.items()]
    return [python, "-m", f"tinker_cookbook.recipes.{recipe.module}", *options]


def run_recipe(recipe: Recipe, python: str, room: Path, client: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run a recipe to its end; its metrics, a row for each step. `RuntimeError` with its last lines if it fails."""
    log = Path(tempfile.mkdtemp(dir=room)) / "log"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {**client, "HF_HUB_OFFLINE": "1", "HF_HOME": str(room / "hf"), "HF_DATASETS_CACHE": str(room / "hf")}
    command = command_of(recipe, python, log)
    done = subprocess.run(
        command, cwd=room, env=env, input=recipe.question, capture_output=True, text=True, timeout=RECIPE_SECONDS
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    if recipe.question:
        answer: dict[str, float] = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
        return [answer]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def result_of(recipe: Recipe, rows: list[dict[str, Any]]) -> str:
    """The result of a run, for the table."""
    if recipe.question:
        return f"{len(rows[0])} probabilities, the sum is {sum(rows[0].values()):.3f}"
    steps = [row for row in rows if "progress" in row or any(name.startswith("progress/") for name in row)]
    words = f"{len(steps)} steps"
    values = [row[recipe.shows] for row in rows if recipe.shows in row]
    if values:
        words += f"; `{recipe.shows}` {values[0]:.3f} → {values[-1]:.3f}"
    apart = [abs(row[_APART]) for row in rows if _APART in row]
    return words + (f"; `{_APART}` {max(apart):.1e} at most" if apart else "")


def refusal_of(recipe: Recipe, python: str, room: Path, client: Mapping[str, str]) -> str:
    """The server's refusal of a recipe; `RuntimeError` if there is none."""
    try:
        run_recipe(recipe, python, room, client)
    except RuntimeError as error:
        if recipe.refusal not in str(error):
            raise
        return f"refused: “{recipe.refusal}”"
    raise RuntimeError(f"{recipe.module} was expected to be refused")


def row_of(name: str, recipe: Recipe, result: str) -> str:
    """A row of the table. The command has no folder of the log, and Python's name in place of its path."""
    command = " ".join(each for each in command_of(recipe, "python", Path()) if not each.startswith("log_path="))
    named = [key for key in recipe.given if not _is_size(key)]
    changed = ["sizes"] if len(named) < len(recipe.given) else []
    changed += [f"`{key}`" for key in named]
    changed += [f"data: {recipe.data}"] if recipe.data else []
    return f"| {name} | `{command}` | {result} | {', '.join(['model', *changed])} |"


def _is_size(key: str) -> bool:
    return key in _SIZES or key.rpartition(".")[2] in _SIZES


def write_page(page: Path, results: Path) -> None:
    """Put the newest result of each recipe between the marks of the page."""
    found = dict(json.loads(line) for line in results.read_text().splitlines())
    head = "| recipe | command | result | what was changed |\n|---|---|---|---|"
    rows = [row_of(name, recipe, found[name]) for name, recipe in RECIPES.items() if name in found]
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{head}\n" + "\n".join(rows) + f"\n{END}{after}")


def main() -> int:
    """Run recipes, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page:
        write_page(options.page, options.results)
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as folder, options.results.open("a") as results:
        room = Path(folder)
        write_room(room)
        with serving(room) as client:
            for name in options.only:
                failed += not _record(name, os.environ["TINKER_COOKBOOK"], room, client, results)
    return 1 if failed else 0


def _record(name: str, python: str, room: Path, client: Mapping[str, str], results: TextIO) -> bool:
    recipe = RECIPES[name]
    try:
        if recipe.refusal:
            result = refusal_of(recipe, python, room, client)
        else:
            result = result_of(recipe, run_recipe(recipe, python, room, client))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"{name}: failed\n{error}", flush=True)
        return False
    print(f"{name}: {result}", flush=True)
    results.write(json.dumps([name, result]) + "\n")
    results.flush()
    return True


if __name__ == "__main__":
    sys.exit(main())
