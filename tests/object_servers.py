"""Servers of object storage on this machine, for tests."""

import contextlib
import dataclasses
import http.client
import http.server
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from dist_ens.storage import Bucket
from test_cluster import free_port

BUCKET = "bucket"
# Python that has moto; another one than that of the tests if theirs has not.
PYTHON = os.environ.get("DIST_ENS_SERVERS", sys.executable)
FAULTS = {503: "SlowDown", 403: "ExpiredToken", 404: "NoSuchBucket"}
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


class Proxy(http.server.ThreadingHTTPServer):
    """A server in front of another one, which can be made to fail, and counts the requests.

    Attributes:
        fault: None, or the status that is answered instead; 0 for no answer until it is None.
    """

    daemon_threads = True

    def __init__(self, server, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.server, self.fault, self.requests = server, None, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self):
        return CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}"}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one(self):
        proxy = self.server
        proxy.requests.append((self.command, self.path))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        while proxy.fault == 0:
            time.sleep(0.05)
        if proxy.fault is not None:
            answer = (
                f"<Error><Code>{FAULTS[proxy.fault]}</Code><Message>no</Message></Error>".encode()
            )
            status, headers = proxy.fault, {}
        else:
            there = http.client.HTTPConnection("127.0.0.1", proxy.server.port)
            there.request(self.command, self.path, body, dict(self.headers))
            got = there.getresponse()
            status, headers, answer = got.status, dict(got.getheaders()), got.read()
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        of_head = headers.get("Content-Length", "0") if self.command == "HEAD" else len(answer)
        self.send_header("Content-Length", of_head)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

    def log_message(self, *_):
        pass


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
