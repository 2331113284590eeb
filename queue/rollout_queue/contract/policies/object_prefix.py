"""Where a policy is in an S3-compatible store: a bucket, and what the names of its objects begin with."""

import re
from dataclasses import dataclass

URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<path>(/[A-Za-z0-9._~@=+-]+)*)/?")
"""Other names of buckets and keys exist; these need no escapes anywhere."""


@dataclass(frozen=True)
class ObjectPrefix:
    """s3://bucket/path: each file has its name below that, as in a directory."""

    bucket: str
    path: str
    """Without a slash at its ends; empty for the whole bucket."""

    @classmethod
    def parse(cls, url: str) -> "ObjectPrefix":
        """Raises ValueError for anything but s3://bucket/path. The error does not repeat the URL."""
        found = URL.fullmatch(url)
        if found is None:
            raise ValueError("is not a plain URL s3://bucket/path")
        path = found["path"].strip("/")
        if {".", ".."} & set(path.split("/")):
            raise ValueError("has a segment . or ..")
        return cls(found["bucket"], path)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.path}".rstrip("/")

    def below(self, name: str) -> "ObjectPrefix":
        """The object or the prefix with this name in this one."""
        return ObjectPrefix(self.bucket, f"{self.path}/{name}".lstrip("/"))

    def is_under(self, other: "ObjectPrefix") -> bool:
        """Whether it is `other`, or lies in it."""
        return self.bucket == other.bucket and f"{self.path}/".startswith(f"{other.path}/".lstrip("/"))
