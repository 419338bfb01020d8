"""What is in memory beside the store."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.tinker.byte_lru import ByteLru


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 12), st.booleans()), max_size=30))
def test_it_holds_the_newest_that_fit_and_never_more(acts: list[tuple[str, int, bool]]) -> None:
    recent, order = ByteLru(10), dict[str, bytes]()
    for name, size, put in acts:
        order.pop(name, None)
        if put:
            recent.put(name, bytes(size))
            order[name] = bytes(size)
            while sum(map(len, order.values())) > 10:
                del order[next(iter(order))]
        else:
            recent.drop(name)
        assert {each: recent.get(each) for each in "abcd"} == {each: order.get(each) for each in "abcd"}
