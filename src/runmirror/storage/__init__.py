"""Byte-level file access below one log_path, local or in a cloud."""

from runmirror.storage.cloud import CloudStatus, CloudStorage
from runmirror.storage.lease import TakenError
from runmirror.storage.local import Entry, LocalStorage, Stat, Storage, check_path, local_root, storage_from_uri
from runmirror.storage.push import SpoolInfo, push_spool, spools

__all__ = [
    "CloudStatus",
    "CloudStorage",
    "Entry",
    "LocalStorage",
    "SpoolInfo",
    "Stat",
    "Storage",
    "TakenError",
    "check_path",
    "local_root",
    "push_spool",
    "spools",
    "storage_from_uri",
]
