"""Options that several commands share, and those of one subject; files and folders that commands write to."""
