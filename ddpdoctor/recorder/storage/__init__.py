"""What a rank writes: layouts, writers and readers. The watcher uses the readers too."""
