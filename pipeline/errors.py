"""The exception tree of Rollcall.

Owns every error that crosses a module or a process boundary. Promises that each one pickles (errors travel from roles
to agents to the launcher), that its text is one line a person can act on, and that third-party errors are translated
into one of these at the boundary where they appear. Must not import anything of the project.

    RollcallError
    ├── ConfigError          the user's input is wrong; nothing was started          exit code 2
    │   ├── PlanError        the plan does not fit the resources
    │   └── RunStateError    the run directory is finished, live, or of another config
    ├── DeadlineError        a wait ran out; names what was awaited and who is missing
    ├── RendezvousError      node records, claim or world are unusable for this attempt
    ├── RecordError          a wire record of an unknown kind or version, or torn
    ├── StreamError          the streams' backend failed or refused
    ├── CheckpointError      a checkpoint is missing, torn, or of another shape
    │   ├── DamagedCheckpointError     what lies there is not what was committed; an older commit may do
    │   └── SupersededError   another attempt has the right to write by now
    ├── WeightSyncError      an update of the servers' weights failed
    ├── RolloutError         one sample could not be produced; carries the reason
    │   └── EpisodeError     reported by the program that ran the episode
    ├── TaskError            a task cannot produce anything usable
    ├── SweepError           a point of a sweep has no result, with the reason
    ├── SchedulerError       a command of the scheduler failed, or gave no answer in time
    ├── SignatureError          a message that nobody of this world wrote
    ├── ImpostorError        a program that does not know the attempt's secret listens in a server's place
    ├── TrainingError        a batch cannot be trained, or an operation failed on a rank of the trainer
    └── InvalidTransitionError      a state machine got an event that its state does not allow
"""

from typing import Any

MAX_LINE = 1000


def one_line(error: BaseException) -> str:
    """`ErrorName: what it says`, in one line; cut where the error of a library carries pages."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} …"


def reason_of(error: BaseException) -> str:
    """The text of a `RollcallError`, which is complete; `one_line` of any other error."""
    return str(error) if isinstance(error, RollcallError) else one_line(error)


def first_line(error: BaseException) -> str:
    """`ErrorName: what it says first`, of an error that may carry the traceback of another rank."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


_OF_CODE_OR_INPUT = (
    *(AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError, SyntaxError),
    *(TypeError, ValueError),
)
"""Errors that the same code meets again with the same input, unlike those of files, networks and memory."""


def would_recur(error: BaseException, *, starting: bool) -> bool:
    """Whether a restarted process would meet the error again: its class reports so, or it is an error of code or input
    while the process was `starting`, before samples or batches could be its cause."""
    if isinstance(error, RollcallError):
        return error.is_final
    return starting and isinstance(error, _OF_CODE_OR_INPUT)


class RollcallError(Exception):
    """Base of all errors of Rollcall. `exit_code` is what a command ends with when it reaches the top.

    `is_final`: whether a restarted process would meet the same error, so that its role is not restarted.
    """

    exit_code = 1
    is_final = False


class ConfigError(RollcallError):
    """A config key is unknown or its value is wrong.

    Attributes name the `key`, the `value` found, what was `expected`, and how to `hint` it; the message is all four
    on one line.
    """

    exit_code = 2
    is_final = True

    def __init__(self, key: str, value: Any, expected: str, hint: str = "") -> None:
        self.key, self.value, self.expected, self.hint = key, value, expected, hint
        text = f"{key}={value!r}: expected {expected}"
        super().__init__(f"{text}; {hint}" if hint else text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key, self.value, self.expected, self.hint)


class PlanError(ConfigError):
    """The plan asks for more than the resources hold; `hint` names the number to change."""


class RunStateError(ConfigError):
    """The run directory cannot take this submission: finished, live elsewhere, or made by another config."""


class DeadlineError(RollcallError):
    """A wait ran out. Names what was awaited, for how long (seconds), and what was still missing."""

    is_final = True

    def __init__(self, awaited: str, seconds: float, missing: str = "") -> None:
        self.awaited, self.seconds, self.missing = awaited, seconds, missing
        text = f"waited {seconds:.1f} s for {awaited}"
        super().__init__(f"{text}; missing: {missing}" if missing else text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.awaited, self.seconds, self.missing)


class TakeoverError(RollcallError):
    """No spare node can take over the roles of a lost node, so the attempt ends."""


class RendezvousError(RollcallError):
    """The ranks cannot form a world: duplicate ranks, too few node records, or an assignment that does not fit."""


class RecordError(RollcallError):
    """Bytes that are no record of this version: unknown kind, other version, torn, or inconsistent lengths."""


class StreamError(RollcallError):
    """A stream's backend failed, or refused an operation (for instance an entry above the byte budget)."""


class CheckpointError(RollcallError):
    """A checkpoint is missing, torn, or does not match the model."""

    is_final = True


class DamagedCheckpointError(CheckpointError):
    """What lies there is not what was committed, and will not be: an older commit may do."""


class SupersededError(CheckpointError):
    """Another attempt has taken over: this one writes nothing more, and what it ran into is nobody's failure."""


class WeightSyncError(RollcallError):
    """A weight update failed or missed its deadline; names the server and the version."""


class RolloutError(RollcallError):
    """One sample could not be produced. The message is the reason that is counted and shown."""


class EpisodeError(RolloutError):
    """An episode came to nothing, by the word of what ran it. The message is the sample's reason as it is."""


class TaskError(RollcallError):
    """The task produces nothing usable; the message names what failed and how often."""

    is_final = True


class TrainingError(RollcallError):
    """A batch cannot be trained, or a training operation failed; names the row, or the rank with its traceback."""


class SignatureError(RollcallError):
    """A message between processes of a run was not signed with its world's secret; nothing in it was used."""


class ImpostorError(RollcallError):
    """A program that does not know this attempt's secret listens where one of its servers should. It was sent nothing
    secret; the message names who holds the port, as far as this machine knows."""


class SweepError(RollcallError):
    """A point of a sweep has no result, or its sweeper failed; names the point and the reason."""


class SchedulerError(RollcallError):
    """A command of the scheduler failed or gave no answer in time; names the command and what it said."""


class InvalidTransitionError(RollcallError):
    """A state machine received an event its state does not allow."""

    def __init__(self, machine: str, state: str, event: str) -> None:
        self.machine, self.state, self.event = machine, state, event
        super().__init__(f"{machine}: event {event!r} is not allowed in state {state!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.machine, self.state, self.event)
