"""Suggestions for unknown keys: the equivalents of other frameworks' keys, and corrections of misspelled ones. Pure.

The tables map names of TRL (with the `TrainingArguments` of transformers) and of verl to keys of this project.
"""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

_CLOSE = 0.6
"""Minimum similarity of a word and its misspelling."""
_MAX_SUGGESTIONS = 4
_SEE_ALSO = "see docs/configuration.md for all of them"

_TRL: Mapping[str, tuple[str, ...]] = {
    "adam_beta1": ("optim.beta1",),
    "adam_beta2": ("optim.beta2",),
    "adam_epsilon": ("optim.eps",),
    "assistant_only_loss": ("data.train_on",),
    "beta": ("loss.kl",),
    "bf16": ("model.dtype",),
    "completion_only_loss": ("data.train_on",),
    "dataset_config": ("data.subset",),
    "dataset_name": ("task.options.path", "data.path"),
    "dataset_test_split": ("task.options.eval_split", "data.eval_split"),
    "dataset_train_split": ("task.options.split", "data.split"),
    "epsilon": ("loss.clip_low", "loss.clip_high"),
    "epsilon_high": ("loss.clip_high",),
    "eval_steps": ("training.eval_every",),
    "fp16": ("model.dtype",),
    "generation_batch_size": ("training.prompts_per_step",),
    "gradient_accumulation_steps": ("training.micro_batch_tokens",),
    "gradient_checkpointing": ("training.activation_checkpointing",),
    "importance_sampling_level": ("loss",),
    "learning_rate": ("optim.lr", "training.sft.lr"),
    "log_completions": ("rollout.sample_store_bytes",),
    "lora_alpha": ("model.lora.alpha",),
    "lora_r": ("model.lora.rank",),
    "lora_target_modules": ("model.lora.targets",),
    "loss_type": ("loss",),
    "lr_scheduler_type": ("optim.schedule",),
    "mask_truncated_completions": ("training.mask_truncated",),
    "max_completion_length": ("rollout.max_tokens",),
    "max_grad_norm": ("optim.clip_norm",),
    "max_prompt_length": ("model.max_length",),
    "max_seq_length": ("model.max_length",),
    "max_steps": ("training.steps", "training.sft.steps"),
    "model_name_or_path": ("model.path",),
    "num_generations": ("rollout.group_size",),
    "num_iterations": ("training.update_epochs",),
    "num_train_epochs": ("training.sft.epochs", "training.steps"),
    "output_dir": ("output",),
    "per_device_eval_batch_size": ("training.micro_batch_tokens",),
    "per_device_train_batch_size": ("training.prompts_per_step", "training.sft.batch"),
    "ref_model_sync_steps": ("loss.reference_every",),
    "report_to": ("tracking.trackers",),
    "reward_funcs": ("reward.functions",),
    "reward_weights": ("reward.weights",),
    "run_name": ("name",),
    "save_steps": ("training.checkpoint_every",),
    "save_total_limit": ("training.keep_checkpoints",),
    "scale_rewards": ("loss.advantage_estimator",),
    "steps_per_generation": ("training.mini_batches",),
    "sync_ref_model": ("loss.reference_every",),
    "torch_compile": ("training.compile",),
    "torch_dtype": ("model.dtype",),
    "use_peft": ("model.lora.rank",),
    "vllm_gpu_memory_utilization": ("inference.gpu_memory",),
    "vllm_importance_sampling_cap": ("loss.tis_cap",),
    "vllm_importance_sampling_correction": ("loss.tis",),
    "vllm_importance_sampling_mode": ("loss.tis",),
    "vllm_max_model_length": ("model.max_length",),
    "vllm_tensor_parallel_size": ("resources.inference.gpus",),
    "warmup_ratio": ("optim.warmup_steps",),
}

_VERL: Mapping[str, tuple[str, ...]] = {
    "adv_estimator": ("loss.advantage_estimator",),
    "betas": ("optim.beta1", "optim.beta2"),
    "clip_grad": ("optim.clip_norm",),
    "clip_ratio": ("loss.clip_low", "loss.clip_high"),
    "clip_ratio_high": ("loss.clip_high",),
    "clip_ratio_low": ("loss.clip_low",),
    "cliprange_value": ("critic.clip",),
    "critic.optim.lr": ("critic.lr",),
    "custom_reward_function": ("reward.functions",),
    "data.train_batch_size": ("training.prompts_per_step",),
    "default_local_dir": ("output",),
    "enable_gradient_checkpointing": ("training.activation_checkpointing",),
    "entropy_coeff": ("loss.entropy",),
    "experiment_name": ("name",),
    "filter_groups": ("training.zero_variance_groups",),
    "gamma": ("loss.gamma",),
    "gpu_memory_utilization": ("inference.gpu_memory",),
    "grad_clip": ("optim.clip_norm",),
    "kl_coef": ("loss.kl",),
    "kl_loss_coef": ("loss.kl",),
    "kl_loss_type": ("loss.kl_estimator",),
    "kl_penalty": ("loss.kl_estimator",),
    "lam": ("loss.gae_lambda",),
    "logger": ("tracking.trackers",),
    "lora_rank": ("model.lora.rank",),
    "loss_agg_mode": ("loss.normalize",),
    "loss_mode": ("loss",),
    "lr_warmup_steps": ("optim.warmup_steps",),
    "lr_warmup_steps_ratio": ("optim.warmup_steps",),
    "max_actor_ckpt_to_keep": ("training.keep_checkpoints",),
    "max_num_seqs": ("inference.max_sequences",),
    "max_response_length": ("rollout.max_tokens",),
    "n": ("rollout.group_size",),
    "n_gpus_per_node": ("resources.gpus_per_node",),
    "nnodes": ("resources.nodes",),
    "norm_adv_by_std_in_grpo": ("loss.advantage_estimator",),
    "optimizer_offload": ("training.offload_idle_models",),
    "param_offload": ("training.offload_idle_models",),
    "ppo_epochs": ("training.update_epochs",),
    "ppo_max_token_len_per_gpu": ("training.micro_batch_tokens",),
    "ppo_micro_batch_size": ("training.micro_batch_rows",),
    "ppo_micro_batch_size_per_gpu": ("training.micro_batch_rows",),
    "ppo_mini_batch_size": ("training.mini_batches",),
    "project_name": ("tracking.project",),
    "prompt_key": ("task.options.columns.prompt", "data.columns.prompt"),
    "reshard_after_forward": ("training.reshard_after_forward",),
    "rollout_is": ("loss.tis",),
    "rollout_is_threshold": ("loss.tis_cap",),
    "router_replay": ("training.routing_replay",),
    "save_freq": ("training.checkpoint_every",),
    "target_modules": ("model.lora.targets",),
    "tensor_model_parallel_size": ("resources.inference.gpus",),
    "test_freq": ("training.eval_every",),
    "total_epochs": ("training.steps", "training.sft.epochs"),
    "total_training_steps": ("training.steps",),
    "train_batch_size": ("training.prompts_per_step", "training.sft.batch"),
    "train_files": ("task.options.path", "data.path"),
    "use_kl_in_reward": ("loss.kl_in",),
    "use_kl_loss": ("loss.kl",),
    "use_remove_padding": ("training.packing",),
    "use_torch_compile": ("training.compile",),
    "val_files": ("task.options.eval_path", "data.eval_path"),
}

ALIASES: Mapping[str, tuple[str, ...]] = {**_TRL, **_VERL}
"""The equivalent keys of this project, by a dotted key of another framework or by the end of one."""


def suggest_key(key: str, known: Sequence[str]) -> str:
    """The hint for an unknown key: the equivalents of another framework's key, or the most similar ones of `known`.

    >>> suggest_key("rollout.num_generations", ["rollout.group_size", "rollout.max_tokens"])
    'here it is rollout.group_size'
    >>> suggest_key("optim.lrr", ["optim.lr", "loss.gae_lambda"])
    'did you mean optim.lr?'
    """
    word = key.rpartition(".")[2]
    if equivalents := _alias(key):
        return f"here it is {_one_of(equivalents)}"
    alike = sorted(
        (name for name in known if name.rpartition(".")[2] == word), key=lambda name: -_similarity(key, name)
    )
    if not alike:  # no key ends with this word: compare the spelling of last words
        close = [name for name in known if _similarity(word, name.rpartition(".")[2]) >= _CLOSE]
        alike = [max(close, key=lambda name: _similarity(key, name))] if close else []
    if not alike:
        return _SEE_ALSO
    return f"did you mean {_one_of(alike[: 1 if '.' in key else _MAX_SUGGESTIONS])}?"


def _alias(key: str) -> tuple[str, ...]:
    """The entry of the key's longest end that has one, in whole words; empty if there is none."""
    words = key.split(".")
    ends = (".".join(words[start:]) for start in range(len(words)))
    return next((ALIASES[end] for end in ends if end in ALIASES), ())


def _one_of(keys: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(keys[:-1]), keys[-1])))


def _similarity(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
