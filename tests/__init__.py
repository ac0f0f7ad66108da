"""Tests by package; shared helpers are in the files of this folder."""
