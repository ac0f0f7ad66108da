"""Parts of pictures that commands share: colour bars, and labels that do not overlap."""
