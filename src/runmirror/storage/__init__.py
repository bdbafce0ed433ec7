"""Byte-level file access below one log_path, local or in a cloud."""

from runmirror.storage.cloud import CloudStorage
from runmirror.storage.local import Entry, LocalStorage, Stat, Storage, check_path, local_root, storage_from_uri

__all__ = ["CloudStorage", "Entry", "LocalStorage", "Stat", "Storage", "check_path", "local_root", "storage_from_uri"]
