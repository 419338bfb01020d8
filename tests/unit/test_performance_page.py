"""The page of performance says what the raw results say."""

from docs import performance


def test_the_tables_of_the_page_are_those_of_the_raw_results() -> None:
    assert performance.main(["--check"]) == 0, "stale: python -m docs.performance writes it"
