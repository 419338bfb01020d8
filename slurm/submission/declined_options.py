"""Options of Hydra and submitit that have another spelling here.

Owns the table of their options and launcher keys with the equivalents of this project. Promises one `ConfigError` that
names the equivalent. `docs/sweeps.md` lists all of them.
"""

from pipeline.errors import ConfigError

OPTIONS = {
    "--info": "--cfg prints the resolved config, --dry-run the plan and the batch file",
    "--config-name": "experiment=<name> chooses conf/experiment/<name>.yaml",
    "-cn": "experiment=<name> chooses conf/experiment/<name>.yaml",
    "--config-path": "put files into conf/, in the folder of their group",
    "-cp": "put files into conf/, in the folder of their group",
    "--config-dir": "put files into conf/, in the folder of their group",
    "-cd": "put files into conf/, in the folder of their group",
    "--resolve": "--cfg resolves the config it prints",
    "--package": "--cfg prints the whole config",
    "-p": "--cfg prints the whole config",
    "--run": "leave it out: without -m one run is submitted",
    "-r": "leave it out: without -m one run is submitted",
    "--hydra-help": "--help; docs/sweeps.md lists the keys of Hydra that are read",
    "--shell-completion": "docs/configuration.md lists every key",
    "-sc": "docs/configuration.md lists every key",
    "--experimental-rerun": "the same command again resumes a run",
}
"""Options of Hydra that are refused, with the hint of the error."""

LAUNCHERS = {"submitit_slurm": "cluster=slurm", "submitit_local": "cluster=local", "basic": "cluster=local"}
"""Hydra's launchers, and the equivalent setting."""

LAUNCHER_KEYS = {
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "constraint": "cluster.constraint",
    "exclude": "cluster.exclude",
    "nodelist": "cluster.nodelist",
    "reservation": "cluster.reservation",
    "timeout_min": "cluster.time",
    "mem_gb": "cluster.memory",
    "cpus_per_task": "cluster.cpus",
    "nodes": "resources.nodes",
    "gpus_per_node": "resources.gpus_per_node",
    "setup": "cluster.setup",
    "srun_args": "cluster.srun_args",
    "signal_delay_s": "cluster.notice_seconds",
    "max_num_timeout": "cluster.max_restarts",
    "array_parallelism": "cluster.max_jobs",
    "additional_parameters": "cluster.sbatch.<option>",
    "mail_user": "cluster.mail_user",
    "mail_type": "cluster.mail_type",
}
"""Keys of hydra-submitit-launcher below `hydra.launcher`, and the equivalent keys of this project."""


def refuse_option(text: str, taken: str) -> None:
    """Raise `ConfigError` for an option that is not in `taken`; for an option of Hydra it names the equivalent."""
    name = text.partition("=")[0]
    raise ConfigError("option", text, taken, OPTIONS.get(name, "everything else is set as key=value"))


def refuse_launcher_key(key: str, value: str) -> None:
    """Raise `ConfigError` for a key or a launcher of Hydra that has another spelling here; else return."""
    if key == "hydra/launcher" and value in LAUNCHERS:
        raise ConfigError(key, value, "the launcher of this project", f"leave it out and set {LAUNCHERS[value]}")
    ours = LAUNCHER_KEYS.get(key.removeprefix("hydra.launcher.")) if key.startswith("hydra.launcher.") else None
    if ours:
        raise ConfigError(key, value, "the key of this project", f"set {ours}")
