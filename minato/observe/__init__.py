"""What loaders tell of themselves: numbers, a verdict, traces, a live table."""
