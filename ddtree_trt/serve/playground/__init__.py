"""A page to chat on and to watch the trees of every round; `serve --playground` adds it to the server."""
