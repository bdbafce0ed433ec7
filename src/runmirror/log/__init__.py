"""The log_path: its file names, rows, records, and the sources a mirror reads."""
