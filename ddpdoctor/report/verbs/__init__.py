"""What each command shows: its report as blocks."""
