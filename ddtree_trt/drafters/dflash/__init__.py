"""DFlash: its dimensions, how publishers state them, its graph, and the drafter on each engine."""
