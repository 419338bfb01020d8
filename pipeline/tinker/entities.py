"""The facts that the store keeps: sessions, models, samplers, checkpoints.

Owns their forms. Pure.
"""

import msgspec

from pipeline.tinker.tinker_records import Adapter, Pool

BASE = "base"
"""The name that servers have for the model that they were started with."""


class Session(msgspec.Struct, frozen=True):
    """A client's session; `ended` is why the session takes no more requests, `ended_at` since when. A session has
    `lapsed` if its client did not end it, but sent no heartbeat: waiting requests are not done."""

    id: str
    owner: str
    created: float
    ended: str = ""
    ended_at: float = 0.0
    metadata: dict[str, str] | None = None
    lapsed: bool = False


class Model(msgspec.Struct, frozen=True):
    """A model of a session; `base` is the name that clients have for the model that it adapts."""

    id: str
    session: str
    owner: str
    base: str
    adapter: Adapter
    created: float
    gone: bool = False
    unloading: bool = False
    """Its client is done with it."""
    metadata: dict[str, str] | None = None


class SavedWeights(msgspec.Struct, frozen=True):
    """Saved weights; `folder` is below the store's folder of weights. Times in seconds since the epoch."""

    path: str
    owner: str
    base: str
    adapter: Adapter
    folder: str
    size: int
    created: float
    expires: float | None = None
    metadata: dict[str, str] | None = None
    ephemeral: bool = False
    """Made for one sampling client, without a name from the client: older ones give way to newer ones."""

    @property
    def sampled(self) -> "SampledWeights":
        """What samples of it are drawn from."""
        return SampledWeights(self.folder, not self.adapter.rank, self.adapter.base)


class SampledWeights(msgspec.Struct, frozen=True):
    """What a sample is drawn from: the adapter in a folder below the store's weights, or, if `whole`, all weights of a
    model; without a folder the base. `base` is as in `Adapter`."""

    folder: str = ""
    whole: bool = False
    base: str = ""

    @property
    def pool(self) -> Pool:
        """The servers that have or can load them."""
        return Pool(self.base, self.whole)

    @property
    def name(self) -> str:
        """What servers call it; one that has a whole model calls it by the base's name."""
        return BASE if self.whole or not self.folder else self.folder.replace("/", "--")


class SamplingSession(msgspec.Struct, frozen=True):
    """What a sampling client samples from: a checkpoint's path, or the base."""

    id: str
    owner: str
    base: str
    path: str = ""
