"""Servers of object storage on this machine, for tests."""

import contextlib
import dataclasses
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

from dist_ens.storage import Bucket
from test_cluster import free_port

BUCKET = "bucket"
# Python that has moto; another one than that of the tests if theirs has not.
PYTHON = os.environ.get("DIST_ENS_SERVERS", sys.executable)
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


@dataclasses.dataclass(frozen=True)
class S3Server:
    """A server that speaks as S3 does, with one bucket."""

    port: int

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self):
        """Variables of the environment by which the library and the tools of AWS find it."""
        return CREDENTIALS | {"AWS_ENDPOINT_URL": self.endpoint}

    def bucket(self, name=BUCKET):
        spec = {"driver": "s3", "bucket": name, "endpoint": self.endpoint}
        return Bucket(f"s3://{name}", spec | {"aws_region": "us-east-1"})

    def make_bucket(self, name=BUCKET):
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        urllib.request.urlopen(request).close()


@contextlib.contextmanager
def _running(command, port):
    """Runs a server until the context ends."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                time.sleep(0.1)
            yield process
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def s3_server():
    """Starts moto with an empty bucket, and ends it."""
    os.environ.update(CREDENTIALS)  # TensorStore reads them when it opens a bucket.
    server = S3Server(free_port())
    command = [PYTHON, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(server.port)]
    with _running(command, server.port):
        server.make_bucket()
        yield server


@contextlib.contextmanager
def gcs_server():
    """Starts an emulator of Google Cloud Storage with an empty bucket, and ends it.

    It does not look at conditions of writes, and sends all keys of a bucket for a part of them.
    """
    port = free_port()
    program = pathlib.Path(PYTHON).with_name("gcp-storage-emulator")
    options = ["--host=127.0.0.1", f"--port={port}", "--in-memory", f"--default-bucket={BUCKET}"]
    with _running([program, "start", *options], port):
        yield {"TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}"}
