"""Which routes there are, and what can be taken away by them."""

import io
import shutil
import tarfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pipeline.tinker.routes import weight_routes
from pipeline.tinker.tinker_records import Acknowledged, SaveResult, WorkResult
from tests.unit.tinker.gateway_case import ADA, BOB, Client, with_gateway


def test_the_page_lists_the_routes_that_there_are(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tinker.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith(("| `POST", "| `GET", "| `PUT", "| `DEL"))]
    told = {row[1].strip(" `") for row in rows if not row[3].strip().startswith("not served")}

    async def play(client: Client) -> None:
        assert client.http.app is not None
        resources = [(route.method, route.resource) for route in client.http.app.router.routes()]
        there = {f"{method} {resource.canonical}" for method, resource in resources if resource is not None}
        served = {each.replace("/api/v1/", "", 1) for each in there if " /api/v1/" in each or " /v1/" in each}
        assert {each for each in served if not each.startswith(("HEAD", "*"))} == told
        async with client.http.post("/api/v1/copy_weights", json={}, headers=ADA) as answer:
            assert answer.status == 404
            assert "POST copy_weights is not served here" in (await answer.json())["detail"]

    with_gateway(tmp_path, play)


def test_an_address_of_a_download_is_good_for_its_file_alone_and_until_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: set[int] = set()
    blocks = weight_routes._tar_blocks

    def watched(files: Sequence[Path]) -> Iterator[bytes]:
        for block in blocks(files):
            readers.add(threading.get_ident())
            yield block

    monkeypatch.setattr(weight_routes, "_tar_blocks", watched)

    async def play(client: Client) -> None:
        model = (await client.model(await client.session()))[1]["model_id"]
        await client.attach("one")
        await client.turn("one", WorkResult(f"{model}:0", Acknowledged()))
        for seq in (1, 2):
            save = {"model_id": model, "seq_id": seq, "path": "mine", "overwrite": True}
            await client.post("save_weights_external", save)
            await client.turn("one")
            await client.turn("one", WorkResult(f"{model}:{seq}", SaveResult(10)))
            (saved,) = client.registry.catalog.checkpoints.values()
            (tmp_path / "weights" / saved.folder).mkdir(parents=True)
            (tmp_path / "weights" / saved.folder / "adapter_config.json").write_text(f"save {seq}")
            (tmp_path / "weights" / saved.folder / "other").write_text("other")
            asked = f"/api/v1/training_runs/{model}/checkpoints/external_weights/mine/external_weights_urls"
            async with client.http.get(asked, headers=ADA) as answer:
                urls = (await answer.json())["urls"]
            assert sorted(urls) == ["adapter_config.json", "other"]
            path = urls["adapter_config.json"].partition("/api")
            good = "/api" + path[2]
            if seq == 1:
                older = good
            async with client.http.get(good) as answer:
                assert (answer.status, await answer.text()) == (200, f"save {seq}")
        long = good.replace("?expires=", f"?expires={'9' * 5000}")
        for wrong in (
            long,
            older,
            good.replace("adapter_config.json", "other"),
            good[:-1] + "x",
            good.replace("=1", "=2"),
        ):
            async with client.http.get(wrong) as answer:
                assert answer.status in (403, 404), wrong
        async with client.http.get(f"/api/v1/checkpoints?limit={'9' * 5000}", headers=ADA) as answer:
            assert (answer.status, "limit=" in await answer.text()) == (400, True)
        archive = f"/api/v1/training_runs/{model}/checkpoints/external_weights/mine/archive"
        async with client.http.get(archive, headers=ADA, allow_redirects=False) as answer:
            assert answer.status == 302
            place = "/api" + answer.headers["Location"].partition("/api")[2]
        async with client.http.get(place) as answer:
            with tarfile.open(fileobj=io.BytesIO(await answer.read())) as tar:
                assert {each.name: each.size for each in tar.getmembers()} == {"adapter_config.json": 6, "other": 5}
        assert readers, "an archive is read"
        assert threading.get_ident() not in readers, "by no thread that others wait for"
        async with client.http.get(archive, headers=BOB, allow_redirects=False) as answer:
            assert answer.status == 404
        shutil.rmtree(tmp_path / "weights")
        for gone in (archive, asked):
            async with client.http.get(gone, headers=ADA) as answer:
                assert answer.status == 404
                assert "not there any more" in (await answer.json())["detail"]

    with_gateway(tmp_path, play)
