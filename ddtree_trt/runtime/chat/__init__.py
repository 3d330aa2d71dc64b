"""Messages of chats: what templates are given, and what models write: reasoning, content and calls of tools."""
