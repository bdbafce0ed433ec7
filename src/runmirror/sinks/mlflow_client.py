"""MLflow's client, used so that nobody else in the process notices.

Guarantees:

- Inside :func:`quiet` MLflow tries once and gives up after 30 s (the mirror does the waiting), opens a connection per
  request (see :class:`FreshConnections`), prints and logs nothing, and sends no telemetry. The environment, warning
  filters and log levels are as before when the last block ends. The user's active run and tracking URI are never touched.
- Every error of MLflow comes out as :class:`~runmirror.exceptions.Retry`, :class:`~runmirror.exceptions.Refused` or
  :class:`Invalid`, in one line, with credentials masked.
- Importing this module imports no MLflow.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from runmirror.exceptions import OptionError, Refused, Retry, SinkError
from runmirror.log.masking import mask_text, mask_url

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SETTINGS: dict[str, str | None] = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_ACTIVE_MODEL_ID": None,  # else every metric would be linked to the user's model
    "_MLFLOW_ACTIVE_MODEL_ID": None,
}
_DEFAULTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
_LOGGERS = ("mlflow", "alembic")
_guard = threading.RLock()
_depth = 0
_undo = contextlib.ExitStack()


class Invalid(SinkError):
    """MLflow refused a request because of what is in it."""


class GoneError(Retry):
    """The run (or experiment) is no longer there: open again."""


class FreshConnections:
    """A request header provider of MLflow (found by entry point): ``Connection: close``, for our own calls only.

    A server with several workers answers a kept connection 44 ms late (uvicorn leaves TCP_NODELAY unset there).
    """

    def in_context(self) -> bool:
        """Whether a call of ours is going on."""
        return _depth > 0

    def request_headers(self) -> dict[str, str]:
        """The header."""
        return {"Connection": "close"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A block that uses MLflow. Blocks may nest and overlap in threads."""
    global _depth
    with _guard:
        if _depth == 0:
            _undo.enter_context(_settings())
        _depth += 1
    try:
        yield
    finally:
        with _guard:
            _depth -= 1
            if _depth == 0:
                _undo.close()


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    wanted = _SETTINGS | {name: value for name, value in _DEFAULTS.items() if name not in os.environ}
    before = {name: os.environ.get(name) for name in wanted}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _set(wanted)
            import mlflow.tracking  # noqa: F401  (before the levels are read: it sets its own)

            levels = {name: logging.getLogger(name).level for name in _LOGGERS}
            for name in levels:
                logging.getLogger(name).setLevel(logging.CRITICAL)
            try:
                yield
            finally:
                for name, level in levels.items():
                    logging.getLogger(name).setLevel(level)
        finally:
            _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def resolve_uri(given: str | None) -> str:
    """The tracking URI that is meant: MLflow's own default is a database in the working directory.

    Raises:
        OptionError: MLflow's file store, which current versions no longer open, or no URI at all.
    """
    uri = (given or "").strip() or f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    scheme = uri.partition(":")[0].lower() if ":" in uri else uri
    if uri.startswith(("databricks", "uc:", "arn:")):
        return uri
    if "://" not in uri or scheme == "file":
        raise OptionError(
            f"tracking_uri {mask_text(uri)!r} is a folder: MLflow no longer opens its file store; give a server "
            "(http://127.0.0.1:5000) or a database (sqlite:///mlflow.db), and move what you have there with "
            "`mlflow migrate-filestore`"
        )
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        uri = f"sqlite:///{Path(uri[len('sqlite:///') :]).absolute()}"
    return uri.rstrip("/") if scheme in ("http", "https") else uri


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite URI; None for any other URI."""
    return Path(unquote(uri[len("sqlite:///") :].partition("?")[0])) if uri.startswith("sqlite:///") else None


def needs_database(uri: str) -> bool:
    """Whether a URI is that of a database, for which mlflow-skinny is too little."""
    return re.split(r"[+:]", uri, maxsplit=1)[0].lower() in DATABASES


def make_client(uri: str) -> Any:
    """An MlflowClient, inside :func:`quiet`. Raises Refused when a database is asked for and MLflow came without."""
    if needs_database(uri) and importlib.util.find_spec("sqlalchemy") is None:
        raise Refused(
            f"{mask_url(uri)} is a database, which needs the whole of MLflow: pip install 'runmirror[mlflow-local]', or give "
            "the URL of a server (--tracking-uri http://...)"
        )
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


@contextlib.contextmanager
def explained(uri: str) -> Iterator[None]:
    """A block of calls whose errors are told as :func:`explain` tells them."""
    with quiet():
        try:
            yield
        except SinkError:
            raise
        except Exception as error:
            told = explain(error, uri)
            if told is None:
                raise
            raise told from error


def explain(error: Exception, uri: str) -> SinkError | None:
    """What an error of MLflow means; None when it isn't one."""
    code = getattr(error, "error_code", None)
    if code is None:
        return Retry(f"{mask_url(uri)}: {_short(error)}") if isinstance(error, OSError) else None
    where, said = mask_url(uri), _short(error)
    if code in ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED") or "error code 401" in said:
        return Refused(
            f"{where} asks for credentials: set MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    if code == "PERMISSION_DENIED" or "error code 403" in said:
        return Refused(f"{where} doesn't let this user write ({said})")
    if "must be in the 'active' state" in said:
        return GoneError(f"{where}: {said}", after=0.05)
    if code == "RESOURCE_DOES_NOT_EXIST":
        return GoneError(f"{where}: {said}", after=0.05)
    if "error code 404" in said or code == "ENDPOINT_NOT_FOUND":
        return Refused(f"{where} is no MLflow server ({said})")
    if "Detected out-of-date database schema" in said:
        return Refused(f"{where}: the database is of another MLflow version: run `mlflow db upgrade {where}`")
    if code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE"):
        return Invalid(said)
    if "Max retries" in str(error) or "Connection" in said or "timed out" in said:
        why = re.search(r"\[Errno -?\d+\] ([^'\")]+)|(timed out|reset by peer|closed connection)", str(error))
        return Retry(f"{where} does not answer: {(why[1] or why[2]) if why else said}")
    return Retry(f"{where}: {said}")


def _short(error: Exception) -> str:
    return mask_text(re.sub(r"\s+", " ", str(error)))[:400] or type(error).__name__
