"""Any sequence of operations on a topic gives what a list in memory would, on both backends."""

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.roles.role_context import RoleContext
from pipeline.transport import Depth, connect
from pipeline.transport.record_wire import encode_record
from pipeline.transport.sample_records import Reissue
from tests.support.servers.redis_attempts import an_attempt
from tests.support.servers.redis_binaries import redis_servers

pytestmark = pytest.mark.integration

BUDGET = 1 << 16
_topics = count()

Step = tuple[str, int]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 4)),
        st.tuples(st.just("read"), st.integers(1, 5)),
        st.tuples(st.just("acknowledge"), st.integers(0, 10)),
        st.tuples(st.just("reopen"), st.just(0)),
        st.tuples(st.just("rewrite"), st.just(0)),
    ),
    max_size=25,
)


@pytest.fixture(scope="module", params=[*redis_servers(), "files"])
def context(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleContext]:
    with an_attempt(tmp_path_factory.mktemp("run"), request.param, BUDGET) as context:
        yield context


class Topic:
    """A topic beside its model: `held` are the positions not acknowledged, `seen` how many of them this reader got."""

    def __init__(self, context: RoleContext) -> None:
        self._context, self._name = context, f"topic-{next(_topics)}"
        self._writer, self._other = connect(context), connect(context)
        self._next, self._newest_read = 0, -1
        self._held: list[int] = []
        self._ids: dict[int, str] = {}
        self._seen: list[int] = []
        self.reopen(0)

    def publish(self, number: int) -> None:
        new = [_record(self._next + k) for k in range(number)]
        assert self._writer.publish_many(self._name, new, seconds=5)
        self._held += [record.position for record in new]
        self._next += number

    def read(self, limit: int) -> None:
        entries = self._reader.read(limit, 0)
        unseen = [position for position in self._held if position not in self._seen]
        got = [entry.record.position for entry in entries]
        assert got == unseen[: len(got)]
        assert bool(got) == bool(unseen)
        assert len(got) <= limit
        self._seen += got
        self._newest_read = max(self._newest_read, *got, -1)
        self._ids |= {entry.record.position: entry.id for entry in entries}

    def acknowledge(self, which: int) -> None:
        """Every `which`-th of the entries that some reader got, so that gaps are made; 0: all."""
        known = sorted(self._ids)
        settled = known if which == 0 else known[::which]
        self._reader.acknowledge([self._ids.pop(position) for position in settled])
        self._held = [position for position in self._held if position not in settled]

    def reopen(self, _: int) -> None:
        """The reader's process is replaced."""
        self._other.close()
        self._other = connect(self._context)
        self._reader = self._other.reader(self._name, Reissue, "model")
        self._seen = []

    def rewrite(self, _: int) -> None:
        """The writer's process is replaced."""
        self._writer.close()
        self._writer = connect(self._context)

    def check(self) -> None:
        held = [entry.record.position for entry in self._other.scan(self._name, Reissue)]
        assert held == self._held
        sizes = {position: len(encode_record(_record(position))) for position in held}
        unread = sum(size for position, size in sizes.items() if position > self._newest_read)
        assert self._other.depth(self._name) == Depth(len(held), sum(sizes.values()), unread, 0)

    def close(self) -> None:
        self._writer.close()
        self._other.close()


def _record(position: int) -> Reissue:
    return Reissue(position=position, reason="x" * (position * 37 % 300))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(taken=steps)
def test_any_sequence_of_operations_gives_what_a_list_would(context: RoleContext, taken: list[Step]) -> None:
    topic = Topic(context)
    try:
        for name, argument in taken:
            getattr(topic, name)(argument)
            topic.check()
    finally:
        topic.close()
