"""From overrides to a config, and what every mistake is told."""

import re
from pathlib import Path

import pytest

from pipeline.config import RunConfig, known_keys
from pipeline.config.run_identity import OPERATIONAL, differences, identity_digest, is_operational
from pipeline.errors import ConfigError
from pipeline.transport.redis_streams import MORE_MEMORY
from slurm.submission import compose_config
from tests.fakes.composed_config import compose_cached


@pytest.mark.parametrize("experiment", compose_config.config_groups()["experiment"])
def test_every_experiment_composes(experiment: str) -> None:
    assert isinstance(compose_config.compose_config([f"experiment={experiment}"]), RunConfig)


@pytest.mark.parametrize(
    ("group", "choice"),
    [
        (group, choice)
        for group, choices in compose_config.config_groups().items()
        for choice in choices
        if group != "experiment"
    ],
)
def test_every_choice_of_every_group_composes(group: str, choice: str) -> None:
    config = compose_config.compose_config(["experiment=demo", f"{group}={choice}"])
    assert config.name == "demo"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("experiment=dmeo", "; did you mean demo?"),
        ("loss=grop", "did you mean grpo?"),
        ("optim.lrr=1", "optim.lrr=1: expected a known key; did you mean optim.lr?"),
        (
            "training.sft={steps: 3}",
            "one key at a time; set training.sft.steps, ",
        ),
        ("rollout=3", "set rollout.group_size, rollout.oversample"),
        ("optim.lr=fast", "optim.lr='fast': expected a valid number"),
        ("optim.lr=-1", "expected greater than or equal to 0"),
        ("optim.lr=1e-4,1e-5", "expected one value"),
        ("optim.lr", "expected key=value"),
        ("loss.name=grop", "did you mean grpo?"),
        ("rollout.group_size=1", "greater than or equal to 2"),
        ("optim.beta1=1", "less than 1"),
        ("optim.beta2=1.0", "less than 1"),
        ("optim.weight_decay=inf", "finite number"),
        ("loss.entropy=nan", "finite number"),
        ("rollout.temperature=inf", "finite number"),
        ("cluster.stop_seconds=inf", "finite number"),
        ("inference.backend=ncc", "'gloo'"),
        ("name='a b'", "letters, digits"),
        ("seed=${sed}", "overrides that compose"),
        ("tracking=wandbb", "did you mean wandb?"),
        (
            "tracking.project=a team's",
            """tracking.project="a team's": expected a value in Hydra's syntax; quote it: """
            """'tracking.project="a team'"'"'s"'""",
        ),
        ("cluster.container.image=a#b", """quote it: 'cluster.container.image="a#b"'"""),
        ("task.options={a: [1}", "close its brackets"),
        ("preference.loss=dpo", "did you mean sigmoid?"),
        ("task.tasks.0.weight=2", "task.tasks.0.weight='2': expected an element that the list has"),
        ("+task.tasks.3={name: arithmetic}", "to add one, set the whole list: task.tasks=[…]"),
        (
            "task.tasks.sums.weight=2",
            "expected a number in place of 'sums'; elements have numbers: task.tasks.0.weight=…",
        ),
        ("task.tasks={sums: 1}", "expected a list; in brackets, also with one element: task.tasks=[…]"),
    ],
)
def test_a_mistake_is_named_with_its_mend(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config.compose_config(["experiment=demo", override])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError) as of_point:
        compose_cached(["experiment=demo", override])
    assert str(of_point.value) == str(caught.value)


def test_a_run_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="choose an experiment"):
        compose_config.compose_config([])


def test_keys_that_no_file_mentions_can_be_set() -> None:
    config = compose_config.compose_config(["experiment=demo", "optim.eps=1e-6", "task.options.digits=1"])
    assert config.optim.eps == 1e-6
    assert config.task.options["digits"] == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=demo", "loss.kl=0.1", "loss=ppo", "reward.functions=a:f"],
        ["loss.kl=1e-1", "experiment=tinker", "serve.bases={org/other: /models/other}"],
        ["experiment=demo", "cluster=slurm", "faults=[kill:inference[0]@step=7]", "+cluster.sbatch.reservation=a"],
        ["experiment=demo", "optim.lr=1e-3", "optim.lr=1e-2", "optim.eps=${optim.lr}"],
        ["experiment=demo", "~training.steps"],
    ],
)
def test_a_composer_of_many_configs_composes_what_hydra_does(overrides: list[str]) -> None:
    assert compose_cached(overrides) == compose_config.compose_config(overrides)


def test_a_composer_keeps_no_point_of_another_and_resolves_last(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "name: a\ndefaults: [schema_defaults, _self_]\noptim: {lr: 2, eps: '${optim.lr}'}"
    )
    composer = compose_config.ConfigComposer(tmp_path)
    needed = ["model.path=m", "task.name=t", "loss.name=grpo", "training.steps=1", "training.prompts_per_step=1"]
    for lr in (0.5, 0.25):
        overrides = [*needed, "cluster.scheduler=local", f"optim.lr={lr}"]
        config = composer.compose(overrides)
        assert (config.optim.lr, config.optim.eps) == (lr, lr)
        assert config == compose_config.compose_config(overrides, tmp_path)


def test_every_key_is_documented() -> None:
    assert [key for key, field in known_keys().items() if not field.description] == []


def test_configs_differ_by_named_keys() -> None:
    one = compose_config.compose_config(["experiment=demo"])
    other = compose_config.compose_config(["experiment=demo", "seed=3", "optim.lr=1e-3"])
    assert differences(one, other) == ["optim.lr: 0.0001 → 0.001", "seed: 0 → 3"]
    assert identity_digest(one) != identity_digest(other)


@pytest.mark.parametrize("name", OPERATIONAL)
def test_every_operational_key_exists(name: str) -> None:
    assert any(key == name or key.startswith(f"{name}.") for key in known_keys())


OPERATIONS = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
ADVICE = {
    "Redis": MORE_MEMORY,
    "failures": "".join(line.split("|")[-2] for line in OPERATIONS.splitlines() if "the same command resumes" in line),
    "memory": OPERATIONS.partition("\n## Too little memory\n")[2].partition("Host memory")[0],
    "deadlines": OPERATIONS.partition("\n## Deadlines\n")[2].partition("\n## ")[0],
}


@pytest.mark.parametrize("advice", ADVICE.values(), ids=ADVICE)
def test_a_resumed_run_may_change_every_key_that_it_is_advised_to(advice: str) -> None:
    named = {word for word in re.findall(r"\w+(?:\.\w+)+", advice) if word in known_keys()}
    advised = named - {"model.max_length"}  # a bound that is told, too
    assert advised
    assert [key for key in advised if not is_operational(key)] == []


def test_deadlines_and_sizes_do_not_make_another_run() -> None:
    one = compose_config.compose_config(["experiment=demo"])
    changed = ["cluster.startup_seconds=900", "training.micro_batch_tokens=999", "resources.spare_nodes=1", "output=x"]
    other = compose_config.compose_config(["experiment=demo", *changed])
    assert differences(one, other) == []
    assert identity_digest(one) == identity_digest(other)


@pytest.mark.parametrize(
    ("overrides", "base", "points"),
    [
        (["loss=grpo,gspo", "seed=1"], ("seed=1",), [("loss=grpo",), ("loss=gspo",)]),
        (
            ["seed=1,2", "optim.lr=1e-4,3e-4"],
            (),
            [(seed, lr) for seed in ("seed=1", "seed=2") for lr in ("optim.lr=0.0001", "optim.lr=0.0003")],
        ),
        (["seed=range(1,4)"], (), [("seed=1",), ("seed=2",), ("seed=3",)]),
        (["optim.schedule=choice(linear,cosine)"], (), [("optim.schedule=linear",), ("optim.schedule=cosine",)]),
        (["loss=glob(g*)"], (), [("loss=grpo",), ("loss=gspo",)]),
        (["loss=glob(r*,exclude=*_pp)"], (), [("loss=reinforce",), ("loss=rloo",)]),
        (["seed=1,2,1"], (), [("seed=1",), ("seed=2",)]),
        (["seed=1,2", "seed=3"], ("seed=3",), [()]),
        (["seed=1", "+seed=2,3"], (), [("seed=2",), ("seed=3",)]),
        (["++seed=2,3", "seed=1,4"], (), [("seed=1",), ("seed=4",)]),
        (["+seed=1,2", "++seed=3"], ("++seed=3",), [()]),
        (["++seed=1", "+optim.lr=1e-4,3e-4"], ("++seed=1",), [("optim.lr=0.0001",), ("optim.lr=0.0003",)]),
        (["~task.options", "seed=3"], ("~task.options", "seed=3"), [()]),
        (["model.path='a, b','c'"], (), [("model.path='a, b'",), ("model.path='c'",)]),
    ],
)
def test_a_sweep_expands_as_hydra_would(
    overrides: list[str], base: tuple[str, ...], points: list[tuple[str, ...]]
) -> None:
    assert compose_config.expand_sweep(overrides) == compose_config.Expansion(base, tuple(points))


def test_the_points_are_those_of_hydras_own_sweeper() -> None:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = ["seed=1", "optim.lr=1e-4,3e-4", "loss=grpo,gspo", "model.path='x y',z", "training.steps=range(2,9,3)"]
    theirs = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None)[0]
    ours = compose_config.expand_sweep(overrides)
    assert len(theirs) == len(ours.points) == 24
    assert [sorted(point) for point in theirs] == [sorted([*ours.base, *point]) for point in ours.points]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=interval(0,1)", "expected values that can be listed; use choice(…) or range(start,stop,step)"),
        (
            "loss=glob(z*)",
            "expected at least one value; choose from: cispo, dapo, dr_grpo, dro, grpo",
        ),
        ("seed=range(3,1)", "expected at least one value"),
        ("seed=range(0,1000000000)", "expected at most 1000 points"),
        ("name=a,b", "each point of a sweep gets its own directory"),
        ("seed=1,", "expected key=value"),
    ],
)
def test_what_cannot_be_swept_is_named_with_its_mend(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config.expand_sweep([override])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("axis", "tried"),
    [
        ("optim.lr=tag(log,interval(1e-5,1e-2))", ["optim.lr=1e-05", "optim.lr=0.01"]),
        ("rollout.group_size=int(interval(2,8))", ["rollout.group_size=2", "rollout.group_size=8"]),
        ("+seed=range(1,9)", ["seed=1", "seed=2", "seed=3"]),
        ("loss=grpo,gspo", ["loss=grpo", "loss=gspo"]),
    ],
)
def test_the_ends_of_an_axis_are_what_is_tried_beforehand(axis: str, tried: list[str]) -> None:
    assert compose_config.axis_ends(axis, 3) == tried


def test_of_a_key_that_is_given_twice_the_last_says_whether_it_is_swept() -> None:
    given = ["seed=1,2", "loss=grpo", "+seed=3", "optim.lr=1e-4", "optim.lr=interval(1e-5,1e-3)"]
    assert compose_config.split_axes(given) == (("loss=grpo", "+seed=3"), ("optim.lr=interval(1e-5,1e-3)",))


def test_a_point_is_spelt_alike_however_a_sweeper_writes_it() -> None:
    fixed = ["seed=1", "~task.options"]
    chosen = ["loss=grpo", "++seed=1", "~task.options=", "+optim.lr=1e-4"]
    assert compose_config.spell_point(chosen, fixed) == ("loss=grpo", "optim.lr=0.0001")
    assert compose_config.spell_point(["optim.lr=0.0001", "loss=grpo"], fixed) == ("optim.lr=0.0001", "loss=grpo")
