"""Rules between keys: what would only fail later is refused at once, with its mend."""

import json
import re
from pathlib import Path

import pytest

from pipeline.config import ModelConfig, load_config
from pipeline.config.cross_checks import check_config, check_run
from pipeline.config.mesh_checks import check_context_heads, check_context_packing
from pipeline.config.routing_shape import check_routing_replay
from pipeline.config.teacher_checks import check_vocabulary
from pipeline.errors import ConfigError
from pipeline.tinker.server_pools import pool_of
from pipeline.tinker.tinker_records import Pool
from slurm.submission.compose_config import compose_config, config_groups
from tests.fakes.composed_config import compose_cached


@pytest.mark.parametrize("loss", config_groups()["loss"])
def test_every_loss_can_be_chosen_on_its_own(loss: str) -> None:
    check_run(compose_cached(["experiment=demo", f"loss={loss}"]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.kl=0.1"],
        ["loss.kl=0.1", "loss.kl_in=reward", "loss.reference_every=10"],
        ["loss.old_logprobs=recompute", "loss.tis=mask"],
        ["training.update_epochs=2", "training.mini_batches=8"],
        ["training.mask_truncated=true", "training.zero_variance_groups=drop", "loss.advantage_estimator=group_batch"],
        ["training.compile=true", "training.activation_checkpointing=full", "training.offload_idle_models=true"],
        ["model.lora.rank=4", "loss.kl=0.1"],
        ["model.lora.rank=4", "model.lora.alpha=8"],
        ["loss.kl=0.1", "loss.kl_estimator=k2"],
        ["loss.kl=0.1", "loss.kl_estimator=k1", "loss.kl_in=reward"],
        ["loss=ppo", "critic.lr=1e-3", "critic.clip=0", "loss.gae_lambda=0.9"],
        ["loss=rloo", "loss.ratio_cap=2"],
        ["loss.kl=1", "teacher.url=http://127.0.0.1:8000/v1", "teacher.model=wise"],
        ["loss.kl=1", "teacher.url=http://x/v1", "teacher.model=wise", "teacher.top_k=8", "loss.kl_estimator=k1"],
    ],
)
def test_what_can_be_carried_out_passes(overrides: list[str]) -> None:
    check_run(compose_cached(["experiment=demo", *overrides]))


@pytest.mark.parametrize("key", ["model.path", "output", "data.path", "task.options.levels"])
def test_a_value_that_is_no_utf_8_is_refused(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{re.escape(key)}='.*\\udcff': expected text in UTF-8; .*make a link to it"
    ):
        compose_config(["experiment=demo", f"{key}='/a\udcff'"])


def test_a_name_of_an_option_that_is_no_utf_8_is_refused() -> None:
    tree = compose_cached(["experiment=demo"]).model_dump(mode="json")
    tree["task"]["options"] = {"a\udcff": 1}
    with pytest.raises(ConfigError, match=r"task\.options\.a.* expected text in UTF-8"):
        load_config(tree)


SFT = ("training.steps=0", "training.sft.steps=5")
TAUGHT = ("teacher.url=http://x/v1", "teacher.model=wise")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.max_length=16", "rollout.max_tokens=32"],
        ["rollout.group_size=64", "streams.budget_bytes=65536"],
        ["resources.device=cuda", "resources.trainer.gpus=1"],
    ],
)
def test_sft_alone_is_held_to_no_rule_of_what_is_sampled(overrides: list[str]) -> None:
    check_run(compose_cached(["experiment=demo", *SFT, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["training.steps=0", "training.sft.steps=0"], "training.steps=0: expected 1 or more if training"),
        (["experiment=sft"], "data.path='': expected a dataset, whose rows the epochs count (1 training.sft.ep"),
        (["data.path=x", "training.sft.steps=0"], "data.path='x': expected nothing without SFT or preference training"),
        ([*SFT, "data.path=x", "training.sft.epochs=2"], "epochs=2.0: expected 0 with 5 steps; set one of them"),
        ([*SFT, "data.eval_rows=5"], "data.eval_rows=5: expected nothing without data.path; set that too"),
        ([*SFT, "cluster=slurm", "resources.hetjob=true"], "expected one with training.steps=0: the trainer is the"),
    ],
)
def test_what_would_train_nothing_or_have_no_services_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_run(compose_cached(["experiment=demo", *overrides]))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["loss.kl_in=reward"],
            "expected its default ('loss'), since loss.kl=0.0 does not read it; set that or leave it out, or set",
        ),
        (["loss.reference_every=5"], "or set loss.kl above 0"),
        (["loss.kl_estimator=k1"], "or set loss.kl above 0"),
        (["teacher.model=wise"], "teacher.model='wise': expected nothing without teacher.url"),
        (["teacher.url=http://x/v1"], "teacher.model='': expected the model's name at teacher.url"),
        ([*TAUGHT], "loss.kl=0.0: expected above 0 with teacher.url"),
        ([*TAUGHT, "loss.kl=1", "teacher.key_file=/none"], "teacher.key_file='/none': expected a file with the key"),
        ([*TAUGHT, "loss.kl=1", "loss.reference_every=5"], "loss.reference_every=5: expected 0 with teacher.url"),
        ([*TAUGHT, "loss.kl=1", "rollout.temperature=0.7"], "rollout.temperature=0.7: expected 1 with teacher.url"),
        ([*TAUGHT, "loss.kl=1", "training.zero_variance_groups=drop"], "expected keep with teacher.url"),
        (["teacher.top_k=4"], "teacher.top_k=4: expected 0 without teacher.url; set that too"),
        (
            [*TAUGHT, "loss.kl=1", "teacher.top_k=4", "loss.kl_in=reward"],
            "loss.kl_in='reward': expected loss with teacher.top_k, whose KL does not depend on the sampled token",
        ),
        (
            [*TAUGHT, "loss.kl=1", "teacher.top_k=64", "streams.budget_bytes=500000"],
            "streams.budget_bytes=500000: expected at least 546816, two of the largest groups",
        ),
        ([*SFT, *TAUGHT], "expected nothing in a run that samples nothing to train"),
        (["loss.kl=0.1", "loss.kl_estimator=k1"], "the gradient of k1 has mean zero; set loss.kl_estimator=k2"),
        (["loss.beta=0.1"], "loss.beta=0.1: expected its default (0.05), since loss.name=grpo does not read it"),
        (
            ["loss=ppo", "loss.beta=0.1"],
            "since loss.name=ppo does not read it; set that or leave it out, or set loss.name=dro",
        ),
        (["loss.ratio_cap=2"], "or set loss.name=reinforce or rloo"),
        (["loss=dro", "loss.clip_high=0.3"], "or set loss.name=cispo, ppo, grpo, dr_grpo, dapo, reinforce_pp or gspo"),
        (
            ["loss.gae_lambda=0.5"],
            "since loss.advantage_estimator=group_std does not read it; set that or leave it out, or set "
            "loss.advantage_estimator=gae",
        ),
        (["critic.lr=1e-3"], "or set loss.advantage_estimator=gae"),
        (["critic.clip=0"], "or set loss.advantage_estimator=gae"),
        (["loss.tis=none", "loss.tis_cap=3"], "or set loss.tis=truncate or mask"),
        (
            ["model.lora.alpha=8"],
            "since model.lora.rank=0 does not read it; set that or leave it out, or set model.lora.rank above 0",
        ),
        (["training.checkpoints=s3://"], "training.checkpoints='s3://': expected a bucket or a folder after s3://"),
        (["training.stale=mask", "training.max_lag=0"], "training.stale='mask': expected refuse with training.max_lag"),
        (["training.checkpoints=s3:///"], "expected a bucket or a folder after s3://"),
        (["loss=cispo", "loss.tis=truncate"], "set loss.tis=none, or loss.old_logprobs=recompute"),
        (["loss.old_logprobs=sampler"], "loss.tis='mask': expected none with loss.old_logprobs=sampler"),
        (["loss=ppo", "training.zero_variance_groups=drop"], "with equal rewards still have a gradient"),
        (["loss=reinforce_pp", "training.zero_variance_groups=drop"], "with equal rewards still have a gradient"),
        (["model.lora.adapter=somewhere"], "or set model.lora.rank above 0"),
        (["model.lora.adapter=/nowhere/at/all", "model.lora.rank=4"], "expected the directory of an adapter"),
        (
            ["evaluation.only=true", "model.lora.rank=4", "model.lora.merge=true", "model.lora.adapter=/nowhere"],
            "model.lora.merge=True: expected false to evaluate an adapter, which only a trainer merges; remove it",
        ),
        (["rollout.min_samples=9"], "at most rollout.group_size (8)"),
        (["reward.weights=[1]"], "one for each of reward.functions (0)"),
        (["reward.functions=[a:b,c:d]", "reward.weights=[1]"], "one for each of reward.functions (2)"),
        (["reward.functions=[a:b,a:b]"], "expected each function once; a:b is there twice"),
        (["reward.calls=group"], "expected sample, since reward.functions is empty"),
        (["training.micro_batch_tokens=8"], "so that every sample fits"),
        (["resources.device=cuda"], "resources.trainer.gpus=0: expected 1 with resources.device=cuda"),
        (
            ["training.mesh.dp_replicate=2", "resources.trainer.processes=3"],
            "training.mesh.dp_replicate=2: expected a divisor of 3, the trainer's processes",
        ),
        (
            ["training.mesh.ep=3", "training.mesh.dp_replicate=2", "resources.trainer.processes=8"],
            "training.mesh.ep=3: expected a divisor of 4, the processes of a replica of the trainer: 1, 2, 4; change",
        ),
        (
            ["training.mesh.cp=4", "training.mesh.dp_replicate=2", "resources.trainer.processes=4"],
            "training.mesh.cp=4: expected a divisor of 2, the trainer's processes in each replica",
        ),
        (
            ["training.mesh.cp=2", "resources.trainer.processes=2", "training.packing=false"],
            "training.packing=False: expected true with training.mesh.cp",
        ),
        (
            ["training.mesh.cp=2", "resources.trainer.processes=2", "training.micro_batch_tokens=31"],
            "at least model.max_length (64) / training.mesh.cp (2), so that every sample fits; raise it to 32",
        ),
        (
            ["optim.state_dtype=bfloat16", "optim.beta2=0.999"],
            "optim.beta2=0.999: expected at most 0.996 with optim.state_dtype=bfloat16, which would round the decay",
        ),
        (["resources.trainer.gpus=2"], "resources.trainer.gpus=2: expected 0 or 1 for each process of the trainer"),
    ],
)
def test_what_cannot_is_refused_with_its_mend(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(compose_cached(["experiment=demo", *overrides]))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("cp", "heads", "key_heads", "allowed"),
    [
        (3, 16, 8, "1, 2, 4, 8, 16 for 16 query heads and 8 key heads"),
        (4, 12, 3, "1, 3, 6, 12 for 12 query heads and 3 key heads"),
        (32, 16, None, "1, 2, 4, 8, 16 for 16 query heads and 16 key heads"),
    ],
)
def test_the_heads_of_a_model_say_how_many_processes_can_share_a_line(
    cp: int, heads: int, key_heads: int | None, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"training.mesh.cp={cp}: expected one of {allowed}; change it")):
        check_context_heads(cp, heads, key_heads)


@pytest.mark.parametrize(("cp", "heads", "key_heads"), [(1, 7, 3), (8, 16, 2), (2, 16, 8), (5, None, None), (6, 12, 3)])
def test_heads_that_divide_evenly_are_shared(cp: int, heads: int | None, key_heads: int | None) -> None:
    check_context_heads(cp, heads, key_heads)


def test_rows_that_cannot_be_packed_cannot_be_spread() -> None:
    model = ModelConfig(path="mamba")
    check_context_packing(model, 1, packed=False)
    with pytest.raises(ConfigError, match=r"training\.mesh\.cp=2: expected 1 for mamba, whose rows cannot be packed"):
        check_context_packing(model, 2, packed=False)


def test_mini_batches_of_a_run_are_of_one_size() -> None:
    with pytest.raises(
        ConfigError, match=r"divisor of training\.prompts_per_step \(32\), since each takes whole prompts"
    ):
        check_run(compose_cached(["experiment=demo", "training.mini_batches=3"]))


ON_GPUS = ("resources.device=cuda", "resources.trainer.gpus=1", "resources.inference.gpus=2")


@pytest.mark.parametrize(("backend", "rank"), [("auto", 0), ("nccl", 0), ("auto", 8), ("nccl", 8), ("gloo", 8)])
def test_a_run_with_tensor_parallel_servers_passes_however_its_weights_or_adapters_travel(
    backend: str, rank: int
) -> None:
    check_run(compose_cached(["experiment=demo", *ON_GPUS, f"inference.backend={backend}", f"model.lora.rank={rank}"]))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("resources.inference.gpus=0", "resources.inference.gpus=0: expected 1 or more with resources.device=cuda"),
        ("resources.device=cpu", "inference.backend='nccl': expected gloo with resources.device=cpu"),
        ("inference.backend=gloo", "resources.inference.gpus=2: expected 1 for a whole model over gloo"),
    ],
)
def test_servers_on_gpus_that_cannot_be_are_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_run(compose_cached(["experiment=demo", *ON_GPUS, "inference.backend=nccl", override]))
    assert said in str(refused.value)


def test_an_adapter_that_is_there_passes(tmp_path: Path) -> None:
    check_config(compose_cached(["experiment=demo", "model.lora.rank=4", f"model.lora.adapter={tmp_path}"]))


@pytest.mark.parametrize("name", ["gsm8k.v2", "-a", "a b"])
def test_a_set_has_a_name_that_can_be_part_of_a_key(name: str) -> None:
    tree = compose_cached(["experiment=demo"]).model_dump(mode="json")
    tree["evaluation"]["sets"] = {name: {"samples": 1}}
    with pytest.raises(
        ConfigError, match=f"^evaluation.sets.{name}='{name}': expected at most 63 letters, digits, `_`, "
    ):
        load_config(tree)


@pytest.mark.parametrize(
    ("overrides", "shares"),
    [
        ([], True),
        (["training.compile=true"], False),
        (["resources=gpus", "model.dtype=bfloat16"], False),
        (["training.compile=true", "training.share_prefixes=true"], True),
        (["training.share_prefixes=false"], False),
    ],
)
def test_prefixes_are_shared_where_that_was_run_unless_one_says(overrides: list[str], shares: bool) -> None:
    assert compose_cached(["experiment=demo", *overrides]).shares_prefixes is shares


SAMPLING = "serve.sampling=true"
WHOLE = ("serve.whole_servers=1", "serve.whole_models=true")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("serve.whole_servers=1",), r"serve\.whole_servers=1: expected 0 without serve.sampling=true and"),
        (("serve.base_servers=1", SAMPLING), r"serve\.base_servers=1: expected 0 without serve.sampling=true and"),
        ((*WHOLE, SAMPLING), r"resources\.inference\.servers=1: expected more than the 1 servers of serve"),
        (("serve.bases={tiny_qwen3: /models/tiny}",), r"serve\.bases='tiny_qwen3': expected another name"),
    ],
)
def test_servers_for_clients_need_models_and_one_is_left_for_the_base(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_run(compose_cached(["experiment=tinker", *overrides]))


def test_servers_for_clients_may_be_of_whole_models_and_other_bases() -> None:
    bases = ["serve.bases={org/other: /models/other}", "serve.base_servers=1"]
    run = compose_cached(["experiment=tinker", SAMPLING, *WHOLE, *bases, "resources.inference.servers=3"])
    check_run(run)
    assert [pool_of(run.serve, index) for index in range(4)] == [Pool(whole=True), Pool("org/other"), Pool(), Pool()]


def replayed(folder: Path, *overrides: str, **model: object) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "any", "num_hidden_layers": 48} | model))
    (folder / "tokenizer.json").touch()
    replay = ("training.routing_replay=rollout", f"model.path={folder}", "model.init=random")
    check_routing_replay(compose_cached(["experiment=demo", *replay, *overrides]))


MIXTURE = {"num_experts": 128, "num_experts_per_tok": 8}


def test_routing_replay_is_for_mixtures_in_runs_that_sample(tmp_path: Path) -> None:
    replayed(tmp_path, **MIXTURE)
    with pytest.raises(ConfigError, match="whose config has no mixture of experts"):
        replayed(tmp_path)
    with pytest.raises(ConfigError, match="none in a run without rollouts"):
        replayed(tmp_path, *SFT, **MIXTURE)
    with pytest.raises(ConfigError, match=r"streams.budget_bytes=262144: .* tokens with 384 bytes of experts each"):
        replayed(tmp_path, "streams.budget_bytes=262144", **MIXTURE)


def test_what_clients_choose_is_refused_for_clients_models() -> None:
    with pytest.raises(ConfigError, match=r"optim\.router_aux_loss_coef=0\.01: expected 0 with serve\.enabled"):
        check_run(compose_cached(["experiment=tinker", "optim.router_aux_loss_coef=0.01"]))
    with pytest.raises(ConfigError, match=r"optim\.state_dtype='bfloat16': expected float32 with serve\.enabled"):
        check_run(compose_cached(["experiment=tinker", "optim.state_dtype=bfloat16"]))


def test_more_likely_tokens_than_the_vocabulary_has_are_refused() -> None:
    def checked(model: str, top_k: int) -> None:
        check_vocabulary(
            compose_cached(["experiment=demo", f"model={model}", *TAUGHT, "loss.kl=1", f"teacher.top_k={top_k}"])
        )

    checked("tiny_text", 100)
    with pytest.raises(
        ConfigError, match=r"teacher\.top_k=101: expected at most 100, the vocabulary of tiny_text; lower it"
    ):
        checked("tiny_text", 101)
    with pytest.raises(ConfigError, match=r"teacher\.top_k=-1: .*greater than or equal to 0"):
        checked("tiny_text", -1)
