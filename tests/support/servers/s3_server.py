"""A real S3-compatible server (moto) on 127.0.0.8, and the environment in which s3fs finds it."""

from collections.abc import Iterator
from contextlib import contextmanager

import boto3
from moto.server import ThreadedMotoServer

ADDRESS = "127.0.0.8"
BUCKET = "bucket"


@contextmanager
def an_s3_server() -> Iterator[dict[str, str]]:
    """With an empty bucket; the value is the environment for whoever uses it."""
    server = ThreadedMotoServer(ADDRESS, 0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        credentials = {"aws_access_key_id": "tests", "aws_secret_access_key": "tests"}
        url = f"http://{ADDRESS}:{port}"
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **credentials)
        client.create_bucket(Bucket=BUCKET)
        yield {name.upper(): value for name, value in credentials.items()} | {"FSSPEC_S3_ENDPOINT_URL": url}
    finally:
        server.stop()
