"""The keys that `training.memory=auto` chooses, over a table of plans."""

from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.errors import ConfigError
from pipeline.topology.gpu_memory import trainer_memory
from pipeline.topology.memory_budget import GIB
from pipeline.topology.memory_choice import choose_memory
from pipeline.topology.memory_fit import check_memory
from pipeline.topology.sizes import Sizes
from tests.fakes.configs import make_config
from tests.unit.topology.test_gpu_memory import B8

B1 = replace(
    B8,
    parameters=1_700_000_000,
    trained=1_700_000_000,
    outside_layers=300_000_000,
    layer=50_000_000,
    layers=28,
    hidden=2048,
    activations=4e6,
    selected=1.5e6,
)
ADAPTERS = replace(B8, trained=40_000_000, head_trained=False)
FULL = {"reshard_after_forward": True, "activation_checkpointing": "full"}


def plan(processes: int, gpu: str, **training: Any) -> Any:
    return make_config(
        resources={"device": "cuda", "gpu_memory": gpu, "trainer": {"processes": processes, "gpus": 1}},
        model={"path": "tiny", "dtype": "bfloat16", "max_length": 4096},
        training={"steps": 0, "sft": {"steps": 1, "batch": 64}, "prompts_per_step": 64, "memory": "auto"} | training,
    )


@pytest.mark.parametrize(
    ("sizes", "processes", "memory", "expected"),
    [
        (B1, 1, "141G", {}),
        (B1, 1, "80G", {"micro_batch_tokens": 8192}),
        (B1, 1, "62G", {"activation_checkpointing": "selective"}),
        (B1, 1, "40G", {"activation_checkpointing": "full"}),
        (ADAPTERS, 1, "80G", {"micro_batch_tokens": 8192}),
        (ADAPTERS, 1, "60G", {"activation_checkpointing": "full"}),
        (B8, 8, "80G", {"activation_checkpointing": "full"}),
        (B8, 8, "40G", FULL),
        (B8, 2, "80G", FULL),
    ],
)
def test_the_cheapest_change_that_fits_is_chosen(
    sizes: Sizes, processes: int, memory: str, expected: dict[str, Any]
) -> None:
    given = plan(processes, memory)
    chosen, lines = choose_memory(given, sizes)
    assert {key: getattr(chosen.training, key) for key in expected} == expected
    changed = {key for key, value in chosen.training if value != getattr(given.training, key)}
    assert changed == expected.keys()
    assert len(lines) == len(expected)
    check_memory(chosen, sizes)


def test_a_line_names_the_key_its_value_and_the_gain() -> None:
    _, (line,) = choose_memory(plan(1, "80G"), B1)
    assert line.startswith("training.micro_batch_tokens=8192, chosen: activations of fewer tokens at a time; ")
    assert line.endswith(" of 80.0")


def test_a_key_that_differs_from_its_default_stays() -> None:
    chosen, _ = choose_memory(plan(1, "48G", activation_checkpointing="selective", micro_batch_tokens=12_288), B1)
    assert (chosen.training.activation_checkpointing, chosen.training.micro_batch_tokens) == ("selective", 12_288)
    everything = {**FULL, "micro_batch_tokens": 12_288, "staging_device": "host"}
    refused = plan(1, "30G", **everything)
    assert choose_memory(refused, B1) == (refused, ())
    with pytest.raises(ConfigError, match=r"resources\.gpu_memory"):
        check_memory(refused, B1)


def test_nothing_is_chosen_unless_it_is_asked_for_needed_and_enough() -> None:
    for given in (plan(1, "40G", memory="explicit"), plan(1, ""), plan(1, "141G"), plan(1, "16G")):
        assert choose_memory(given, B1) == (given, ())


def test_micro_batches_shrink_to_the_longest_sample_at_last() -> None:
    given = plan(1, "32G")
    chosen, _ = choose_memory(given, B1)
    assert FULL.items() <= dict(chosen.training).items()
    assert 4096 <= chosen.training.micro_batch_tokens < 16_384
    assert trainer_memory(chosen, B1).total <= 32 * GIB
