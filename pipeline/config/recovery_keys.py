"""The keys of restarts in place, `recovery.*`."""

from pydantic import Field

from pipeline.config.value_types import NotNegative, Section


class RecoveryConfig(Section):
    """Restarts in place: how often an attempt replaces the process of a role before that role's failure ends it; 0:
    never. See [operations](operations.md#restarts-in-place)."""

    inference: NotNegative = Field(3, description="Restarts of each server.")
    actor: NotNegative = Field(3, description="Restarts of the actor. Samples in flight continue (docs/rollouts.md).")
    preprocessor: NotNegative = Field(3, description="Restarts of the preprocessor.")
    trainer: NotNegative = Field(
        3,
        description="Restarts of the trainer from the newest checkpoint, of runs with one trainer node. Job files and "
        "the Tinker API restart theirs with the attempt.",
    )
    nodes: NotNegative = Field(
        3,
        description="Lost nodes whose roles a spare node (`resources.spare_nodes`) takes over, before the loss of a "
        "node ends the attempt.",
    )
    redis: NotNegative = Field(3, description="Restarts of Redis with its data.")
