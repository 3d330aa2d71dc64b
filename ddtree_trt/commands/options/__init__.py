"""Options that several commands share, and those made from records."""
