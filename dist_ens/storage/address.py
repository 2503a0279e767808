"""Addresses of folders, as a person gives them."""

import os
import re

from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.paths import given_path, shortened
from dist_ens.storage.bucket import Bucket
from dist_ens.storage.disk import Disk
from dist_ens.storage.place import Place

# What names a folder: a path, an address, or a place that was found before.
Folder = str | os.PathLike[str] | Place
# One letter before the colon is a drive of Windows.
_SCHEME = re.compile("([A-Za-z][A-Za-z0-9+.-]+):/")
_ADDRESS = re.compile("(?:gs|s3)://([a-z0-9][a-z0-9._-]{2,62})/(.+)")


def place_of(text: Folder, name: str) -> Place:
    """Returns the folder that a path, `gs://BUCKET/PATH` or `s3://BUCKET/PATH` names.

    Nothing is made or asked yet. `AWS_ENDPOINT_URL` names another server that speaks as S3 does,
    such as MinIO.

    >>> str(place_of("s3://my-bucket/runs/a/", "--workdir"))
    's3://my-bucket/runs/a'
    """
    if not isinstance(text, str | os.PathLike):
        return text
    if not is_address(text):
        return Disk(given_path(text, name))
    address = os.fspath(text).rstrip("/")
    found = _ADDRESS.fullmatch(address)
    parts = found[2].split("/") if found else []
    if not found or {"", ".", ".."} & {*parts}:
        raise UserError(
            f"{name} is {shortened(os.fspath(text))}. Give gs://BUCKET/PATH, s3://BUCKET/PATH, or "
            "the path of a folder that this machine sees. BUCKET has 3 to 63 small letters, digits "
            "and hyphens, and PATH has no empty part and no '..'."
        )
    spec: JsonDict = {"bucket": found[1], "path": f"{found[2]}/"}
    if address.startswith("gs"):
        return Bucket(address, {"driver": "gcs", **spec})
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    # Without it the library of AWS would complain of files that are not there.
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}
    return Bucket(address, {"driver": "s3", **spec})


def file_at(text: str | os.PathLike[str], name: str) -> tuple[Place, str]:
    """Returns the folder and the name of the file that a path or an address names."""
    if is_address(text):
        place = place_of(text, name)
        return place.parent, place.name
    path = given_path(text, name)
    return Disk(path.parent), path.name


def is_address(text: str | os.PathLike[str]) -> bool:
    """Returns whether a text has a scheme, such as `s3:`, and is no local path."""
    return isinstance(text, str | os.PathLike) and bool(
        _SCHEME.match(str(os.fspath(text)).strip(" '\""))
    )
