"""S3 and what speaks like it, through s3fs's own calls.

- Every write says which ETag it replaces (``If-Match``, ``If-None-Match``). A store that knows no such conditions is written
  without them, and the writer's name in the log_path is read before every upload instead.
- A growing object is sent whole below 5 MiB; above, a multipart upload copies it on the server and adds the new bytes.
- An ETag is a checksum: the same content has the same one, so a writer can't be fenced by rewriting an object. That is why
  the name is read before every upload in any case (``unique_versions``).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from runmirror.exceptions import MissingPackageError
from runmirror.storage.remote import (
    ABSENT,
    ANY,
    CONNECT_TIMEOUT,
    SILENCE_TIMEOUT,
    WRITER,
    ConflictError,
    Content,
    Object,
    Remote,
    own_file_system,
)

PART = 16 << 20
"""Bytes of one part of a multipart upload; a whole file up to four times this is one request."""
SMALLEST_PART = 5 << 20
"""S3's own limit for every part but the last."""
_CONFLICTS = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_UNKNOWN = ("NotImplemented", "501")


class S3Remote(Remote):
    """Objects below ``s3://bucket/prefix``."""

    conditional = True
    extends = True
    unique_versions = False
    smallest_head = SMALLEST_PART

    def _connect(self, uri: str, options: dict[str, Any]) -> tuple[Any, str]:
        try:
            from s3fs.core import S3FileSystem
        except ImportError as error:
            raise MissingPackageError(f"{uri} needs s3fs: pip install 'runmirror[s3]'") from error
        limits = {"connect_timeout": CONNECT_TIMEOUT, "read_timeout": SILENCE_TIMEOUT, "retries": {"max_attempts": 1}}
        given = {**options, "config_kwargs": {**limits, **options.get("config_kwargs", {})}}
        fs = own_file_system(S3FileSystem, lambda made: made.__aexit__(None, None, None), given)
        fs.retries = 1  # ours are enough
        root = str(fs._strip_protocol(uri)).rstrip("/")
        self._bucket, _, self._prefix = root.partition("/")
        return fs, root

    def _key(self, path: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}/{path}" if self._prefix else path}

    def _call(self, method: str, path: str, **extra: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._ask(path, lambda: self._fs.call_s3(method, **self._key(path), **extra))
        return found

    def _explain(self, error: Exception, path: str) -> Exception:
        code = _code(error)
        if code in _CONFLICTS:
            return ConflictError(f"{self.uri}/{path}: not the version that was expected")
        return super()._explain(error, path)

    def _stat(self, path: str) -> Object | None:
        found = self._call("head_object", path)
        return Object(
            size=int(found["ContentLength"]),
            mtime=found["LastModified"].timestamp(),
            version=str(found["ETag"]).strip('"'),
            writer=found.get("Metadata", {}).get(WRITER, ""),
        )

    def put(self, path: str, content: Content, kind: str, writer: str, expect: str = ANY) -> Object:
        if content.size > 4 * PART:
            return self._multipart(path, None, content, kind, writer, expect)
        data = content.read(0, content.size)
        answer = self._conditionally("put_object", path, expect, Body=data, **_described(kind, writer))
        return Object(len(data), time.time(), str(answer["ETag"]).strip('"'), writer=writer)

    def extend(self, path: str, head: Object, tail: Content, kind: str, writer: str) -> Object:
        return self._multipart(path, head, tail, kind, writer, head.version)

    def _multipart(
        self, path: str, head: Object | None, content: Content, kind: str, writer: str, expect: str
    ) -> Object:
        upload = self._call("create_multipart_upload", path, **_described(kind, writer))["UploadId"]
        parts: list[dict[str, Any]] = []
        try:
            if head is not None:
                copied = self._call(
                    "upload_part_copy", path, PartNumber=1, UploadId=upload, CopySource=self._key(path),
                    CopySourceIfMatch=head.version
                )  # fmt: skip
                parts.append({"PartNumber": 1, "ETag": copied["CopyPartResult"]["ETag"]})
            step = max(PART, -(-content.size // 9000))
            for start in range(0, content.size, step):
                data = content.read(start, min(step, content.size - start))
                number = len(parts) + 1
                sent = self._call("upload_part", path, PartNumber=number, UploadId=upload, Body=data)
                parts.append({"PartNumber": number, "ETag": sent["ETag"]})
            self._conditionally(
                "complete_multipart_upload", path, expect, UploadId=upload, MultipartUpload={"Parts": parts}
            )
        except BaseException:
            with contextlib.suppress(OSError, ConflictError):
                self._call("abort_multipart_upload", path, UploadId=upload)
            raise
        stored = self.stat(path)
        if stored is None:
            raise FileNotFoundError(f"{self.uri}/{path} was removed")
        return stored

    def _conditionally(self, method: str, path: str, expect: str, **extra: Any) -> dict[str, Any]:
        condition: dict[str, str] = {}
        if self.conditional and expect != ANY:
            condition = {"IfNoneMatch": "*"} if expect == ABSENT else {"IfMatch": expect}
        try:
            return self._call(method, path, **condition, **extra)
        except OSError as error:
            if not condition or _code(error.__cause__ or error) not in _UNKNOWN:
                raise
            self.conditional = False
            return self._call(method, path, **extra)


def _code(error: BaseException) -> str:
    """The code of the S3 error behind an exception of s3fs, "" when there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        if error.__cause__ is None:
            return ""
        error = error.__cause__
    return ""


def _described(kind: str, writer: str) -> dict[str, Any]:
    return {"ContentType": kind, "CacheControl": "no-cache", "Metadata": {WRITER: writer} if writer else {}}
