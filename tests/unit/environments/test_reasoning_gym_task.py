"""reasoning-gym: prompts by index, held-out ones apart, and the library's scores."""

import pickle
import sys
from typing import Any

import pytest

from pipeline.config import TaskConfig
from pipeline.environments import Prompt, load_task
from pipeline.environments.reasoning_gym_task import ReasoningGym
from pipeline.errors import ConfigError

pytest.importorskip("reasoning_gym", reason="pip install -e '.[reasoning-gym]'")

SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def gym(seed: int = 0, **options: Any) -> ReasoningGym:
    options = {"datasets": SUMS, "held_out": 16, "tags": False, "system": ""} | options
    task = load_task(TaskConfig(name="reasoning_gym", options=options), seed)
    assert isinstance(task, ReasoningGym)
    return task


def question(prompt: Prompt) -> str:
    return str(prompt.messages[-1]["content"])


def test_prompts_depend_on_seed_and_index_and_no_two_seeds_are_shifted() -> None:
    task, other = gym(seed=1), gym(seed=2)
    asked, others = ([question(each.prompt(index)) for index in range(50)] for each in (task, other))
    assert asked == [question(gym(seed=1).prompt(index)) for index in range(50)]
    assert all(asked[shift:] != others[: len(asked) - shift] for shift in range(45))


def test_held_out_puzzles_are_the_same_for_every_seed_and_never_trained() -> None:
    """Of 200 sums there are 16 held out: a generator that repeats itself would hit them every twelfth time."""
    task = gym(seed=1, size=2048)
    assert task.held_out() == gym(seed=7).held_out()
    held_out = {question(prompt) for prompt in task.held_out()}
    assert len(held_out) == 16
    assert not held_out & {question(task.prompt(index)) for index in range(2048)}
    assert not held_out & {question(task.demonstration(index).prompt) for index in range(2048)}


def test_a_mixture_draws_by_weight_and_each_answer_is_scored_by_its_own_generator() -> None:
    task = gym(datasets=SUMS | {"gcd": {"weight": 3}}, size=400)
    prompts = [task.prompt(index) for index in range(400)]
    names = [prompt.columns["dataset"] for prompt in prompts]
    assert 240 < names.count("gcd") < 360
    assert all(task.reward(prompt, prompt.columns["answer"]) == 1 for prompt in prompts)
    assert all(task.reward(pickle.loads(pickle.dumps(prompt)), "no number") < 0.1 for prompt in prompts[:20])


def test_partial_scores_count_only_where_they_are_wanted() -> None:
    for partial, least in ((True, 0.01), (False, 0.0)):
        task = gym(partial=partial)
        prompt = task.prompt(0)
        score = task.reward(prompt, f"it is {prompt.columns['answer']}")
        assert least <= score < 1
        assert (score > 0) == partial


def test_answers_stand_between_tags_unless_it_is_said_otherwise() -> None:
    task = gym(tags=True, system="Answer in tags.")
    shown = task.demonstration(3)
    assert shown.prompt.messages[0] == {"role": "system", "content": "Answer in tags."}
    assert task.reward(shown.prompt, f"first <answer>9999</answer> then {shown.answer}") == 1
    assert task.reward(shown.prompt, shown.prompt.columns["answer"]) == 0


def test_a_careless_teacher_gives_the_answer_of_another_puzzle() -> None:
    task = gym(demonstration_error_rate=0.5)
    scores = [task.reward(shown.prompt, shown.answer) == 1 for shown in map(task.demonstration, range(200))]
    assert 80 < sum(scores) < 150


@pytest.mark.parametrize("name", ["word_ladder", "gsm_symbolic"])
def test_a_generator_with_a_list_of_its_entries_has_as_many_as_any_other(name: str) -> None:
    task = gym(datasets={name: {}}, held_out=2)
    assert len({question(task.prompt(index)) for index in (0, 700, 5000)}) == 3


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"datasets": {"chain_sums": {}}}, "datasets.chain_sums", "did you mean chain_sum"),
        ({"datasets": {"chain_sum": {"digits": 3}}}, "datasets.chain_sum", "digits"),
        ({"datasets": {"chain_sum": {"min_terms": 9}}}, "datasets.chain_sum", "min_terms"),
        ({"datasets": {"chain_sum": {"seed": 9}}}, "datasets.chain_sum.seed", "the run's seed"),
        ({"datasets": {}}, "datasets", "at least 1"),
        ({"held_out": 4000}, "held_out", "at most 200, the different puzzles"),
    ],
)
def test_a_wrong_option_is_named_with_its_key(options: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        gym(**options).held_out()
    assert caught.value.key == f"task.options.{key}"
    assert "\n" not in str(caught.value)


def test_without_the_library_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"-m pip install 'reasoning-gym"):
        gym()
