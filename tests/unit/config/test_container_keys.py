"""The keys of containers: what is refused before anything starts, and with which words."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.container_keys import Mount, parse_mount
from pipeline.config.cross_checks import check_queue_keys
from pipeline.errors import ConfigError
from tests.fakes.configs import make_config


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/data", Mount("/data", "/data")),
        ("/data:/mnt/data", Mount("/data", "/mnt/data")),
        ("/data:/mnt/data:ro", Mount("/data", "/mnt/data", read_only=True)),
        ("/data::ro", Mount("/data", "/data", read_only=True)),
        ("/data:/mnt/data:rw", Mount("/data", "/mnt/data")),
    ],
)
def test_a_mount_has_a_source_a_target_and_an_access(text: str, mount: Mount) -> None:
    assert parse_mount(text) == mount


def test_a_source_is_relative_to_the_launcher_or_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "link").symlink_to("/data")
    assert parse_mount("link") == Mount("/data", str(tmp_path / "link"))
    assert parse_mount("~/data:/data") == Mount("/home/me/data", "/data")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a mount with a source, SOURCE[:TARGET[:ro]]; such as /data or /data:/mnt/data:ro"),
        (":/data", "expected a mount with a source"),
        ("/data:/mnt:readonly", "expected ro, rw or nothing after the second colon"),
        ("/data:mnt", "expected an absolute path in the container; such as /data:/data"),
        ("/my data:/mnt", "expected a path without ' ', which separates mounts of a container; rename it"),
        ("/data:/mnt,x", "expected a path without ','"),
    ],
)
def test_a_wrong_mount_is_one_line_that_says_how_to_write_it(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_mount(text)
    assert words in str(refused.value)
    assert str(refused.value).startswith("cluster.container.mounts=")


def refusal(scheduler: str = "slurm", **container: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        check_queue_keys(make_config(cluster={"scheduler": scheduler, "container": container}))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_keys_that_contradict_each_other_are_refused() -> None:
    image = "cluster.container.image='': expected an image for cluster.container.kind=enroot; set cluster.container"
    assert refusal(kind="enroot").startswith(image)
    lost = "cluster.container.image='a.sif': expected nothing with cluster.container.kind=none"
    assert refusal(image="a.sif").startswith(lost)
    assert "the Python of the image" in refusal(kind="enroot", image="a", python="")
    twice = refusal(kind="enroot", image="a", mounts=["/data:/x", "/other:/x"])
    assert "cluster.container.mounts='/other:/x': expected one source for each target; /data has" in twice
    check_queue_keys(make_config(cluster={"scheduler": "slurm", "container": {"kind": "pyxis", "image": "a"}}))


def test_a_misspelled_runtime_is_an_error_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"cluster.container.kind='apptainr'.*did you mean apptainer\?"):
        make_config(cluster={"scheduler": "slurm", "container": {"kind": "apptainr"}})


def test_one_machine_starts_no_container() -> None:
    words = refusal("local", kind="apptainer", image="a.sif")
    assert words.startswith("cluster.container.kind='apptainer': expected none on one machine")
    assert words.endswith("set cluster=slurm, or start the launcher itself in the container")
