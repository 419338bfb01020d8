"""Names, paths and API keys."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.tinker import api_keys, tinker_paths
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.api_keys import Keys, Owner, digest

MODEL = "0" * 32 + ":train:3"


@pytest.mark.parametrize("kind", tinker_paths.KINDS)
def test_a_path_comes_back_as_it_was_written(kind: tinker_paths.Kind) -> None:
    path = tinker_paths.WeightsPath(MODEL, kind, "step-0001.a")
    assert tinker_paths.parse_path(str(path)) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        f"tinker://{MODEL}/weights",
        f"tinker://{MODEL}/weights/",
        f"tinker://{MODEL}/weights/..",
        f"tinker://{MODEL}/weights/a/b",
        f"tinker://{MODEL}/weights/../../x",
        f"tinker://{MODEL}/other/a",
        "tinker://../weights/a",
        f"/etc/{MODEL}/weights/a",
        f"tinker://{MODEL}/weights/.hidden",
    ],
)
def test_what_is_no_path_of_the_store_is_refused(path: str) -> None:
    with pytest.raises(ApiError, match="expected"):
        tinker_paths.parse_path(path)


@given(st.text(max_size=60))
def test_no_text_names_a_folder_outside_of_the_store(text: str) -> None:
    root = Path("/store")
    for form in (text, f"tinker://{MODEL}/weights/{text}", f"tinker://{text}/weights/a"):
        try:
            folder = tinker_paths.parse_path(form).folder(1)
        except ApiError:
            continue
        assert (root / folder).resolve().is_relative_to(root)
        assert ".." not in Path(folder).parts


def test_a_key_is_known_by_its_hash_alone_and_brings_its_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{digest('tml-a')} ada models=2 bytes=1000  # hers\n{digest('tml-b')} bob\n")
    known = Keys(file)
    known.check()
    assert known.owner("tml-a") == Owner("ada", 2, 1000)
    assert known.owner("tml-b") == Owner("bob")
    for wrong in ("tml-c", "", digest("tml-a")):
        with pytest.raises(ApiError) as refused:
            known.owner(wrong)
        assert refused.value.status == 401


def test_a_file_that_changes_is_read_again_and_one_that_cannot_be_read_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{digest('tml-a')} ada\n")
    known = Keys(file)
    assert known.owner("tml-a").name == "ada"
    file.write_text(f"{digest('tml-longer')} somebody\n")
    with pytest.raises(ApiError, match="no such API key"):
        known.owner("tml-a")
    file.unlink()
    with pytest.raises(ApiError, match="cannot be read") as refused:
        known.owner("tml-longer")
    assert refused.value.status == 408, "of 401 a client gives up"


def test_a_file_that_is_not_utf_8_is_one_line_for_its_owner_and_a_pause_for_clients(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(f"{digest('tml-a')} ada\n# Jürgen\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"line 2.*UTF-8") as wrong:
        Keys(file).check()
    assert "\n" not in str(wrong.value)
    with pytest.raises(ApiError, match="cannot be read") as refused:
        Keys(file).owner("tml-a")
    assert refused.value.status == 408


@pytest.mark.parametrize(
    "line",
    [
        "abc ada",
        f"{digest('k')}",
        *(f"{digest('k')} ada {limit}" for limit in ("models=many", "b=1", f"bytes={'9' * 5000}")),
    ],
)
def test_a_line_that_is_no_key_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        api_keys.parse_keys(line, "keys")


def test_a_run_makes_one_key_of_its_own_that_nobody_else_can_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    made = api_keys.own_key(path)
    assert made.startswith("tml-")
    assert api_keys.own_key(path) == made
    assert path.stat().st_mode & 0o077 == 0
