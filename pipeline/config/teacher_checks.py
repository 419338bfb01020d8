"""Rules between the keys of a teacher and those of the loss.

The vocabulary of the model is in its directory, so `check_vocabulary` is called where directories are read.
"""

from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.model_directory import vocabulary_size
from pipeline.errors import ConfigError


def teacher_is_used(config: RunConfig) -> None:
    teacher, loss = config.teacher, config.loss
    if not teacher.url:
        if teacher.model:
            raise ConfigError("teacher.model", teacher.model, "nothing without teacher.url", "set that too")
        return
    if not teacher.model:
        raise ConfigError("teacher.model", "", "the model's name at teacher.url", "set it")
    if teacher.key_file and not Path(teacher.key_file).is_file():
        raise ConfigError("teacher.key_file", teacher.key_file, "a file with the key", "there is none; fix the path")
    if not config.has_rollouts:
        raise ConfigError("teacher.url", teacher.url, "nothing in a run that samples nothing to train", "leave it out")
    if not loss.kl:
        raise ConfigError("loss.kl", 0.0, "above 0 with teacher.url: the weight of its divergence", "set loss.kl=1")
    if loss.reference_every:
        expected = "0 with teacher.url, which is the reference"
        raise ConfigError("loss.reference_every", loss.reference_every, expected, "leave it out")
    if config.rollout.temperature != 1:
        expected = "1 with teacher.url, which scores at temperature 1 only"
        raise ConfigError("rollout.temperature", config.rollout.temperature, expected, "leave it out")
    if config.training.zero_variance_groups == "drop":
        expected = "keep with teacher.url: samples with equal rewards still have a gradient"
        raise ConfigError("training.zero_variance_groups", "drop", expected, "leave it out")


def top_tokens_are_in_the_loss(config: RunConfig) -> None:
    """The KL over the teacher's likeliest tokens is the same whichever token was sampled. As a reward it would have no
    gradient: the policy gradient of a constant has mean zero."""
    top_k = config.teacher.top_k
    if top_k and not config.teacher.url:
        raise ConfigError("teacher.top_k", top_k, "0 without teacher.url", "set that too")
    if top_k and config.loss.kl_in == "reward":
        expected = "loss with teacher.top_k, whose KL does not depend on the sampled token"
        raise ConfigError("loss.kl_in", "reward", expected, "set loss.kl_in=loss, or teacher.top_k=0")


def check_vocabulary(config: RunConfig) -> None:
    """Raise `ConfigError` for more likely tokens than the model's vocabulary has."""
    vocabulary, top_k = vocabulary_size(config.model), config.teacher.top_k
    if vocabulary is not None and top_k > vocabulary:
        expected = f"at most {vocabulary}, the vocabulary of {config.model.path}"
        raise ConfigError("teacher.top_k", top_k, expected, "lower it")
