"""An S3 server on 127.0.0.1 with one bucket, used directly or through a proxy that fails as planned."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

import boto3
import pytest

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

Address = tuple[str, int]


@contextmanager
def serving() -> Iterator[Address]:
    """Serve an empty bucket, named bucket, with the user's credentials in the environment."""
    from moto.moto_server import werkzeug_app as moto  # imports for seconds, in each process that collects tests
    from werkzeug.serving import make_server

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        application = moto.DomainDispatcherApplication(moto.create_backend_app)
        # Bound here, not in the thread as moto's own does: there an error would leave this waiting for ever.
        server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=moto.MotoRequestHandler)
        address = "127.0.0.1", server.port
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        reset = urllib.request.Request("http://{}:{}/moto-api/reset".format(*address), method="POST")
        urllib.request.urlopen(reset).close()  # all servers of a process share one state
        with closing(boto3.client("s3", endpoint_url="http://{}:{}".format(*address))) as client:
            client.create_bucket(Bucket="bucket")
        try:
            yield address
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def put(address: Address, objects: Mapping[str, bytes]) -> None:
    """Put objects into the bucket."""
    with closing(boto3.client("s3", endpoint_url="http://{}:{}".format(*address))) as client:
        for key, data in objects.items():
            client.put_object(Bucket="bucket", Key=key, Body=data)


def get(address: Address, prefix: str) -> dict[str, bytes]:
    """Return the objects of the bucket whose keys begin so."""
    with closing(boto3.client("s3", endpoint_url="http://{}:{}".format(*address))) as client:
        listed = client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
        return {one["Key"]: client.get_object(Bucket="bucket", Key=one["Key"])["Body"].read() for one in listed}
