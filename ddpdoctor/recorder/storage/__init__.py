"""What a rank writes: layouts, writers and readers. The readers serve the watcher too."""
