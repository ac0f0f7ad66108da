"""What several hosts are built on; no file here registers anything."""
