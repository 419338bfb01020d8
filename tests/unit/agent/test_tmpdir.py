"""The folder for what libraries leave behind: it goes with the attempt, and what is worth keeping lies outside."""

import os
import tempfile
from pathlib import Path

import pytest

from pipeline.utils.private_files import is_private
from slurm.agent.tmpdir import COMPILED, FOLDER, HOME_CACHES, MAX_PATH, remove_scratch, scratch_folder
from tests.support.strangers import as_stranger, needs_another_user, shared_directory


def test_the_folder_is_gone_afterwards_with_all_that_is_in_it() -> None:
    with scratch_folder("demo-0", {}) as variables:
        folder = Path(variables[FOLDER])
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
        assert folder not in Path(variables[COMPILED]).parents, "the next attempt finds it"
    assert not folder.exists()


def test_what_a_killed_agent_left_of_an_attempt_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder(f"{tmp_path}-0", {}) as killed, scratch_folder(f"{tmp_path}-1", {}) as other:
        (Path(killed[FOLDER]) / "file").touch()
        remove_scratch(f"{tmp_path}-0")  # no other test has this attempt
        assert not Path(killed[FOLDER]).exists()
        assert Path(other[FOLDER]).exists()


def test_nodes_share_all_caches_in_the_directory_of_the_site(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        scratch_folder("demo-0", {}, str(tmp_path / "site")) as first,
        scratch_folder("demo-0", {}, str(tmp_path / "site")) as second,
    ):
        names = (COMPILED, *HOME_CACHES, "VLLM_CACHE_ROOT")
        assert {name: first[name] for name in names} == {name: second[name] for name in names}
        assert {Path(first[name]).parent for name in names} == {tmp_path / "site" / f"rollcall-cache-{os.getuid()}"}
    (tmp_path / "file").touch()
    with scratch_folder("demo-0", {}, str(tmp_path / "file")) as variables:
        assert Path(variables[COMPILED]).parent.parent != tmp_path / "file"
    assert "cluster.compile_cache is not used" in capsys.readouterr().out


def test_what_a_user_chose_stays() -> None:
    with scratch_folder("demo-0", {COMPILED: "/fast", HOME_CACHES[0]: "/faster"}) as variables:
        assert not {COMPILED, HOME_CACHES[0]} & set(variables)


def test_sockets_are_where_their_names_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * MAX_PATH)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with scratch_folder("demo-0", {}) as variables:
        assert variables["VLLM_RPC_BASE_PATH"] == str(deep), "where vLLM has them by itself"


TAKE = """
import os, sys
place, owner = sys.argv[1:]
for name in ("torchinductor_root", "torchinductor_" + owner, "rollcall-cache-" + owner):
    os.mkdir(f"{place}/{name}")
    os.chmod(f"{place}/{name}", 0o777)
"""


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that other users can write to."""
    home = tmp_path / "open"
    home.mkdir()
    home.chmod(0o1777)
    monkeypatch.setenv("HOME", str(home))


@needs_another_user
def test_a_cache_that_a_stranger_made_first_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_home: None
) -> None:
    with shared_directory() as shared:
        taken = as_stranger(TAKE, shared, os.getuid())
        assert not taken.returncode, taken.stderr
        monkeypatch.setattr(tempfile, "tempdir", str(shared))
        with scratch_folder("demo-0", {}) as variables:
            assert is_private(Path(variables[COMPILED]).parent)
        assert "compiled code is not kept for the next attempt" in capsys.readouterr().out


def test_compiled_code_of_every_job_is_in_the_home_directory_that_nodes_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for number in range(2):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / f"node-{number}"))
        (tmp_path / f"node-{number}").mkdir()
        with scratch_folder("demo-0", {}) as variables:
            compiled = Path(variables[COMPILED])
            assert home / ".cache" in compiled.parents
            assert is_private(compiled.parent)
    (compiled.parent).chmod(0o755)
    with scratch_folder("demo-0", {}) as variables:
        assert home not in Path(variables[COMPILED]).parents, "others could have written into the folder"


def test_a_home_that_does_not_exist_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("demo-0", {}) as variables:
        assert {COMPILED, "VLLM_CACHE_ROOT"} <= variables.keys()
        assert is_private(Path(variables[COMPILED]).parent)
    assert not (tmp_path / "none").exists()


def test_a_cache_is_kept_where_only_its_owner_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_home: None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places = set()
    for _ in range(2):
        with scratch_folder("demo-0", {}) as variables:
            places.add(Path(variables[COMPILED]).parent)
    (place,) = places
    assert is_private(place)


@pytest.mark.parametrize(("mode", "safe"), [(0o700, True), (0o755, True), (0o1777, False)])
def test_the_caches_of_a_home_that_everybody_can_write_to_are_elsewhere(
    mode: int, safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(mode)
    monkeypatch.setenv("HOME", str(home))
    with scratch_folder("demo-0", {}) as variables:
        assert (not {*HOME_CACHES, "VLLM_CACHE_ROOT"} & set(variables)) == safe
