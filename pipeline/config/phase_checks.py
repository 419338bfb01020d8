"""Rules about the phases of a run (SFT, preference training, RL, jobs, serving, evaluation) and their data."""

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.utils.user_commands import user_command


def a_phase_is_configured(config: RunConfig) -> None:
    training = config.training
    if config.has_preference:
        _preferences_train_alone(config)
        return
    if config.replay and (not config.has_rl or training.jobs or config.evaluation.only):
        raise ConfigError("replay", config.replay, "nothing in a run without RL steps", "set training.steps")
    if config.serve.enabled and (training.jobs or config.has_sft):
        key, value = ("training.jobs", training.jobs) if training.jobs else ("training.sft", "set")
        raise ConfigError(key, value, "nothing with serve.enabled: clients choose the training", "leave it out")
    if training.jobs:
        sft = training.sft
        for key, steps in {"steps": training.steps, "sft.steps": sft.steps, "sft.epochs": sft.epochs}.items():
            if steps:
                expected = "0 with training.jobs: each job file sets its steps"
                raise ConfigError(f"training.{key}", steps, expected, "set it to 0, or leave training.jobs out")
    elif config.evaluation.only:
        if config.has_rl or config.has_sft or config.serve.enabled:
            raise ConfigError(
                "evaluation.only", True, "a run that does nothing else", f"use {user_command('evaluate')}"
            )
    elif not config.has_rl and not config.has_sft and not config.serve.enabled:
        hint = "set it, or training.sft.steps for SFT alone, or preference.epochs"
        raise ConfigError("training.steps", 0, "1 or more if training.sft.steps is 0 too", hint)


def _preferences_train_alone(config: RunConfig) -> None:
    """A run of preference training has pairs, one length, and no other phase."""
    preference, sft = config.preference, config.training.sft
    for key, value in {
        "training.steps": config.training.steps,
        "training.sft.steps": sft.steps,
        "training.sft.epochs": sft.epochs,
        "training.jobs": config.training.jobs,
        "replay": config.replay,
        "serve.enabled": config.serve.enabled,
        "evaluation.only": config.evaluation.only,
    }.items():
        if value:
            expected = f"{type(value)()!r} with preference training, which is a run by itself"
            raise ConfigError(key, value, expected, "use two runs: set model.path to the model/ of the first one")
    if preference.steps and preference.epochs:
        raise ConfigError("preference.epochs", preference.epochs, f"0 with {preference.steps} steps", "set one of them")
    if not config.data.path:
        hint = "set it to a file with the columns prompt, chosen and rejected (docs/preferences.md)"
        raise ConfigError("data.path", "", "a dataset of preference pairs", hint)
    if config.data.train_on != "all":
        expected = "all: each completion of a pair is trained whole"
        raise ConfigError("data.train_on", config.data.train_on, expected, "leave it out")
    if preference.formula.is_labeled and preference.batch < 2:
        expected = "2 or more with preference.loss=kto, whose KL needs completions of other prompts"
        raise ConfigError("preference.batch", preference.batch, expected, "raise it; the usual size is 32")
    if preference.formula.is_reward_model and config.model.lora.rank:
        expected = f"0 with preference.loss={preference.loss}: a reward model is trained whole"
        raise ConfigError("model.lora.rank", config.model.lora.rank, expected, "leave it out")


def epochs_are_of_data(config: RunConfig) -> None:
    start = config.training.sft
    if start.epochs and start.steps:
        raise ConfigError("training.sft.epochs", start.epochs, f"0 with {start.steps} steps", "set one of them")
    if start.epochs and not config.data.path:
        expected = f"a dataset, whose rows the epochs count ({start.epochs:g} training.sft.epochs)"
        raise ConfigError("data.path", "", expected, "set it, or training.sft.steps in place of epochs")


def data_is_trained(config: RunConfig) -> None:
    data = config.data
    if data.path and not (config.has_sft or config.has_preference):
        hint = "set training.sft.epochs or preference.epochs, or for RL task.options.path"
        raise ConfigError("data.path", data.path, "nothing without SFT or preference training", hint)
    for key in ("eval_path", "eval_split", "eval_rows"):
        if getattr(data, key) and not data.path:
            raise ConfigError(f"data.{key}", getattr(data, key), "nothing without data.path", "set that too")


def auxiliary_losses_are_the_trainers(config: RunConfig) -> None:
    if config.serve.enabled and config.optim.router_aux_loss_coef:
        expected = "0 with serve.enabled: the losses of clients' models are their clients'"
        raise ConfigError("optim.router_aux_loss_coef", config.optim.router_aux_loss_coef, expected, "remove it")
