"""`compose_config` for tests that compose many configs: Hydra composes each choice of groups once in a process."""

from slurm.submission.compose_config import ConfigComposer

compose_cached = ConfigComposer().compose
