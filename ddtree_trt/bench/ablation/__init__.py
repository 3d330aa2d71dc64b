"""Questions about trees, answered for an engine: by replay of its drafts, and by measuring where time is the answer."""
