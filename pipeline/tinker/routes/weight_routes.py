"""Saving, and taking away what was saved.

Whoever has an address of a download gets the file, until it expires: it is signed by the gateway, and good for an
adapter that was saved for sampling or as external weights."""

import asyncio
import hashlib
import hmac
import tarfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from pipeline.errors import one_line
from pipeline.tinker import tinker_paths
from pipeline.tinker.api_errors import ApiError, NotFoundError
from pipeline.tinker.api_keys import Owner
from pipeline.tinker.entities import SavedWeights
from pipeline.tinker.gateway_settings import Settings
from pipeline.tinker.model_requests import SaveNote, save_body
from pipeline.tinker.routes.body_fields import future, metadata, number, text, time_of, ttl
from pipeline.tinker.routes.client_router import API, Body, Router
from pipeline.tinker.sampler import no_server
from pipeline.tinker.sampling_limits import is_decimal
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_paths import WeightsPath
from pipeline.tinker.tinker_records import Pool, Save
from pipeline.utils.limited_site import is_authenticated

URL_SECONDS = 3600.0
ARCHIVE = "archive.tar"
_BLOCK = 1 << 20


class WeightRoutes:
    """Checkpoints: made, described and downloaded."""

    def __init__(self, settings: Settings, registry: ModelRegistry, secret: str) -> None:
        self._settings, self._registry, self._secret = settings, registry, secret

    def add(self, router: Router) -> None:
        router.post("save_weights", self._save_as("weights"))
        router.post("save_weights_for_sampler", self._save_as("sampler_weights"))
        router.post("save_weights_external", self._save_as("external_weights"))
        router.post("weights_info", self._info)
        one = "training_runs/{model}/checkpoints/{kind}/{name}"
        router.add("GET", one + "/external_weights_urls", self._urls)
        router.add("GET", one + "/archive", self._archive)
        router.add_open("GET", "downloads/{model}/{kind}/{name}/{file}", self._download)

    def _save_as(self, kind: tinker_paths.Kind) -> "_Saving":
        return _Saving(self._settings, self._registry, kind)

    async def _info(self, owner: Owner, body: Body) -> Body:
        checkpoint = self._registry.catalog.checkpoint(owner, text(body, "tinker_path"))
        adapter = checkpoint.adapter
        info = {"base_model": checkpoint.base, "is_lora": adapter.rank > 0, "lora_rank": adapter.rank or None}
        return info | {"train_unembed": False, "train_mlp": adapter.mlp, "train_attn": adapter.attention}

    async def _urls(self, owner: Owner, request: web.Request) -> web.Response:
        checkpoint = self._downloadable(owner, request)
        expires = int(time.time() + URL_SECONDS)
        files = _files(self._settings.weights / checkpoint.folder)
        urls = {file.name: self._url(request, checkpoint, file.name, expires) for file in files}
        return web.json_response({"urls": urls, "expires": time_of(expires)})

    async def _archive(self, owner: Owner, request: web.Request) -> web.Response:
        """Sends the client to one file with all of them, as versions of the SDK before 0.36 expect it."""
        checkpoint, expires = self._downloadable(owner, request), int(time.time() + URL_SECONDS)
        headers = {
            "Location": self._url(request, checkpoint, ARCHIVE, expires),
            "Expires": format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True),
        }
        return web.Response(status=302, headers=headers)

    def _downloadable(self, owner: Owner, request: web.Request) -> SavedWeights:
        checkpoint = self._registry.catalog.named(owner, request.match_info)
        if tinker_paths.stored_path(checkpoint.path).kind == "weights":
            raise ApiError(f"{checkpoint.path} is for training on; save_weights_external makes what can be downloaded")
        return checkpoint

    def _url(self, request: web.Request, checkpoint: SavedWeights, file: str, expires: int) -> str:
        path = tinker_paths.stored_path(checkpoint.path)
        forwarded = request.headers.get("X-Forwarded-Proto", "").lower()
        scheme = forwarded if forwarded in ("http", "https") else request.scheme
        route = f"{API}downloads/{path.model}/{path.checkpoint}/{quote(file)}"
        return f"{scheme}://{request.host}{route}?expires={expires}&sign={self._sign(checkpoint, file, expires)}"

    def _sign(self, checkpoint: SavedWeights, file: str, expires: int) -> str:
        """Of this version of the checkpoint alone: one that replaces it has another folder."""
        text = f"{checkpoint.folder}\n{file}\n{expires}"
        return hmac.digest(self._secret.encode(), text.encode(), hashlib.sha256).hex()

    async def _download(self, request: web.Request) -> web.StreamResponse:
        parts, file = request.match_info, request.match_info["file"]
        path = f"tinker://{parts['model']}/{parts['kind']}/{parts['name']}"
        checkpoint = self._registry.catalog.checkpoints.get(path)
        expires = request.query.get("expires", "")
        if checkpoint is None or not is_decimal(expires) or int(expires) < time.time():
            raise NotFoundError("this address has expired, or what it names was removed; ask for another one")
        signed = self._sign(checkpoint, file, int(expires))
        if not hmac.compare_digest(signed.encode(), request.query.get("sign", "").encode(errors="replace")):
            raise ApiError("this address was not made by this server", 403)
        is_authenticated(request)
        folder = self._settings.weights / checkpoint.folder
        return await _send_tar(request, folder) if file == ARCHIVE else web.FileResponse(folder / file)


class _Saving:
    """The handler of one kind of save."""

    def __init__(self, settings: Settings, registry: ModelRegistry, kind: tinker_paths.Kind) -> None:
        self._settings, self._registry, self._kind = settings, registry, kind

    async def __call__(self, owner: Owner, body: Body) -> Body:
        live = self._registry.model(owner, text(body, "model_id"))
        seq = number(body, "seq_id", least=1)
        if owner.bytes:
            await self._registry.catalog.make_room(owner.name, owner.bytes)
        return future(await self._registry.accept(live, seq, lambda: self._save(owner, body)))

    def _save(self, owner: Owner, body: Body) -> Save:
        model, seq = text(body, "model_id"), number(body, "seq_id")
        live = self._registry.model(owner, model)
        sampler = ""
        if self._kind == "sampler_weights" and body.get("sampling_session_seq_id") is not None:
            sampler = tinker_paths.sampler_id(live.fact.session, number(body, "sampling_session_seq_id"))
            if sampler in self._registry.catalog.samplers or self._registry.is_being_made(sampler):
                raise ApiError(f"the sampling session {sampler} is there already; choose another number")
        whole = not live.fact.adapter.rank
        if self._kind == "sampler_weights" and whole and (live.fact.adapter.base or not self._settings.whole_servers):
            raise ApiError(f"{no_server(Pool(live.fact.adapter.base, whole=True))}; train an adapter (lora_config)")
        if (kind := body.get("kind") or "snapshot") != "snapshot":
            raise ApiError(f"kind={kind!r} is not served; kind='snapshot' is: make a new sampling client of each save")
        if body.get("age_encryption_recipients"):
            raise ApiError("age_encryption_recipients: files are not encrypted here; leave it out")
        name = body.get("path")
        if name is None and not sampler:
            raise ApiError("a save needs a path: a name for the checkpoint")
        path = WeightsPath(
            model, self._kind, tinker_paths.checked_name(name) if name is not None else f"ephemeral-{seq}"
        )
        is_open = any(save.path == str(path) for save in live.open_saves)
        if (is_open or str(path) in self._registry.catalog.checkpoints) and not body.get("overwrite"):
            raise ApiError(f"{path} is there already, or being saved; choose another name, or overwrite=True")
        stored = self._registry.catalog.stored_bytes(owner.name)
        if owner.bytes and stored >= owner.bytes:
            raise ApiError(f"{owner.name} keeps {stored} bytes of checkpoints, its limit is {owner.bytes}; delete some")
        return save_body(path, seq, SaveNote(str(path), ttl(body), metadata(body), sampler))


async def _send_tar(request: web.Request, folder: Path) -> web.StreamResponse:
    """All files of a folder as a tar archive, made while it is sent. They are read in threads: a slow disk holds up
    this client alone."""
    headers = {"Content-Type": "application/x-tar", "Content-Disposition": f'attachment; filename="{ARCHIVE}"'}
    blocks = _tar_blocks(_files(folder))
    answer = web.StreamResponse(headers=headers)
    await answer.prepare(request)
    while block := await asyncio.to_thread(next, blocks, b""):
        await answer.write(block)
    await answer.write_eof()
    return answer


def _files(folder: Path) -> list[Path]:
    """`NotFoundError` for a checkpoint whose folder somebody took away."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise NotFoundError(f"the files of this checkpoint are not there any more: {one_line(error)}") from None


def _tar_blocks(files: Sequence[Path]) -> Iterator[bytes]:
    for file in files:
        entry = tarfile.TarInfo(file.name)
        entry.size, entry.mtime = file.stat().st_size, int(file.stat().st_mtime)
        yield entry.tobuf()
        with file.open("rb") as content:
            while block := content.read(_BLOCK):
                yield block
        yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
